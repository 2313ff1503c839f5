"""Backend `torch`: the entry points in plain torch, a chunk of rows at a time. Runs on any device, and alone takes float64.

A row's bits must not depend on its neighbours, so no lone row is reduced to a scalar by one torch.sum, which would split it over the
threads: sums go through blocks.
"""
# mypy: disable-error-code="no-untyped-def"
# (the arguments are typed at `Backend`)

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels.reference import named_params, times, token_objective

CHUNK_BYTES = 16 << 20  # float32 logits of a chunk; a few temporaries of this size exist at a time
BLOCK = 1024  # terms of a partial sum

Rows = tuple[Tensor, Tensor]  # indices (batch, time) of some rows


def load(name: str) -> Eager:
    return Eager()


class Eager:
    device = None

    def logprobs_forward(self, logits, token_ids, active, temperature, logps, row_max, log_sum, entropy) -> None:
        outputs = (logps, row_max, log_sum, entropy)
        for rows in _chunks(_needed(active, logps), logits.shape[-1]):
            values = _row_stats(logits[rows].to(logps.dtype), token_ids[rows], temperature[rows])
            for output, value in zip(outputs, values):
                output[rows] = value.to(output.dtype)
        _zero_inactive(active, *outputs)

    def objective(
        self, logps, entropy, advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights, active, params,
        loss, policy_loss, dlogps, kl, clipped,
    ) -> None:  # fmt: skip
        *numbers, beta = params
        # The clones are ordinary tensors also where the caller's are inference tensors, which autograd does not take.
        # Hooks of the caller (activation checkpointing) must not see this graph: they would run the whole forward again for it.
        own = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)
        with torch.inference_mode(False), torch.enable_grad(), own:
            leaf = logps.clone().requires_grad_()
            constants = (advantages, old_logps, ref_logps, policy_weights, weights)
            advantages, old_logps, ref_logps, policy_weights, weights = (None if x is None else x.clone() for x in constants)
            term = token_objective(leaf, advantages, old_logps, ref_logps, **named_params(numbers))
            policy = times(weights if policy_weights is None else weights * policy_weights, term.policy)
            total = policy + times(weights, beta * term.kl) if beta else policy
            (gradient,) = torch.autograd.grad(total.sum(), leaf)
        loss.copy_(total.detach() if entropy_weights is None else total.detach() - entropy_weights * entropy)
        policy_loss.copy_(policy.detach())
        dlogps.copy_(torch.where(logps.isnan(), logps, gradient))
        kl.copy_(term.kl.detach())
        clipped.copy_(term.clipped)
        _zero_inactive(active, loss, policy_loss, dlogps, kl, clipped)

    def logprobs_backward(
        self, logits, token_ids, active, temperature, row_max, log_sum, entropy, dlogps, dentropy, dlogits
    ) -> None:  # fmt: skip
        needed = _needed(active, dlogps) & (log_sum.isnan() | (dlogps != 0) | (dentropy != 0 if dentropy is not None else False))
        for rows in _chunks(needed, logits.shape[-1]):
            logprobs = _offsets(logits[rows].to(dlogps.dtype), row_max[rows], temperature[rows]) - log_sum[rows][:, None]
            probs, a, ids = logprobs.exp(), dlogps[rows][:, None], token_ids[rows].clamp(0, logits.shape[-1] - 1)[:, None]
            # The chosen token's 1 - p by expm1: where p is near 1 the subtraction would cancel.
            dz = (-a * probs).scatter_(-1, ids, -a * torch.expm1(logprobs.gather(-1, ids)))
            if dentropy is not None:
                dz -= dentropy[rows][:, None] * torch.where(probs == 0, 0.0, probs * (logprobs + entropy[rows][:, None]))
            dlogits[rows] = (dz / temperature[rows][:, None]).to(dlogits.dtype)
        dlogits[~needed] = 0

    def loss_and_grad(
        self, logits, token_ids, active, temperature, advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights,
        params, logps, entropy, loss, policy_loss, kl, clipped, dlogits,
    ) -> None:  # fmt: skip
        row_max, log_sum, dlogps = torch.empty_like(logps), torch.empty_like(logps), torch.empty_like(logps)
        self.logprobs_forward(logits, token_ids, active, temperature, logps, row_max, log_sum, entropy)
        self.objective(
            logps, entropy, advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights, active, params,
            loss, policy_loss, dlogps, kl, clipped,
        )  # fmt: skip
        dentropy = None if entropy_weights is None else -entropy_weights
        self.logprobs_backward(logits, token_ids, active, temperature, row_max, log_sum, entropy, dlogps, dentropy, dlogits)

    def scale(self, dlogits, factor) -> None:
        if dlogits.device.type != "cpu" or factor != 1:  # on a GPU the comparison would synchronise
            dlogits.mul_(factor)

    def group_advantages(self, values, order, offsets, scale, baseline, ddof, eps, step_ends, out) -> None:
        ordered = values if order is None else values[order]
        real = ~ordered.isnan()
        kept = torch.where(real, ordered, 0.0)
        sizes = offsets.diff()
        group = torch.repeat_interleave(torch.arange(len(sizes), device=values.device), sizes, output_size=len(values))

        def total(x: Tensor) -> Tensor:  # over each value's group
            return x.new_zeros(len(sizes)).index_add_(0, group, x)[group]

        def normalised(x: Tensor, pool: Tensor, count: Tensor, over: Callable[[Tensor], Tensor]) -> Tensor:
            deviation = torch.where(real, kept - pool / count.clamp(min=1), 0.0)
            return x / ((over(deviation**2) / (count - ddof).clamp(min=1)).sqrt() + eps)

        count, pool = total(real.double()), total(kept)
        advantages = kept - pool / count.clamp(min=1)
        if baseline == "leave_one_out":  # r - (sum - r) / (n - 1), without the rounding of a sum of large rewards
            advantages *= count / (count - 1).clamp(min=1)
        if scale == "group":
            advantages = normalised(advantages, pool, count, total)
        elif scale == "batch":
            advantages = normalised(advantages, kept.sum(), real.sum(), torch.sum)
        # A group of equal rewards (or of one) gives exactly 0, whatever the rounding of its mean; so does a NaN reward.
        lowest = values.new_full((len(sizes),), torch.inf).scatter_reduce_(0, group, torch.where(real, ordered, torch.inf), "amin")[group]
        varied = total((real & (ordered != lowest)).double()) > 0
        advantages = torch.where(real & varied, advantages, 0.0)
        if order is not None:
            advantages = torch.empty_like(advantages).index_copy_(0, order, advantages)
        if step_ends is not None:
            length = out.shape[1]
            at_end = advantages.new_zeros(out.shape[0], length + 1)  # the last column takes what is no step
            at_end.scatter_add_(1, torch.where(step_ends < 0, length, step_ends), advantages.view_as(step_ends))
            advantages = at_end[:, :-1].flip(1).cumsum(1).flip(1)
        out.copy_(advantages)


def _row_stats(z: Tensor, token_ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp of the chosen ids, row maximum, log sum exp((z - max) / temperature) and entropy of rows (n, V).

    The sums are float64: beside the 1 of the maximum a float32 sum would keep 1 - p of a confident row to 4e-7 only.
    """
    row_max = z.amax(-1)
    offsets = _offsets(z, row_max, temperature)
    exponentials = offsets.exp()
    total = _sum(exponentials)
    log_sum = total.log()
    entropy = log_sum - _sum(torch.where(exponentials == 0, 0.0, exponentials * offsets)) / total
    chosen = offsets.gather(-1, token_ids.clamp(0, z.shape[-1] - 1)[:, None]).squeeze(-1)
    inside = (token_ids >= 0) & (token_ids < z.shape[-1])
    return torch.where(inside, chosen - log_sum, torch.nan), row_max, log_sum, entropy


def _offsets(z: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
    return (z - row_max[:, None]) / temperature[:, None]  # subtract first: a large common constant then cancels exactly


def _sum(x: Tensor) -> Tensor:
    whole = x.shape[-1] // BLOCK * BLOCK
    blocks = x[:, :whole].unflatten(-1, (whole // BLOCK, BLOCK))
    return blocks.sum(-1, dtype=torch.float64).sum(-1) + x[:, whole:].sum(-1, dtype=torch.float64)


def _needed(active: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool) if active is None else active.bool()


def _zero_inactive(active: Tensor | None, *outputs: Tensor) -> None:
    if active is not None:
        for output in outputs:
            output[~active.bool()] = 0


def _chunks(needed: Tensor, vocab: int) -> list[Rows]:
    """The needed rows, as many at a time as CHUNK_BYTES hold. On a GPU all rows: choosing them would synchronise."""
    if needed.device.type != "cpu":
        needed = torch.ones_like(needed)
    batch, time = needed.nonzero(as_tuple=True)
    size = max(1, CHUNK_BYTES // (4 * max(1, vocab)))
    return list(zip(batch.split(size), time.split(size))) if len(batch) else []
