"""Advantages from rewards: within groups of answers to one prompt (outcome supervision), per step (process supervision), or from a critic
(PPO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.checks import check_backend, check_number, mask_rows, per_token, plain_tensor
from grpo_kernels.rows import Sequences

__all__ = ["gae_advantages", "group_advantages", "process_advantages"]


def group_advantages(
    rewards: Tensor,
    num_generations: int | None = None,
    *,
    group_ids: Tensor | None = None,
    reward_weights: Tensor | Sequence[float] | None = None,
    multi_objective_aggregation: str = "sum_then_normalize",
    scale_rewards: str = "group",
    baseline: str = "mean",
    ddof: int = 1,
    eps: float = 1e-4,
    backend: str | None = None,
) -> Tensor:
    """A_i = (r_i - baseline) / (std + eps) within each group of answers (DeepSeekMath §4.1.2; statistics in float64, two passes).

    Args:
        rewards: (B,) of any float, int or bool dtype, or (B, R), R rewards an answer. NaN is left out of the statistics and gets 0; of
            several rewards a NaN one is left out of the sum.
        num_generations: groups are consecutive runs of that many answers; or
        group_ids: (B,) integers naming each answer's group, in any order and of any sizes. One of the two is needed.
        reward_weights: (R,) weights of several rewards; None: all 1.
        multi_objective_aggregation: "sum_then_normalize" (the weighted sum is one reward) or "normalize_then_sum" (each reward's own
            advantages, summed with the weights; with scale_rewards="batch" that sum is then normalised over all answers, as TRL does).
        scale_rewards: "group" (std of the group), "batch" (std of all rewards: pass those of all ranks) or "none" (no division).
        baseline: "mean" of the group, or "leave_one_out", the mean of the others.
        ddof: 1 (sample) or 0 (population).
        eps: >= 0, added to the std.

    Returns:
        (B,) float32. A group whose rewards are all equal, and a group of one, get exactly 0.

    Raises:
        ValueError, TypeError: shapes, dtypes, unknown names, neither or both groupings.

    >>> import torch
    >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)
    tensor([ 0.7070, -0.7070,  0.0000,  0.0000])
    """
    _check_rewards("rewards", rewards, 1, 2)
    if rewards.dim() == 2 and rewards.shape[1] == 0:
        raise ValueError(f"rewards: expected at least one an answer, got shape {tuple(rewards.shape)}")
    _check_choice("multi_objective_aggregation", multi_objective_aggregation, ("sum_then_normalize", "normalize_then_sum"))
    _check_choice("scale_rewards", scale_rewards, ("group", "batch", "none"))
    _check_choice("baseline", baseline, ("mean", "leave_one_out"))
    order, offsets = _groups(len(rewards), num_generations, group_ids, rewards.device)
    weights = _reward_weights(reward_weights, rewards)
    name, ddof, eps = check_backend(backend), _ddof(ddof), check_number("eps", eps, least=0)

    def normalised(values: Tensor, groups: tuple[Tensor | None, Tensor], scale: str) -> Tensor:
        out = torch.empty(values.shape, dtype=torch.float32, device=values.device)
        ops.group_advantages(name, values.contiguous(), *groups, scale, baseline, ddof, eps, None, out)
        return out

    values = rewards.detach().double()
    if values.dim() == 1:
        return normalised(values, (order, offsets), scale_rewards)
    if multi_objective_aggregation == "sum_then_normalize":
        return normalised(_weighted_sum(values, weights), (order, offsets), scale_rewards)
    each = "none" if scale_rewards == "none" else "group"
    advantages = torch.stack([normalised(column, (order, offsets), each) for column in values.unbind(1)], 1).double()
    advantages = _weighted_sum(torch.where(values.isnan(), torch.nan, advantages), weights)
    if scale_rewards == "batch":
        return normalised(advantages, (None, offsets[[0, -1]]), "group")
    return advantages.nan_to_num(nan=0.0).float()


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    completion_mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_values: Tensor | None = None,
) -> Tensor:
    """PPO's per-token advantages (GAE, arXiv 1506.02438): A_t = sum_k (gamma lam)^k delta_(t+k), delta_t = r_t + gamma V_(t+1) - V_t.

    They go into `fused_grpo_loss` as (B, T) advantages: with loss_type "dapo" that is PPO's policy loss. The critic's regression target is
    advantages + values.

    Args:
        rewards: (B, T) reward of each token, such as a KL penalty at each and the answer's score at the last.
        values: (B, T) the critic's estimates before each token.
        completion_mask: (B, T); masked tokens are passed over, so that the token before one sees the one behind it. None: all.
        gamma, lam: in [0, 1].
        last_values: (B,) the critic's estimate behind the last token, of answers that were cut off; None: 0.

    Returns:
        (B, T) float32, 0 where masked; computed in float64.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices, gamma or lam outside [0, 1].

    >>> import torch
    >>> gae_advantages(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.5, 0.5]]), lam=1.0)
    tensor([[0.5000, 0.5000, 0.5000]])
    """
    _check_rewards("rewards", rewards, 2)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if check_number(name, number, least=0) > 1:
            raise ValueError(f"{name}: expected a number in [0, 1], got {number}")
    sequences = Sequences(rewards.shape, rewards.shape[0])
    active = mask_rows("completion_mask", completion_mask, sequences, rewards)
    values = per_token("values", plain_tensor("values", values).detach(), sequences, rewards, torch.float64)
    ahead = values.new_zeros(len(values))
    if last_values is not None:
        shape = Sequences(torch.Size((len(values), 1)), len(values))
        ahead = per_token("last_values", last_values, shape, rewards, torch.float64, per_sequence=True)[:, 0]
    used = torch.ones_like(values, dtype=torch.bool) if active is None else active.bool()
    carried, columns = torch.zeros_like(ahead), []
    for reward, value, here in zip(*(x.unbind(1)[::-1] for x in (rewards.detach().double(), values, used))):
        advantage = reward + gamma * ahead - value + gamma * lam * carried
        carried, ahead = torch.where(here, advantage, carried), torch.where(here, value, ahead)
        columns.append(torch.where(here, advantage, 0.0))
    return torch.stack(columns[::-1], 1).float() if columns else values.float()


def process_advantages(
    step_rewards: Tensor,
    step_ends: Tensor,
    completion_length: int,
    num_generations: int | None = None,
    *,
    step_mask: Tensor | None = None,
    group_ids: Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-4,
    backend: str | None = None,
) -> Tensor:
    """A_it = sum of the normalised rewards of the steps that end at token t or later (DeepSeekMath §4.1.3).

    All step rewards of a group are pooled: (r - mean) / (std + eps). A step's own last token is included; tokens after the last step end
    get 0; steps may come in any order, and several ends on one token add.

    Args:
        step_rewards: (B, K) rewards of the steps; NaN is left out.
        step_ends: (B, K) int, index of each step's last token.
        completion_length: T of the result.
        num_generations, group_ids, ddof, eps: as `group_advantages`.
        step_mask: (B, K), non-zero marks the real steps; None: all.

    Returns:
        (B, T) float32.

    Raises:
        ValueError: a real step end outside [0, completion_length), wrong shapes, neither or both groupings.
        TypeError: wrong dtypes.

    >>> import torch
    >>> process_advantages(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0, 2], [1, 2]]), 4, 2)
    tensor([[ 0.0000, -0.8659, -0.8659,  0.0000],
            [ 0.0000,  0.0000, -0.8659,  0.0000]])
    """
    _check_rewards("step_rewards", step_rewards, 2)
    plain_tensor("step_ends", step_ends)
    if step_ends.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"step_ends: expected int64 or int32, got {step_ends.dtype}")
    if isinstance(completion_length, bool) or not isinstance(completion_length, int) or completion_length < 0:
        raise ValueError(f"completion_length: expected an integer >= 0, got {completion_length!r}")
    for name, x in (("step_ends", step_ends), ("step_mask", step_mask)):
        if x is not None and (plain_tensor(name, x).shape != step_rewards.shape or x.device != step_rewards.device):
            raise ValueError(
                f"{name}: expected {tuple(step_rewards.shape)} on {step_rewards.device} as step_rewards, got {tuple(x.shape)} on {x.device}"
            )
    batch, steps = step_rewards.shape
    real = torch.ones_like(step_ends, dtype=torch.bool) if step_mask is None else step_mask != 0
    outside = real & ((step_ends < 0) | (step_ends >= completion_length))
    if outside.any():
        position = tuple(outside.nonzero()[0].tolist())
        raise ValueError(f"step_ends at {position}: expected an end in [0, {completion_length}), got {step_ends[position].item()}")
    order, offsets = _groups(batch, num_generations, group_ids, step_rewards.device)
    if order is not None:
        order = (order[:, None] * steps + torch.arange(steps, device=order.device)).flatten()
    out = torch.empty(batch, completion_length, dtype=torch.float32, device=step_rewards.device)
    values = torch.where(real, step_rewards.detach().double(), torch.nan).flatten()
    ends = torch.where(real, step_ends, -1).long().contiguous()
    arguments = "group", "mean", _ddof(ddof), check_number("eps", eps, least=0), ends
    ops.group_advantages(check_backend(backend), values, order, offsets * steps, *arguments, out)
    return out


def _reward_weights(weights: Any, rewards: Tensor) -> Tensor:
    if weights is not None and rewards.dim() == 1:
        raise ValueError(f"reward_weights: go with rewards (B, R), got rewards of shape {tuple(rewards.shape)}")
    if weights is None:
        return rewards.new_ones(rewards.shape[1:], dtype=torch.float64)
    weights = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device).detach()
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"reward_weights: expected {tuple(rewards.shape[1:])}, one a reward, got shape {tuple(weights.shape)}")
    return weights


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """(B,) sums over the rewards that are not NaN; NaN where all are."""
    return torch.where(values.isnan().all(1), torch.nan, (values.nan_to_num(nan=0.0) * weights).sum(1))


def _check_rewards(name: str, rewards: Any, *dims: int) -> None:
    plain_tensor(name, rewards)
    if rewards.is_complex():
        raise TypeError(f"{name}: expected a float, int or bool dtype, got {rewards.dtype}")
    if rewards.dim() not in dims:
        shapes = {(1,): "(B,)", (1, 2): "(B,) or (B, R)", (2,): "(B, T) or (B, K)"}[dims]
        raise ValueError(f"{name}: expected {shapes}, got shape {tuple(rewards.shape)}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _ddof(ddof: Any) -> int:
    if isinstance(ddof, bool) or ddof not in (0, 1):
        raise ValueError(f"ddof: expected 0 or 1, got {ddof!r}")
    return int(ddof)


def _groups(size: int, num_generations: Any, group_ids: Any, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """(order, offsets): group g holds the answers order[offsets[g] : offsets[g + 1]]; order None: as they come."""
    if (num_generations is None) == (group_ids is None):
        raise ValueError(f"num_generations, group_ids: expected one of the two, got {'neither' if group_ids is None else 'both'}")
    if group_ids is None:
        if isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
            raise ValueError(f"num_generations: expected an integer >= 1, got {num_generations!r}")
        if size % num_generations:
            raise ValueError(f"num_generations: expected a divisor of the {size} rewards, got {num_generations}")
        return None, torch.arange(0, size + 1, num_generations, device=device)
    plain_tensor("group_ids", group_ids)
    if group_ids.is_floating_point() or group_ids.is_complex():
        raise TypeError(f"group_ids: expected integers, got {group_ids.dtype}")
    if tuple(group_ids.shape) != (size,) or group_ids.device != device:
        raise ValueError(f"group_ids: expected ({size},) on {device}, one a reward, got {tuple(group_ids.shape)} on {group_ids.device}")
    counts = torch.unique(group_ids, return_counts=True)[1]
    return torch.argsort(group_ids, stable=True), torch.cat([counts.new_zeros(1), counts.cumsum(0)])
