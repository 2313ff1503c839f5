"""Who is measured on a GPU: the kernels of this package by backend, and those of others beside what runs everywhere.

Each is used as its authors document it. What is not installed is Missing, with the reason. In Triton's interpreter the Triton kernels run
on a CPU too, Liger's and TRL's among them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.implementations import IMPLEMENTATIONS, Implementation, Missing, ours, peer, published_steps
from benchmarks.inputs import BETA, EPSILON, Inputs

BACKENDS = ("triton", "cuda", "cpu")  # "cpu" in a dry run


@functools.cache
def imported(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever an import of somebody else's package may raise
        raise Missing(f"{module}: {type(error).__name__}: {error}") from None


def _needs(module: str, name: str) -> Callable[[], None]:
    return lambda: imported(module, name) and None


# -- Liger: the loss inside its logit kernels; (B, T + 1, V) contiguous, the gradient in the logits' storage in the backward

_LIGER = "liger_kernel.transformers.grpo_loss"


def _liger_logps(logits: Tensor, inputs: Inputs) -> Tensor:
    function = imported(_LIGER, "fused_selective_log_softmax")
    return function(logits, inputs.completion_ids, 1.0, inputs.completion_mask.int())


def _liger_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    return imported(_LIGER, "triton_grpo_loss")(
        logits, inputs.old_logps, inputs.ref_logps, inputs.completion_ids, inputs.advantages, inputs.completion_mask.int(),
        temperature=1.0, beta=BETA, eps_low=EPSILON, eps_high=EPSILON, inplace=True, loss_type="grpo",
        importance_sampling_level=inputs.level, reduce=True,
    )[0]  # fmt: skip


# -- TRL: what selective_log_softmax runs on a GPU since it has a kernel; `trl_steps` is what it runs without

_TRL = ("trl.kernels.logprob_entropy", "selective_log_softmax_and_entropy")


def _trl_kernel(logits: Tensor, ids: Tensor) -> Tensor:
    return imported(*_TRL)(logits, ids)[0]


# -- flash-attn's cross entropy, the gradient in the logits' storage in the backward

_FLASH = ("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")


def _flash_attn(logits: Tensor, ids: Tensor) -> Tensor:
    losses, _ = imported(*_FLASH)(logits.flatten(0, 1), ids.flatten(), inplace_backward=True)
    return -losses.view_as(ids)


ON_GPU: dict[str, Implementation] = {
    **{name: IMPLEMENTATIONS[name] for name in ("naive", "naive_float", "compile_where", "compile_cross_entropy")},
    **{
        implementation.name: implementation
        for implementation in (
            peer("trl_steps", published_steps, rounds_logps=True),
            peer("trl_kernel", _trl_kernel, opaque=True, needs=_needs(*_TRL)),
            peer("flash_attn", _flash_attn, opaque=True, overwrites=True, needs=_needs(*_FLASH)),
            Implementation(
                "liger", _liger_logps, _liger_loss, overwrites=True, spare=True, opaque=True, needs=_needs(_LIGER, "triton_grpo_loss")
            ),
            *(ours(name, name) for name in BACKENDS),
            *(ours(f"{name}_one_pass", name, one_pass=True) for name in BACKENDS),
            *(ours(f"{name}_inplace_backward", name, inplace=True) for name in BACKENDS),
            *(ours(f"{name}_inplace", name, one_pass=True, inplace=True) for name in BACKENDS),
        )
    },
}
