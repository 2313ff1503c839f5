"""The waist: the entry points that every backend provides, and who provides them on which device.

Shapes at the waist are facts, checked by the public functions above:

* `logits`, `dlogits`  (B, T, V), stride 1 over V, any strides over B and T; float32, bfloat16 or float16 (float64: `torch` alone)
* everything per token (B, T) contiguous: `token_ids` int64, `active` uint8 or None (all rows), `clipped` int8, the rest float32
  (float64 on float64 logits)
* the caller allocates every output. An inactive row is read nowhere; its outputs are 0 and its gradient row is zeros.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Backend", "available", "get"]


class Backend(Protocol):
    """What a backend is: the type of device whose tensors it takes, and six functions: inputs first, then parameters, then outputs."""

    device: str | None  # "cpu", "cuda"; None: any

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
        """One read of the logits: logp of `token_ids`, the row maximum m, log sum exp((z - m) / temperature), entropy."""

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
        """Each token's share of the loss (weights applied) and its derivative with respect to `logps`, in one visit.

        loss = weights (policy_weights policy + beta kl) - entropy_weights entropy; policy_loss = weights policy_weights policy.
        `params` is `ObjectiveParams.for_kernels()` as a list; `entropy` is None exactly where `entropy_weights` is.
        """

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
        """dlogits from dlogps and dentropy. A row whose two coefficients are 0 is zero-filled unread, unless its
        `log_sum` is NaN (a degenerate row): that row is filled with NaN. `dlogits` may be `logits` itself."""

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
        """The three functions above for one row while it is on chip: one read, one write. `dlogits` may be `logits` itself."""

    def scale(self, dlogits: Tensor, factor: Tensor) -> None:
        """dlogits *= factor (0-d), on the device; leaves at once where factor is 1."""

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
        """Normalise float64 `values` (M,) within groups. Group g holds values[order[k]] for offsets[g] <= k < offsets[g + 1]
        (int64; `order` None: values in order). NaN values are excluded and get 0.

        Without `step_ends`, `out` (M,) float32 is the result. With `step_ends` (B, K) int64 (-1: no step) and M = B K, `out`
        (B, T) float32 is the reverse cumulative sum of each output's normalised step rewards.
        """


# name -> the module here whose `load(name)` gives the backend or raises the reason
_LOADERS = {"torch": "eager", "cpu": "native", "triton": "triton", "cuda": "native"}
if os.environ.get("GRPO_KERNELS_CUDA_ON_HOST"):  # a module that `make cuda-on-host` built: the CUDA kernels on a CPU, for tests
    _LOADERS["cuda_on_host"] = "native"


@functools.cache
def _load(name: str) -> Backend | str:
    """The backend, or the reason why it cannot be used on this machine."""
    try:
        module = importlib.import_module(f"{__name__}.{_LOADERS[name]}")
        backend: Backend = module.load(name)
        return backend
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def available() -> dict[str, str]:
    """Every backend's name -> exactly "available" where it can be used, else the reason why not.

    >>> available()["torch"]
    'available'
    """
    return {name: reason if isinstance(reason := _load(name), str) else "available" for name in _LOADERS}


def get(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend of that name for tensors of that device and dtype; "" stands for GRPO_KERNELS_BACKEND or else the best one.

    Raises ValueError for an unknown name or a device it does not serve, TypeError for a dtype it does not know, and RuntimeError
    with the reason where it is not available.
    """
    chosen = name or os.environ.get("GRPO_KERNELS_BACKEND", "") or _best(device, dtype)
    if chosen not in _LOADERS:
        argument = "backend" if name else "GRPO_KERNELS_BACKEND"
        raise ValueError(f"{argument}: expected one of {', '.join(_LOADERS)}, got {chosen!r}")
    if chosen != "torch" and dtype == torch.float64:
        raise TypeError(f"backend {chosen!r} takes float32, bfloat16 or float16; float64 is served by backend 'torch' alone")
    backend = _load(chosen)
    if isinstance(backend, str):
        raise RuntimeError(f"backend {chosen!r} is not available: {backend}")
    if backend.device not in (None, device.type):
        raise ValueError(f"backend {chosen!r} takes tensors on {backend.device}, got one on {device}")
    return backend


def _best(device: torch.device, dtype: torch.dtype) -> str:
    """The preferred kernels of that kind of device; where they are missing, `torch` with a warning that says why."""
    # On a GPU the choice between `triton` and `cuda` awaits a measurement. Neither was ever run on ROCm, whose tensors are "cuda" too.
    preferred = {"cpu": "cpu", "cuda": "torch" if torch.version.hip else "triton"}.get(device.type, "torch")
    if preferred == "torch" or dtype == torch.float64:
        return "torch"
    backend = _load(preferred)
    if isinstance(backend, str) or backend.device != device.type:
        reason = backend if isinstance(backend, str) else f"it takes tensors on {backend.device}"
        warnings.warn(
            f"grpo_kernels: the backend {preferred!r} is not available ({reason}); the slower backend 'torch' is used",
            RuntimeWarning,
            stacklevel=2,
        )
        return "torch"
    return preferred


_load("cpu")  # the native module is loaded with the package: it has to see every fork
