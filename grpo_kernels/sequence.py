"""Ratios and weights of whole sequences: GSPO's two levels, and VESPO, in plain torch on one value a token.

A token's term depends on log-probs of its whole sequence here, so the logits are swept twice: all log-probs first, then the gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.options import ObjectiveParams, TokenInputs
from grpo_kernels.reference import TokenObjective, difference, hold, token_objective
from grpo_kernels.rows import Sequences

__all__ = ["sequence_objective", "vespo_folded"]

VESPO_LOG_RANGE = (math.log(1e-8), 20.0)


def sequence_objective(
    logps: Tensor, active: Tensor | None, params: ObjectiveParams, inputs: TokenInputs, folded: Tensor | None, sequences: Sequences
) -> TokenObjective:
    """Policy term (before weights), kl and clipped of each token; differentiable in logps. Masked tokens are 0.

    `folded`: for vespo, the sequences' log importance weights (S,) of `vespo_folded`.
    """

    def used(x: Tensor) -> Tensor:
        return x if active is None else torch.where(active.bool(), x, 0)

    logps, advantages = used(logps), used(inputs.advantages)
    log_ratio = difference(logps, None if inputs.old_logps is None else used(inputs.old_logps))
    ratio_of_sequence = params.importance_sampling_level == "sequence"
    own = log_ratio
    if params.importance_sampling_level != "token":
        ones = torch.ones_like(logps) if active is None else active.to(logps.dtype)
        # An impossible token against an impossible old one would sum to inf - inf: infinite terms are taken as very large ones.
        finite = torch.where(log_ratio.isinf(), log_ratio.detach().sign() * 1e30, log_ratio)
        own = sequences.spread(sequences.sums(finite) / sequences.sums(ones).clamp(min=1))
        if not ratio_of_sequence:
            own = own.detach() + difference(logps)
    term = token_objective(
        logps, advantages, None, None if inputs.ref_logps is None else used(inputs.ref_logps),
        log_ratio=own, of_sequence=ratio_of_sequence, **params.for_reference(),
    )  # fmt: skip
    policy = term.policy
    if params.loss_type == "vespo":
        policy = policy * _vespo_weights(log_ratio.detach(), advantages, folded, params, sequences)
    # A degenerate row has a NaN gradient whatever its advantage and its objective. Both factors are 0 elsewhere: 0 times -inf is NaN too.
    policy = policy + torch.where(logps.isnan(), logps, 0.0) * torch.where(logps.isnan(), logps.detach(), 0.0)
    return TokenObjective(used(policy), used(term.kl), used(term.clipped))


def vespo_folded(importance_weights: Tensor, active: Tensor | None, sequences: Sequences) -> Tensor:
    """(S,) log of the importance weights that VESPO folds into its own, from one ratio a sequence (S,) or a token."""
    per_token = importance_weights.shape == sequences.shape
    logs = importance_weights.log().clamp(*VESPO_LOG_RANGE)
    if not per_token:
        return logs
    return sequences.sums(logs if active is None else torch.where(active.bool(), logs, 0))


def _vespo_weights(log_ratio: Tensor, advantages: Tensor, folded: Tensor | None, params: ObjectiveParams, sequences: Sequences) -> Tensor:
    """PHI = exp(lambda + k q - lambda e^q) with q the clamped sum of the sequence's log-ratios (arXiv 2602.10693); not finite: 0."""
    q = sequences.sums(hold(log_ratio, 20.0))
    q = sequences.spread((q if folded is None else q + folded).clamp(*VESPO_LOG_RANGE))
    positive = advantages >= 0
    zero = torch.zeros_like(q)  # its dtype: of two numbers torch.where makes one of the default dtype
    k = torch.where(positive, params.vespo_k_pos, zero + params.vespo_k_neg)
    lam = torch.where(positive, params.vespo_lambda_pos, zero + params.vespo_lambda_neg)
    phi = torch.exp(lam + k * q - lam * q.exp())
    return torch.where(phi.isfinite(), phi, 0.0)
