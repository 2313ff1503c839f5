"""Backend `triton`: tensors become launches of the kernels beside, and nothing else happens here.

Importing this file needs no GPU and no C compiler; importing the kernels needs Triton, so `load` does it.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from grpo_kernels.backends.triton.configs import VECTOR_BYTES, tile_for

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["TritonBackend", "load"]

OLDEST = (3, 2)  # comes with torch 2.6
TOKENS = 256  # tokens, or values, of a program that reads no logits
_INTERPRETER = threading.Lock()


def load(name: str) -> TritonBackend:
    """The backend; raises ImportError or RuntimeError with the reason where it cannot run."""
    try:
        import triton
    except ImportError as error:
        raise ImportError(
            f"Triton is not installed ({error}); pip install 'triton>=3.2', or a CUDA build of torch, which brings it"
        ) from None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(f"Triton {triton.__version__} is too old; it has to be {OLDEST[0]}.{OLDEST[1]} or newer")
    from grpo_kernels.backends.triton import jit

    if jit.INTERPRETED:
        return TritonBackend("cpu", "interpreter")
    if torch.version.hip:
        raise RuntimeError("never tried on ROCm; use backend 'torch' there")
    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA GPU (TRITON_INTERPRET=1, set before Triton is imported, runs the kernels on the CPU, slowly)")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise RuntimeError(f"the GPU has compute capability {major}.{minor}; 8.0 is the oldest that was compiled for")
    return TritonBackend("cuda", 10 * major + minor)


def _is_aligned(logits: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and is a whole number of 16-byte vectors long."""
    per_vector = VECTOR_BYTES // logits.element_size()
    batch, time, vocab = logits.shape
    strides = (logits.stride(0) if batch > 1 else 0, logits.stride(1) if time > 1 else 0)
    return logits.data_ptr() % VECTOR_BYTES == 0 and all(n % per_vector == 0 for n in (vocab, *strides))


class TritonBackend:
    """`Backend` over the Triton kernels, on a GPU or in Triton's interpreter."""

    def __init__(self, device: str, architecture: int | str) -> None:
        self.device, self.architecture = device, architecture

    @property
    def kernels(self) -> ModuleType:
        from grpo_kernels.backends.triton import kernels

        return kernels

    def launch(self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, int], warps: int, like: Tensor) -> None:
        # Contraction into fma is the compiler's choice from place to place; without it, kernels that share a function agree to the bit.
        if programs:
            options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
            self.queue(kernel, programs, arguments, constants, options, like)

    def queue(
        self, kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, int], options: dict[str, Any], like: Tensor
    ) -> None:
        """Start the programs on the current stream of the device of `like`."""
        with _running_on(like.device):
            kernel[(programs,)](*arguments, **constants, **options)

    def _launch_rows(self, kernel: Any, arguments: tuple[Any, ...], *logits: Tensor) -> None:
        """One program a row. All of `logits` have one shape, and are walked in one split."""
        batch, time, vocab = logits[0].shape
        tile = tile_for(self.architecture, logits[0].dtype, vocab, all(map(_is_aligned, logits)))
        constants = {"REPEAT": tile.repeat, "LANES": tile.lanes, "PACK": tile.pack}
        self.launch(kernel, batch * time, arguments, constants, tile.warps, logits[0])

    def logprobs_forward(
        self,
        logits: Tensor,
        token_ids: Tensor,
        active: Tensor | None,
        temperature: Tensor,
        logps: Tensor,
        row_max: Tensor,
        log_sum: Tensor,
        entropy: Tensor,
    ) -> None:
        targets, outputs = (token_ids, _bytes(active, logits), temperature), (logps, row_max, log_sum, entropy)
        self._launch_rows(self.kernels.logprobs_forward, (*_rows(logits), *logits.shape[1:], *targets, *outputs), logits)

    def objective(
        self,
        logps: Tensor,
        entropy: Tensor | None,
        advantages: Tensor,
        old_logps: Tensor | None,
        ref_logps: Tensor | None,
        policy_weights: Tensor | None,
        weights: Tensor,
        entropy_weights: Tensor | None,
        active: Tensor | None,
        params: list[float],
        loss: Tensor,
        policy_loss: Tensor,
        dlogps: Tensor,
        kl: Tensor,
        clipped: Tensor,
    ) -> None:
        inputs = _floats((advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights), logps)
        outputs, rows = (loss, policy_loss, dlogps, kl, clipped), logps.numel()
        arguments = (logps, *_floats((entropy,), logps), *inputs, _bytes(active, logps), rows, *_numbers(params), *outputs)
        self.launch(self.kernels.objective, -(-rows // TOKENS), arguments, {"BLOCK": TOKENS}, 4, logps)

    def logprobs_backward(
        self,
        logits: Tensor,
        token_ids: Tensor,
        active: Tensor | None,
        temperature: Tensor,
        row_max: Tensor,
        log_sum: Tensor,
        entropy: Tensor,
        dlogps: Tensor,
        dentropy: Tensor | None,
        dlogits: Tensor,
    ) -> None:
        targets, saved = (token_ids, _bytes(active, logits), temperature), (row_max, log_sum, entropy)
        upstream = (dlogps, *_floats((dentropy,), dlogps))
        arguments = (*_rows(logits), *logits.shape[1:], *targets, *saved, *upstream, *_rows(dlogits))
        self._launch_rows(self.kernels.logprobs_backward, arguments, logits, dlogits)

    def loss_and_grad(
        self,
        logits: Tensor,
        token_ids: Tensor,
        active: Tensor | None,
        temperature: Tensor,
        advantages: Tensor,
        old_logps: Tensor | None,
        ref_logps: Tensor | None,
        policy_weights: Tensor | None,
        weights: Tensor,
        entropy_weights: Tensor | None,
        params: list[float],
        logps: Tensor,
        entropy: Tensor,
        loss: Tensor,
        policy_loss: Tensor,
        kl: Tensor,
        clipped: Tensor,
        dlogits: Tensor,
    ) -> None:
        targets = (token_ids, _bytes(active, logits), temperature)
        inputs = _floats((advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights), logps)
        outputs = (logps, entropy, loss, policy_loss, kl, clipped)
        arguments = (*_rows(logits), *logits.shape[1:], *targets, *inputs, *_numbers(params), *outputs, *_rows(dlogits))
        self._launch_rows(self.kernels.loss_and_grad, arguments, logits, dlogits)

    def scale(self, dlogits: Tensor, factor: Tensor) -> None:
        self._launch_rows(self.kernels.scale, (*_rows(dlogits), *dlogits.shape[1:], factor), dlogits)

    def group_advantages(
        self,
        values: Tensor,
        order: Tensor | None,
        offsets: Tensor,
        scale: str,
        baseline: str,
        ddof: int,
        eps: float,
        step_ends: Tensor | None,
        out: Tensor,
    ) -> None:
        from grpo_kernels.backends.triton import advantages

        def launch(kernel: Any, programs: int, *arguments: Any) -> None:
            self.launch(kernel, programs, arguments, {"BLOCK": TOKENS}, 4, values)

        groups, none = offsets.numel() - 1, values.new_empty(0, dtype=torch.int64)
        steps = (none, -1) if step_ends is None else (step_ends, out.shape[1])
        deviation = values.new_empty(1 if scale == "batch" else 0)
        if scale == "batch":
            launch(advantages.batch_deviation, 1, values, none, *steps, values.numel(), ddof, deviation)
        options = (deviation, scale != "none", baseline == "leave_one_out", ddof, eps)
        normalised = out if step_ends is None else torch.empty_like(values)
        launch(advantages.normalise, groups, values, none if order is None else order, offsets, *steps, *options, normalised)
        if step_ends is not None:
            rows, time = out.shape
            blocks = -(-time // TOKENS)
            launch(advantages.sum_of_later_steps, rows * blocks, normalised, step_ends, step_ends.shape[1], time, blocks, out)


def _rows(logits: Tensor) -> tuple[Tensor, int, int]:
    return logits, logits.stride(0), logits.stride(1)


# An absent input is an empty tensor: its address is null, which the kernels test at run time. None would be a compile of its own.
def _floats(tensors: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


def _bytes(active: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8) if active is None else active


def _numbers(params: list[float]) -> tuple[float, ...]:
    """ObjectiveParams as the kernels take them."""
    objective, epsilon, epsilon_high, delta, dual_clip, sapo_pos, sapo_neg, kl_estimator, max_log_ratio, beta = params
    ratio = (1.0 - epsilon, 1.0 + epsilon_high, epsilon_high)
    return int(objective), *ratio, delta, dual_clip, sapo_pos, sapo_neg, int(kl_estimator), max_log_ratio, beta


@contextlib.contextmanager
def _running_on(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:  # the interpreter, which knows one program at a time; of infinities and NaN, its daily bread, numpy would warn
        with _INTERPRETER, numpy.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
