"""Loss and gradient in one visit of each row: the row's statistics, objective and gradient follow each other while it is in cache.

It needs the scale of the loss up front, and the weights hold it. If the upstream gradient is not 1 after all, the backward multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.objective import empty_outputs, total
from grpo_kernels.options import GRPOLossOutput, ObjectiveParams, TokenInputs
from grpo_kernels.rows import as_rows, rows, zero_spare

__all__ = ["one_pass_loss"]


def one_pass_loss(
    logits: Tensor,
    token_ids: Tensor,
    active: Tensor | None,
    temperature: Tensor,
    params: ObjectiveParams,
    inputs: TokenInputs,
    inplace: bool,
    backend: str,
) -> GRPOLossOutput:
    """The loss with dlogits already made, in a fresh tensor or (`inplace`) in the logits' own storage. One backward only."""
    # The way back to the logits for `ops.once`, through a copy of no rows: saved logits would be held in memory until the backward.
    origin = () if torch.compiler.is_compiling() else (logits[:0].clone(),)
    outputs = _OnePass.apply(logits, token_ids, active, temperature, params.for_kernels(), inplace, origin, backend, *inputs)
    return GRPOLossOutput(*outputs[: len(GRPOLossOutput._fields)])


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids, active, temperature, params, inplace, origin, backend, *inputs):  # type: ignore[no-untyped-def]
        logps, entropy = torch.empty_like(temperature), torch.empty_like(temperature)
        loss, policy_loss, kl, clipped = empty_outputs(logps)
        outputs = (logps, entropy, loss, policy_loss, kl, clipped)
        arguments = as_rows(logits, token_ids, active, temperature, *inputs, *outputs)
        arguments[-len(outputs) : -len(outputs)] = [params]
        if inplace:
            dlogits = logits
            ops.loss_and_grad_(backend, *arguments)
            ctx.mark_dirty(logits)
        else:
            dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
            ops.loss_and_grad(backend, *arguments, rows(dlogits, token_ids))
        zero_spare(dlogits, token_ids)
        ctx.dlogits, ctx.origin, ctx.backend = dlogits.detach(), origin, backend
        ctx.set_materialize_grads(False)
        results = total(loss), total(policy_loss), logps, entropy, kl, clipped
        ctx.mark_non_differentiable(*results[1:])
        return (*results, logits) if inplace else results

    @staticmethod
    def backward(ctx, upstream, *others):  # type: ignore[no-untyped-def]
        if others[5:] and others[5] is not None:
            raise RuntimeError(
                "the logits were read after fused_grpo_loss(one_pass=True, inplace=True) had turned them into their gradient; read them "
                "before, or drop inplace"
            )
        dlogits, ctx.dlogits = ctx.dlogits, None
        if dlogits is None:
            raise RuntimeError(
                "fused_grpo_loss(one_pass=True) hands its gradient over in the first backward; for a second one (retain_graph, activation "
                "checkpointing) drop one_pass"
            )
        if upstream is None:
            return (None,) * 14
        ops.scale_(ctx.backend, dlogits if dlogits.dim() == 3 else dlogits[None], upstream)
        return ops.once(dlogits, *ctx.origin, upstream), *(None,) * 13
