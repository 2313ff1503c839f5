"""The loss per token as an autograd function whose forward already holds the derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.options import ObjectiveParams, TokenInputs
from grpo_kernels.reference import TokenObjective, times

__all__ = ["empty_outputs", "token_objective", "total", "weighted_sum"]


def empty_outputs(logps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss, policy_loss, kl and clipped of each token, for the kernels to fill."""
    return torch.empty_like(logps), torch.empty_like(logps), torch.empty_like(logps), torch.empty_like(logps, dtype=torch.int8)


def total(x: Tensor) -> Tensor:
    """Sum over tokens; in float64, so that the split over threads does not show."""
    return x.sum(dtype=torch.float64).to(x.dtype)


def weighted_sum(
    term: TokenObjective, entropy: Tensor | None, active: Tensor | None, params: ObjectiveParams, inputs: TokenInputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same results from terms that plain torch made, differentiable in them and in entropy."""
    factor = inputs.weights if inputs.policy_weights is None else inputs.weights * _used(inputs.policy_weights, active)
    policy = times(factor, term.policy)
    loss = policy + times(inputs.weights, params.beta * term.kl) if params.beta > 0 else policy
    if entropy is not None and inputs.entropy_weights is not None:
        loss = loss - inputs.entropy_weights * _used(entropy, active)
    return total(loss), total(policy).detach(), term.kl.detach(), term.clipped


def _used(x: Tensor, active: Tensor | None) -> Tensor:
    return x if active is None else torch.where(active.bool(), x, 0)


class _TokenObjective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logps, entropy, active, params, backend, *inputs):  # type: ignore[no-untyped-def]
        loss, policy_loss, kl, clipped = empty_outputs(logps)
        dlogps = torch.empty_like(logps)
        ops.objective(backend, logps, entropy, *inputs, active, params, loss, policy_loss, dlogps, kl, clipped)
        entropy_weights = TokenInputs(*inputs).entropy_weights
        ctx.save_for_backward(dlogps, entropy_weights, logps)
        results = total(loss), total(policy_loss), kl, clipped
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, upstream, *_):  # type: ignore[no-untyped-def]
        dlogps, entropy_weights, logps = ctx.saved_tensors
        if upstream is None:
            return (None,) * (5 + len(TokenInputs._fields))
        dentropy = None if entropy_weights is None else ops.once(-entropy_weights * upstream)
        return ops.once(dlogps * upstream, logps), dentropy, *(None,) * (3 + len(TokenInputs._fields))


def token_objective(
    logps: Tensor, entropy: Tensor | None, active: Tensor | None, params: ObjectiveParams, inputs: TokenInputs, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss () differentiable in logps and entropy, policy_loss (), kl and clipped (B, T), from contiguous (B, T) log-probs."""
    return _TokenObjective.apply(logps, entropy, active, params.for_kernels(), backend, *inputs)
