"""What the answers are: the definitions of the package in float64, written from the formulas, and how far from them an answer may be.

Nothing here comes from grpo_kernels. The gradient is autograd's through the whole loss, on masked tokens replaced by harmless ones; where
autograd itself is NaN (infinite logits), tests state the closed form.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 80.0
WORST: dict[str, float] = {}  # name of a figure -> largest error seen, as a share of its budget


class Expected(NamedTuple):
    loss: Tensor
    policy_loss: Tensor
    logps: Tensor
    entropy: Tensor
    kl: Tensor
    clipped: Tensor
    dlogits: Tensor | None  # of the logits as they were given, the spare position included
    # What budgets are made of, (B, T):
    size: Tensor  # weight times absolute value of each token's terms
    a: Tensor  # dLoss / dlogp
    b: Tensor  # dLoss / dentropy
    da: Tensor  # da / dlogp
    dkl: Tensor  # dkl / dlogp
    temperature: Tensor


def logps_and_entropy(logits: Tensor, token_ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """l = z_y / tau - logsumexp(z / tau) and H = -sum p log p of rows (..., V); p log p is 0 where p is."""
    logprobs = (logits / temperature[..., None]).log_softmax(-1)
    possible = logprobs > -math.inf
    entropy = -torch.where(possible, logprobs.exp() * torch.where(possible, logprobs, 0), 0).sum(-1)
    return logprobs.gather(-1, token_ids[..., None].long())[..., 0], entropy


def token_weights(
    mask: Tensor, loss_type: str, num_items_in_batch=None, num_sequences=None, num_processes=1, max_completion_length=None, loss_scale=1.0
) -> Tensor:
    """w (B, T) of each aggregation, the mask in it."""

    def count(given, local):
        return max(local, 1.0) if given is None else float(given) if given > 0 else 1.0

    m, total = mask.double(), float(mask.sum())
    lengths = m.sum(-1, keepdim=True).clamp(min=1)
    sequences = count(num_sequences, float(len(m)))
    return (
        loss_scale
        * {
            "grpo": lambda: num_processes * m / (sequences * lengths),
            "bnpo": lambda: m / max(total, 1.0),
            "dr_grpo": lambda: num_processes * m / (sequences * max_completion_length),
            "dapo": lambda: num_processes * m / count(num_items_in_batch, total),
        }[loss_type]()
    )


def token_terms(
    logps, advantages, old_logps=None, ref_logps=None, *, epsilon=0.2, epsilon_high=None, delta=None, dual_clip=None, max_log_ratio=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Policy term, k3 and clip side of each token, differentiable in logps."""
    bound = min(max_log_ratio or LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    log_ratio = logps - (logps.detach() if old_logps is None else old_logps)
    ratio = log_ratio.clamp(-bound, bound).exp()  # clamp passes the gradient at the bound itself
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    policy = -torch.minimum(capped * advantages, ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        most = -dual_clip * advantages
        policy = torch.where((advantages < 0) & (most < policy), most, policy)
    kl = torch.zeros_like(logps)
    if ref_logps is not None:
        d = (ref_logps - logps).clamp(-bound, bound)
        kl = torch.expm1(d) - d
    clipped = ((ratio > high) & (advantages > 0)).int() - ((ratio < low) & (advantages < 0)).int()
    return policy, kl, clipped


def grpo(
    logits,
    completion_ids,
    advantages,
    *,
    old_logps=None,
    ref_logps=None,
    completion_mask=None,
    importance_weights=None,
    policy_weights=None,
    token_weights=None,
    temperature=1.0,
    entropy_coef=0.0,
    entropy_aggregation="loss",
    beta=0.0,
    dtype=torch.float64,
    **options,
) -> Expected:
    """The loss, everything beside it, and its gradient. dtype=torch.float32 is naive eager, whose own error is a measure."""
    shape = completion_ids.shape
    mask = torch.ones(shape, dtype=torch.bool) if completion_mask is None else completion_mask != 0

    def tokens(x):
        x = torch.as_tensor(x, dtype=dtype)
        return torch.where(mask, (x[:, None] if x.dim() == 1 else x).expand(shape), 1)

    z = logits.detach().to(dtype).requires_grad_()
    taus = tokens(temperature)
    rows = torch.where(mask[..., None], z[:, : shape[1]], 0)
    logps, entropy = logps_and_entropy(rows, torch.where(mask, completion_ids, 0), taus)

    optional = [None if x is None else tokens(x) for x in (old_logps, ref_logps)]
    names = ("epsilon", "epsilon_high", "delta", "dual_clip", "max_log_ratio")
    clip = {name: options.pop(name) for name in names if name in options}
    policy, kl, clipped = token_terms(logps, tokens(advantages), *optional, **clip)
    for factor in (importance_weights, policy_weights):
        policy = policy if factor is None else policy * tokens(factor)

    loss_type = options.pop("loss_type", "grpo")
    if token_weights is None:
        w = _weights(mask, loss_type, **options).to(dtype)
        u = _weights(mask, "bnpo", loss_scale=options.get("loss_scale", 1.0)).to(dtype)
    else:
        w, u = mask * tokens(token_weights), _weights(mask, "bnpo").to(dtype)
    u = entropy_coef * (u if entropy_aggregation == "token_mean" else w)
    loss = (w * (policy + beta * kl) - u * entropy).sum()

    def gradient(y, x, **how):
        found = torch.autograd.grad(y.sum(), x, allow_unused=True, **how)[0] if y.requires_grad else None
        return torch.zeros_like(x) if found is None else found

    a = gradient(loss, logps, create_graph=True)
    parts = {"a": a, "b": -u, "da": gradient(a, logps, retain_graph=True), "dkl": gradient(kl, logps, retain_graph=True)}
    return Expected(
        loss.detach(),
        (w * policy).sum().detach(),
        *(torch.where(mask, x, 0).detach() for x in (logps, entropy, kl, clipped)),
        dlogits=gradient(loss, z).to(logits.dtype if dtype == torch.float32 else dtype),
        size=(w * (policy.abs() + beta * kl) + (u * entropy).abs()).detach(),
        **{name: torch.where(mask, x, 0).detach() for name, x in parts.items()},
        temperature=taus,
    )


_weights = token_weights  # the argument of the same name hides it in grpo()


def logp_budget(logps: Tensor) -> Tensor:
    return 3e-6 + 2e-7 * logps.abs()


def kl_budget(expected: Expected) -> Tensor:
    return 1e-5 * expected.kl + logp_budget(expected.logps) * expected.dkl.abs()


def loss_budget(expected: Expected) -> Tensor:
    return 1e-6 + 1e-5 * expected.size.sum() + (expected.a.abs() * logp_budget(expected.logps)).sum()


def dlogits_budget(expected: Expected, dtype: torch.dtype, stored_before: float | None = None) -> Tensor:
    """Of each element of the scored rows: float32 arithmetic and one rounding to a half dtype. Where the one pass had stored its gradient
    before the upstream gradient `stored_before` multiplied it, that was a rounding too."""
    dlogits = expected.dlogits[:, : expected.logps.shape[1]].abs()
    coefficients = 2e-7 * (expected.a.abs() + expected.b.abs()) + logp_budget(expected.logps) * expected.da.abs()
    budget = 2e-5 * dlogits + (coefficients / expected.temperature)[..., None]
    if dtype == torch.float32:
        return budget
    rounding = half_ulp(dlogits + budget, dtype)
    if stored_before is not None:
        rounding += stored_before * half_ulp((dlogits + budget) / stored_before, dtype)
    return torch.where(budget > 0, budget + rounding, 0)  # what has to be 0 is 0


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    digits, least = {torch.bfloat16: (8, 0.0), torch.float16: (11, 6e-8)}[dtype]
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - digits - 1).clamp(min=least)


def assert_within(name: str, got: Tensor, want: Tensor, budget: Tensor, eager: Tensor | None = None) -> None:
    """Every element within its budget; or, where eager in the same dtype is worse than half of that, within twice eager's own error."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if eager is not None:
        budget = torch.maximum(budget, 2 * (eager.double() - want).abs())
    error = (got.detach().double() - want.double()).abs()
    share = torch.where(error == 0, 0, error / budget).nan_to_num(nan=math.inf).flatten()
    if share.numel() == 0:
        return
    worst = int(share.argmax())
    WORST[name] = max(WORST.get(name, 0.0), float(share[worst]))
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
    values = f"got {got.flatten()[worst].item():.9g}, expected {want.flatten()[worst].item():.9g}"
    assert share[worst] <= 1, f"{name} at {place}: {values}, error {error.flatten()[worst]:.3g} is {share[worst]:.3g} budgets"


def assert_dlogits(got: Tensor, expected: Expected, token_ids: Tensor, dtype: torch.dtype, stored_before=None, eager=None) -> None:
    """The target's column and the others apart: a wrong target gradient would drown among 150,000 others. Masked rows exactly 0."""
    time = expected.logps.shape[1]
    assert got.dtype == dtype and got.shape == expected.dlogits.shape
    assert (got[:, time:] == 0).all(), "the spare position has a gradient"
    budget = dlogits_budget(expected, dtype, stored_before)
    tensors = [got[:, :time], expected.dlogits[:, :time], budget] + ([] if eager is None else [eager[:, :time]])
    vocab = got.shape[-1]
    target = token_ids.long().clamp(0, vocab - 1)[..., None]
    others = torch.ones(got[:, :time].shape, dtype=torch.bool).scatter_(-1, target, False)
    kind = str(dtype).removeprefix("torch.")
    assert_within(f"dlogits of the target, {kind}", *(x.gather(-1, target) for x in tensors))
    if vocab > 1:
        assert_within(f"dlogits of the others, {kind}", *(x[others].view(*token_ids.shape, vocab - 1) for x in tensors))
