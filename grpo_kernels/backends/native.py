"""Backends `cpu`, `cuda` and `cuda_on_host`: the compiled kernels of csrc/. Tensors become addresses and strides here, and nowhere else
in the package.

The module `_C` knows no torch: it gets integers. Whatever is a fact at the waist (shapes, dtypes, contiguous per-token tensors) is not
checked again. On the CPU the number of threads is torch's at the time of the call; no result depends on it. CUDA kernels are queued on
torch's current stream of the tensors' device. `cuda_on_host` is for tests: the CUDA kernels compiled for the CPU, in a module of their own
that `make cuda-on-host` builds and GRPO_KERNELS_CUDA_ON_HOST names.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import grpo_kernels._C as _C

__all__ = ["NativeBackend", "load"]

_INTERFACE = 2  # of csrc/bindings.cpp

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


class NativeBackend:
    """`Backend` over a face of the native kernels. `where(tensor)` says where a call runs: `Kernels` in _C.pyi."""

    def __init__(self, kernels: _C.Kernels, device: str, where: Callable[[Tensor], object]) -> None:
        self.device: str | None = device
        self._kernels = kernels
        self._where = where

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
        self._kernels.logprobs_forward(_shape(logits), _rows(logits), targets, outputs, self._where(logits))

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
        where = self._where(logps)
        self._kernels.objective(logps.numel(), _address(logps), _address(entropy), inputs, _address(active), params, outputs, where)

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
        upstream = (_address(dlogps), _address(dentropy))
        self._kernels.logprobs_backward(_shape(logits), _rows(logits), targets, saved, *upstream, _rows(dlogits), self._where(logits))

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
        outputs, where = (row_outputs, token_outputs, _rows(dlogits)), self._where(logits)
        self._kernels.loss_and_grad(_shape(logits), _rows(logits), targets, inputs, params, *outputs, where)

    def scale(self, dlogits: Tensor, factor: Tensor) -> None:
        self._kernels.scale(_shape(dlogits), _rows(dlogits), _address(factor), self._where(dlogits))

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
        where = self._where(values)
        if step_ends is None:
            self._kernels.group_advantages(*groups, *options, _address(out), where)
        else:
            normalised = torch.empty_like(values)  # scratch of the CUDA kernels
            batch, steps = step_ends.shape
            ends = (_address(step_ends), batch, steps, out.shape[1])
            self._kernels.process_advantages(*groups, *options, *ends, _address(normalised), _address(out), where)


def load(name: str) -> NativeBackend:
    """The backend of that name; raises ImportError or RuntimeError with the reason where it cannot run."""
    if name == "cuda_on_host":
        return over_cuda_on_host(_import_from(Path(os.environ["GRPO_KERNELS_CUDA_ON_HOST"])))
    return over_cuda(_C) if name == "cuda" else over_cpu(_C)


def over_cpu(module: ModuleType) -> NativeBackend:
    _refuse_another_version(module)
    module.isa()  # an unusable GRPO_KERNELS_ISA is reported now, not in the middle of a forward
    return NativeBackend(module.cpu, "cpu", lambda _: torch.get_num_threads())


def over_cuda(module: ModuleType) -> NativeBackend:
    _refuse_another_version(module)
    if not module.cuda_archs():
        raise RuntimeError("this build has no CUDA kernels: nvcc was missing when it was made, or unwanted (README.md, Install)")
    if torch.version.cuda is None:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device that it can use")
    capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    reason = too_old(module.cuda_archs(), capabilities, module.cuda.toolkit, _cuda_of_driver())
    if reason:
        raise RuntimeError(reason)
    return NativeBackend(module.cuda, "cuda", lambda x: (x.device.index, torch.cuda.current_stream(x.device).cuda_stream))


def over_cuda_on_host(module: ModuleType) -> NativeBackend:
    _refuse_another_version(module)
    return NativeBackend(module.cuda, "cpu", lambda _: (0, 0))


def _refuse_another_version(module: ModuleType) -> None:
    if getattr(module, "interface", None) != _INTERFACE:
        raise ImportError(
            f"{module.__file__} was compiled from another version of the package and would compute wrong numbers; build it again"
        )


def _import_from(path: Path) -> ModuleType:
    """The extension module at that path, whose name is that of the file up to the first dot."""
    name = path.name.partition(".")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = sys.modules[name] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader, origin=str(path)))
    loader.exec_module(module)
    return module


def _cuda_of_driver() -> int:
    """The newest CUDA that the driver serves, as 1000 major + 10 minor."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def too_old(archs: tuple[int, ...], capabilities: list[tuple[int, int]], toolkit: str, driver: int) -> str | None:
    """Why no device can run what is inside. A driver serves kernels of its own major version of CUDA and of older ones."""
    newest = max(10 * major + minor for major, minor in capabilities)
    if newest < min(archs):
        return f"the newest device is sm_{newest}; the CUDA kernels of this build need sm_{min(archs)} or newer"
    if driver // 1000 < int(toolkit.partition(".")[0]):
        return (
            f"the driver serves CUDA {driver // 1000}.{driver % 1000 // 10} and this build was made by nvcc {toolkit}: update the driver, "
            f"or build with an nvcc {driver // 1000}.x"
        )
    return None
