"""Backend `cpu`: the compiled kernels of csrc/. Tensors become addresses and strides here, and nowhere else in the package.

The module `_C` knows no torch: it gets integers. Whatever is a fact at the waist (shapes, dtypes, contiguous per-token tensors) is not
checked again. The number of threads is torch's at the time of the call; no result depends on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

import grpo_kernels._C as _C

__all__ = ["CpuBackend", "load"]

_INTERFACE = 1  # of csrc/bindings.cpp

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # DType of csrc/kernels.h
_SCALES = {"group": 0, "batch": 1, "none": 2}  # AdvantageScale
_BASELINES = {"mean": 0, "leave_one_out": 1}  # Baseline


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [_address(tensor) for tensor in tensors]


def _shape(logits: Tensor) -> tuple[int, int, int, int]:
    return (_DTYPES[logits.dtype], *logits.shape)


def _rows(logits: Tensor) -> tuple[int, int, int]:
    return (logits.data_ptr(), logits.stride(0), logits.stride(1))


class CpuBackend:
    """`Backend` over `_C`'s CPU kernels."""

    device = "cpu"

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
        targets, outputs = _addresses(token_ids, active, temperature), _addresses(logps, row_max, log_sum, entropy)
        _C.logprobs_forward(_shape(logits), _rows(logits), targets, outputs, torch.get_num_threads())

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
        inputs = _addresses(advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights)
        outputs = _addresses(loss, policy_loss, dlogps, kl, clipped)
        threads = torch.get_num_threads()
        _C.objective(logps.numel(), _address(logps), _address(entropy), inputs, _address(active), params, outputs, threads)

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
        targets, saved = _addresses(token_ids, active, temperature), _addresses(row_max, log_sum, entropy)
        upstream, threads = (_address(dlogps), _address(dentropy)), torch.get_num_threads()
        _C.logprobs_backward(_shape(logits), _rows(logits), targets, saved, *upstream, _rows(dlogits), threads)

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
        targets = _addresses(token_ids, active, temperature)
        inputs = _addresses(advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights)
        row_outputs = _addresses(logps, None, None, entropy)  # nothing is saved: there is no backward
        token_outputs = _addresses(loss, policy_loss, None, kl, clipped)
        threads = torch.get_num_threads()
        _C.loss_and_grad(_shape(logits), _rows(logits), targets, inputs, params, row_outputs, token_outputs, _rows(dlogits), threads)

    def scale(self, dlogits: Tensor, factor: Tensor) -> None:
        _C.scale(_shape(dlogits), _rows(dlogits), _address(factor), torch.get_num_threads())

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
        groups = (_address(values), _address(order), _address(offsets), values.numel(), offsets.numel() - 1)
        options = (_SCALES[scale], _BASELINES[baseline], ddof, eps)
        if step_ends is None:
            _C.group_advantages(*groups, *options, _address(out))
        else:
            batch, steps = step_ends.shape
            _C.process_advantages(*groups, *options, _address(step_ends), batch, steps, out.shape[1], _address(out))


def load(name: str) -> CpuBackend:
    """The backend of that name; raises ImportError or RuntimeError with the reason where it cannot run."""
    if name != "cpu":
        raise RuntimeError("this build has no CUDA kernels")
    if getattr(_C, "interface", None) != _INTERFACE:
        raise ImportError(f"{_C.__file__} was compiled from another version of the package and would compute wrong numbers; build it again")
    _C.isa()  # an unusable GRPO_KERNELS_ISA is reported now, not in the middle of a forward
    return CpuBackend()
