"""The whole of the mathematics in float64, for every combination of loss type, level and KL estimator, on padded rows.

Written from the formulas; nothing here comes from grpo_kernels. The gradient is autograd's through the definitions as they stand: what
float32 has to write in closed form (bias-corrected KL, the series of k3) is safe in float64. Masked places are harmless numbers here, so
the inputs of the package may hold NaN there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracle import logp_budget, logps_and_entropy

HOLD = 80.0
SMALLEST = math.log(1e-8)
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "reinforce")
LEVELS = ("token", "sequence", "sequence_token")
PENALTIES = (None, "k3", "k1", "k2", "abs", "k3 corrected")


class Expected(NamedTuple):
    """(B, T), but loss and policy_loss (), dlogits (B, T, V)."""

    loss: Tensor
    policy_loss: Tensor
    logps: Tensor
    entropy: Tensor
    kl: Tensor
    clipped: Tensor
    dlogits: Tensor
    size: Tensor  # weight times absolute value of each token's terms
    a: Tensor  # dLoss / dlogp
    b: Tensor  # dLoss / dentropy
    a_error: Tensor  # how far errors of log-probs within their budget move a: sum over s of |da_t / dlogp_s| budget_s
    kl_error: Tensor  # and kl
    temperature: Tensor


def weights_of(
    mask: Tensor, loss_type: str, num_items_in_batch=None, num_sequences=None, num_processes=1, max_completion_length=None, loss_scale=1.0
) -> Tensor:
    m = mask.double()
    lengths, tokens, sequences = m.sum(1, keepdim=True).clamp(min=1), m.sum().clamp(min=1), float(len(m))
    if num_sequences is not None:
        sequences = max(float(num_sequences), 1e-300)
    if num_items_in_batch is not None:
        tokens = float(num_items_in_batch)
    p = num_processes
    if loss_type in ("grpo", "sapo"):
        w = p * m / (sequences * lengths)
    elif loss_type == "bnpo":
        w = m / m.sum().clamp(min=1)
    elif loss_type == "dr_grpo":
        w = p * m / (sequences * max_completion_length)
    elif loss_type == "luspo":
        w = p * m / sequences
    else:
        w = p * m / tokens
    return w * loss_scale


def ratio_logs(logps: Tensor, old_logps: Tensor | None, m: Tensor, level: str, frozen: Tensor) -> Tensor:
    """log rho of each token at a level. `frozen` is logps held out of the gradient, but tracked."""
    old_logps = frozen if old_logps is None else old_logps
    own, mean = logps - old_logps, (m * (logps - old_logps)).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    if level == "token":
        return own
    if level == "sequence":
        return mean.expand(own.shape)
    frozen_mean = (m * (frozen - old_logps)).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    return logps - frozen + frozen_mean


def policy_of(
    loss_type: str, ratio: Tensor, frozen_ratio: Tensor, logps: Tensor, frozen: Tensor, A: Tensor, old_logps: Tensor | None, m: Tensor,
    importance_weights: Tensor | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Policy term and clip side of each token, before weights."""
    low = 1 - options.get("epsilon", 0.2)
    given = options.get("epsilon_high")
    high = 1 + (options.get("epsilon", 0.2) if given is None else given)
    none = torch.zeros_like(A)
    if loss_type == "cispo":
        return -frozen_ratio.clamp(max=given) * A * logps, ((frozen_ratio > given) & (A > 0)) + none
    if loss_type == "sapo":
        k = torch.where(A > 0, options.get("sapo_temperature_pos", 1.0), options.get("sapo_temperature_neg", 1.05))
        return -A * torch.sigmoid(k * (ratio - 1)) * 4 / k, none
    if loss_type == "reinforce":
        return -A * logps, none
    if loss_type == "vespo":
        q = (m * (frozen - (frozen if old_logps is None else old_logps)).clamp(-20, 20)).sum(1, keepdim=True)
        if importance_weights is not None:
            logs = importance_weights.log().clamp(SMALLEST, 20)
            q = q + (logs if logs.shape[1] == 1 else (m * logs).sum(1, keepdim=True))
        q = q.clamp(SMALLEST, 20)
        k = torch.where(A >= 0, options.get("vespo_k_pos", 2.0), options.get("vespo_k_neg", 3.0))
        lam = torch.where(A >= 0, options.get("vespo_lambda_pos", 3.0), options.get("vespo_lambda_neg", 2.0))
        phi = (lam + k * q - lam * q.exp()).exp()
        return -torch.where(phi.isfinite(), phi, 0) * A * logps, none
    capped = ratio if options.get("delta") is None else ratio.clamp(max=options["delta"])
    policy = -torch.minimum(capped * A, ratio.clamp(low, high) * A)
    if options.get("dual_clip") is not None:
        policy = torch.where(A < 0, torch.minimum(policy, -options["dual_clip"] * A), policy)
    return policy, ((ratio > high) & (A > 0)).double() - ((ratio < low) & (A < 0)).double()


def penalty_of(d: Tensor, ratio: Tensor, estimator: str, corrected: bool, bound: float) -> Tensor:
    k3 = torch.expm1(d.clamp(-bound, bound)) - d.clamp(-bound, bound)
    return ratio * k3 if corrected else {"k3": k3, "k1": -d, "k2": d**2 / 2, "abs": d.abs()}[estimator]


def expect(
    logits: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    importance_weights: Tensor | None = None,
    policy_weights: Tensor | None = None,
    temperature: Any = 1.0,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    kl_estimator: str = "k3",
    kl_bias_correction: bool = False,
    beta: float = 0.0,
    max_log_ratio: float | None = None,
    entropy_coef: float = 0.0,
    entropy_aggregation: str = "loss",
    **options: Any,
) -> Expected:
    """Loss, everything beside it and the gradient of logits (B, T, V); mask (B, T) bool; the rest as fused_grpo_loss has it, padded."""
    m, bound = mask.double(), min(max_log_ratio or HOLD, HOLD)

    def tokens(x: Any) -> Tensor:
        x = torch.as_tensor(x, dtype=torch.float64)
        return torch.where(mask, (x[:, None] if x.dim() == 1 else x).expand(mask.shape), 1)

    z = torch.where(mask[..., None], logits, 0).double().requires_grad_()
    taus, A = tokens(temperature), tokens(advantages)
    old, ref = (None if x is None else tokens(x) for x in (old_logps, ref_logps))
    scored, entropy = logps_and_entropy(z, torch.where(mask, completion_ids, 0), taus)
    logps = scored.detach().requires_grad_()
    frozen = scored.detach().requires_grad_()

    ratio, frozen_ratio = (ratio_logs(x, old, m, importance_sampling_level, frozen).clamp(-bound, bound).exp() for x in (logps, frozen))
    folded = importance_weights
    if loss_type == "vespo" and folded is not None:
        folded = folded.double()[:, None] if folded.dim() == 1 else folded.double() if folded.shape[1] == 1 else tokens(folded)
    policy, clipped = policy_of(loss_type, ratio, frozen_ratio, logps, frozen, A, old, m, folded, options)
    for factor in (None if loss_type == "vespo" else importance_weights, policy_weights):
        policy = policy if factor is None else policy * tokens(factor)
    kl = 0 * logps
    if ref is not None:
        kl = penalty_of(ref - logps, ratio, kl_estimator, kl_bias_correction, bound)

    counts = {name: options[name] for name in ("num_items_in_batch", "num_sequences", "num_processes") if name in options}
    scale = options.get("loss_scale", 1.0)
    w = weights_of(mask, loss_type, **counts, max_completion_length=options.get("max_completion_length"), loss_scale=scale)
    u = entropy_coef * (w if entropy_aggregation == "loss" else weights_of(mask, "bnpo", loss_scale=scale))
    loss = (w * (policy + beta * kl)).sum()

    every = torch.eye(mask.numel(), dtype=torch.float64).view(-1, *mask.shape)
    budget = m * logp_budget(scored.detach())

    def moved(y: Tensor) -> Tensor:
        """Held log-probs are log-probs too: their errors are the same ones."""
        if not y.requires_grad:
            return torch.zeros_like(m)
        how = {"retain_graph": True, "allow_unused": True, "materialize_grads": True, "is_grads_batched": True}
        live, held = torch.autograd.grad(y, (logps, frozen), every, **how)
        return ((live + held).abs() * budget).sum((1, 2)).view(mask.shape)

    a = torch.autograd.grad(loss, logps, create_graph=True)[0] if loss.requires_grad else 0 * logps
    dlogits = torch.autograd.grad((a.detach() * scored).sum() - (u * entropy).sum(), z)[0]
    return Expected(
        (loss - (u * entropy).sum()).detach(),
        (w * policy).sum().detach(),
        *(torch.where(mask, x, 0).detach() for x in (scored, entropy, kl, clipped)),
        dlogits,
        size=(w * (policy.abs() + beta * kl.abs()) + (u * entropy).abs()).detach(),
        a=a.detach(),
        b=-u,
        a_error=moved(a),
        kl_error=moved(kl),
        temperature=taus,
    )
