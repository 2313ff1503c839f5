"""What every loss does with its arguments once they are checked: the constants of each token, and the loss from log-probs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.checks import per_token, stats_dtype
from grpo_kernels.objective import token_objective, weighted_sum
from grpo_kernels.options import GRPOLossOutput, ObjectiveParams, TokenInputs
from grpo_kernels.rows import Sequences
from grpo_kernels.sequence import sequence_objective, vespo_folded
from grpo_kernels.weights import token_weights as token_weight

__all__ = ["Batch", "Inputs", "loss_of_logps", "token_inputs"]


class Batch(NamedTuple):
    like: Tensor  # logits, log-probs or hidden states: device and dtype of everything else
    sequences: Sequences
    active: Tensor | None
    backend: str


class Inputs(NamedTuple):
    tokens: TokenInputs
    folded: Tensor | None  # (S,) log importance weights that vespo folds into its own


def token_inputs(
    params: ObjectiveParams,
    batch: Batch,
    advantages: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    importance_weights: Tensor | None,
    policy_weights: Tensor | None,
    token_weights: Tensor | None,
) -> Inputs:
    """Everything per token as the objective takes it: the two policy factors as one, aggregation and entropy bonus as weights."""
    dtype = stats_dtype(batch.like)

    def constant(name: str, x: Tensor | None, **shapes: bool) -> Tensor | None:
        return None if x is None else per_token(name, x, batch.sequences, batch.like, dtype, **shapes)

    if params.beta > 0 and ref_logps is None:
        raise ValueError(f"ref_logps: beta is {params.beta}, so the loss needs the reference's log-probs; got None")
    factor = constant("importance_weights", importance_weights, per_sequence=True, column=True)
    folded = None
    if params.loss_type == "vespo" and factor is not None and importance_weights is not None:
        one_each = importance_weights.numel() == batch.sequences.count != factor.numel()
        folded = vespo_folded(importance_weights.flatten().to(dtype) if one_each else factor, batch.active, batch.sequences)
        factor = None
    other = constant("policy_weights", policy_weights, per_sequence=True, column=True)
    if factor is not None and other is not None:
        factor = factor * other

    weigh = functools.partial(token_weight, batch.active, batch.sequences, dtype=dtype, device=batch.like.device)
    if token_weights is None:
        params.check_normaliser()
        weights = weigh(
            params.loss_type, num_items_in_batch=params.num_items_in_batch, num_sequences=params.num_sequences,
            num_processes=params.num_processes, max_completion_length=params.max_completion_length, loss_scale=params.loss_scale,
        )  # fmt: skip
    else:
        weights = per_token("token_weights", token_weights, batch.sequences, batch.like, dtype)
        weights = weights if batch.active is None else torch.where(batch.active.bool(), weights, 0)
    bonus = None
    if params.entropy_coef != 0 and params.entropy_aggregation == "loss":
        bonus = params.entropy_coef * weights
    elif params.entropy_coef != 0:
        bonus = params.entropy_coef * weigh("bnpo", loss_scale=params.loss_scale if token_weights is None else 1.0)
    tokens = TokenInputs(
        per_token("advantages", advantages, batch.sequences, batch.like, dtype, per_sequence=True),
        constant("old_logps", old_logps),
        constant("ref_logps", ref_logps),
        other if factor is None else factor,
        weights,
        bonus,
    )
    return Inputs(tokens, folded)


def loss_of_logps(logps: Tensor, entropy: Tensor | None, params: ObjectiveParams, batch: Batch, inputs: Inputs) -> GRPOLossOutput:
    """The loss and everything beside it, differentiable in logps and entropy, both as the tokens are laid out."""
    bonus = None if entropy is None or inputs.tokens.entropy_weights is None else entropy.contiguous()
    if params.reads_sequences:
        term = sequence_objective(ops.first_order(logps), batch.active, params, inputs.tokens, inputs.folded, batch.sequences)
        loss, policy_loss, kl, clipped = weighted_sum(term, bonus, batch.active, params, inputs.tokens)
    else:
        loss, policy_loss, kl, clipped = token_objective(logps.contiguous(), bonus, batch.active, params, inputs.tokens, batch.backend)
    values = [torch.zeros_like(logps) if x is None else x.detach() for x in (logps, entropy)]
    # clones: never the caller's own memory
    values = [x.clone() if batch.active is None else torch.where(batch.active.bool(), x, 0) for x in values]
    return GRPOLossOutput(loss, policy_loss, values[0], values[1], kl, clipped)
