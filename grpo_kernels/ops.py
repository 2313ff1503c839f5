"""The entry points as torch.library operators: a schema, an empty fake, and dispatch to a backend.

Every result is an out-argument, so there is nothing to infer when torch.compile or a FakeTensor traces them. `backend` is a name, or ""
for the best one. What depends on the values of tensors is checked here, where a compiled graph does not see the branch. An operator whose
name ends in `_` writes the gradient over its first tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import backends

__all__ = [
    "TOKENS",
    "check_values",
    "define",
    "first_order",
    "group_advantages",
    "logprobs_backward",
    "logprobs_backward_",
    "logprobs_forward",
    "loss_and_grad",
    "loss_and_grad_",
    "objective",
    "once",
    "scale_",
    "sequence_index",
]

# The groups of arguments that several entry points share; backends.Backend says what each tensor is.
_ROWS = "Tensor token_ids, Tensor? active, Tensor temperature"
TOKENS = "Tensor advantages, Tensor? old_logps, Tensor? ref_logps, Tensor? policy_weights, Tensor weights, Tensor? entropy_weights"
_STATS = "Tensor row_max, Tensor log_sum, Tensor entropy, Tensor dlogps, Tensor? dentropy"
_LOSS = "Tensor(a!) loss, Tensor(b!) policy_loss"
_METRICS = "Tensor(d!) kl, Tensor(e!) clipped"


def _operator(name: str, arguments: str, check: Callable[..., None] | None = None, like: int = 0) -> Callable[..., None]:
    """Define `grpo_kernels::name(str backend, arguments)` over the backend's function of that name (without the `_`).

    The device and dtype of argument `like` pick the backend; `check` sees the first four arguments.
    """
    inplace = arguments.startswith("Tensor(z!) logits")
    names = [argument.split()[-1] for argument in arguments.split(", ")]

    def implementation(backend: str, *values: Any) -> None:
        entry_point = getattr(backends.get(backend, values[like].device, values[like].dtype), name.rstrip("_"))
        if check is not None:
            check(*values[:4])
        # Hyper-parameters come as a tensor on the CPU: torch.compile would make each new value of a float its own graph.
        values = tuple(value.tolist() if name == "params" else value for name, value in zip(names, values))
        entry_point(*values, *(values[:1] if inplace else ()))

    return define(name, arguments, implementation)


def define(name: str, arguments: str, implementation: Callable[..., None]) -> Callable[..., None]:
    """The operator `grpo_kernels::name(str backend, arguments)`, which returns nothing and writes what its arguments mark with `!`."""
    mutates = [argument.split()[-1] for argument in arguments.split(", ") if "!" in argument]
    op = torch.library.custom_op(f"grpo_kernels::{name}", implementation, mutates_args=mutates, schema=f"(str backend, {arguments}) -> ()")
    op.register_fake(lambda *_: None)
    return op


@torch.library.custom_op("grpo_kernels::sequence_index", mutates_args=())
def sequence_index(cu_seqlens: Tensor, count: int) -> Tensor:
    """The sequence (count,) of each packed row; rows from cu_seqlens[-1] on get the number of sequences. Offsets are checked on the CPU."""
    if _looks(cu_seqlens):
        steps = cu_seqlens.diff()
        if cu_seqlens[0] != 0 or (steps < 0).any() or cu_seqlens[-1] > count:
            raise ValueError(f"cu_seqlens: expected offsets that ascend from 0 to at most the {count} rows, got {cu_seqlens.tolist()}")
    return torch.searchsorted(
        cu_seqlens[1:].contiguous(), torch.arange(count, device=cu_seqlens.device, dtype=cu_seqlens.dtype), right=True
    )


@sequence_index.register_fake
def _(cu_seqlens: Tensor, count: int) -> Tensor:
    return cu_seqlens.new_empty(count, dtype=torch.int64)


def _looks(x: Tensor) -> bool:
    """Whether values are checked: on the CPU; on a GPU only with GRPO_KERNELS_DEBUG=1, since looking would synchronise."""
    return x.device.type == "cpu" or os.environ.get("GRPO_KERNELS_DEBUG") == "1"


def _check_values(logits: Tensor, token_ids: Tensor, active: Tensor | None, temperature: Tensor) -> None:
    check_values(logits.shape[-1], token_ids, active, temperature)


def check_values(vocab: int, token_ids: Tensor, active: Tensor | None, temperature: Tensor) -> None:
    """Ids inside the vocabulary, temperatures positive, where `_looks`."""
    if not _looks(token_ids):
        return
    _raise_where((token_ids < 0) | (token_ids >= vocab), active, IndexError, "token id", token_ids, f"in [0, {vocab})")
    _raise_where(~((temperature > 0) & temperature.isfinite()), active, ValueError, "temperature", temperature, "positive and finite")


def _raise_where(bad: Tensor, active: Tensor | None, error: type[Exception], name: str, values: Tensor, expected: str) -> None:
    bad = bad if active is None else bad & active.bool()
    if bad.any():
        position = tuple(bad.nonzero()[0].tolist())
        raise error(f"{name} at position {position}: expected {expected}, got {values[position].item()}")


logprobs_forward = _operator(
    "logprobs_forward",
    f"Tensor logits, {_ROWS}, Tensor(a!) logps, Tensor(b!) row_max, Tensor(c!) log_sum, Tensor(d!) entropy",
    check=_check_values,
)
objective = _operator(
    "objective",
    f"Tensor logps, Tensor? entropy, {TOKENS}, Tensor? active, Tensor params, {_LOSS}, Tensor(c!) dlogps, {_METRICS}",
)
logprobs_backward = _operator("logprobs_backward", f"Tensor logits, {_ROWS}, {_STATS}, Tensor(a!) dlogits")
logprobs_backward_ = _operator("logprobs_backward_", f"Tensor(z!) logits, {_ROWS}, {_STATS}")
loss_and_grad = _operator(
    "loss_and_grad",
    f"Tensor logits, {_ROWS}, {TOKENS}, Tensor params, Tensor(f!) logps, Tensor(g!) entropy, {_LOSS}, {_METRICS}, Tensor(h!) dlogits",
    check=_check_values,
)
loss_and_grad_ = _operator(
    "loss_and_grad_",
    f"Tensor(z!) logits, {_ROWS}, {TOKENS}, Tensor params, Tensor(f!) logps, Tensor(g!) entropy, {_LOSS}, {_METRICS}",
    check=_check_values,
)
scale_ = _operator("scale_", "Tensor(a!) dlogits, Tensor factor")
group_advantages = _operator(
    "group_advantages",
    "Tensor values, Tensor? order, Tensor offsets, str scale, str baseline, int ddof, float eps, Tensor? step_ends, Tensor(a!) out",
    like=-1,  # the values are float64 on every backend, the result is float32
)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, *origins):  # type: ignore[no-untyped-def]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        raise RuntimeError("grpo_kernels has no second derivative: a gradient of its losses cannot be differentiated again")


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return once(gradient, *ctx.saved_tensors)


def first_order(x: Tensor) -> Tensor:
    """x, whose gradient cannot be differentiated again: for terms that hold a gradient of ours as a constant."""
    return _FirstOrder.apply(x)


def once(gradient: Tensor, *origins: Tensor | None) -> Tensor:
    """The gradient, marked under create_graph=True so that differentiating it again raises instead of being silently incomplete.

    `origins` is what the gradient depends on: torch.autograd.grad visits only what leads to its inputs, and has to come by here.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        gradient = _Once.apply(gradient, *origins)
    return gradient
