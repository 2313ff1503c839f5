"""Several rewards an answer, against TRL 1.16's formulas in float64; and advantages of a critic, against the double loop of their paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import generator, same_bits

NAN = math.nan
WAYS = ("sum_then_normalize", "normalize_then_sum")
SCALES = ("group", "batch", "none")


def nanstd(x: Tensor, dim: int | tuple[int, ...], ddof: int) -> Tensor:
    count = (~x.isnan()).sum(dim, keepdim=True)
    squares = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (squares / (count - ddof)).sqrt()


def as_trl(rewards: Tensor, generations: int, weights: Tensor, way: str, scale: str, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """What TRL does with rewards_per_func; where scale_rewards is "none" it divides each reward by its std all the same in
    normalize_then_sum, and then always over the batch: that is "batch" here."""
    rewards = rewards.double()
    unscorable = rewards.isnan().all(1)
    if way == "sum_then_normalize":
        total = (rewards * weights).nansum(1)
        total[unscorable] = NAN
        grouped = total.view(-1, generations)
        advantages = grouped - grouped.nanmean(1, keepdim=True)
        if scale != "none":
            advantages = advantages / ((nanstd(grouped, 1, ddof) if scale == "group" else nanstd(grouped, (0, 1), ddof)) + eps)
        return advantages.flatten().nan_to_num(nan=0.0)
    grouped = rewards.view(-1, generations, rewards.shape[1])
    each = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, 1, ddof) + eps)
    total = (each.view(rewards.shape) * weights).nansum(1)
    total[unscorable] = NAN
    if scale == "batch":
        total = (total - total.nanmean()) / (nanstd(total, 0, ddof) + eps)
    return total.nan_to_num(nan=0.0)


def some_rewards(seed: int, missing: bool) -> Tensor:
    rewards = torch.randn(12, 3, generator=generator(seed))
    if missing:
        rewards[0, 1] = rewards[5, 0] = rewards[6, 2] = NAN
        rewards[9] = NAN
    return rewards


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, -2.0], [0.0, 0.0, 1.0]], ids=str)
@pytest.mark.parametrize("way, scale", [(WAYS[0], scale) for scale in SCALES] + [(WAYS[1], "batch"), (WAYS[1], "group")])
def test_several_rewards_are_those_of_trl(backend: str, way: str, scale: str, weights: list[float] | None, missing: bool) -> None:
    rewards = some_rewards(0, missing)
    w = torch.ones(3, dtype=torch.float64) if weights is None else torch.tensor(weights, dtype=torch.float64)
    options: dict[str, Any] = {"multi_objective_aggregation": way, "scale_rewards": scale, "backend": backend}
    want = as_trl(rewards, 4, w, way, scale)
    for given in (weights, None if weights is None else torch.tensor(weights)):
        got = gk.group_advantages(rewards, 4, reward_weights=given, **options)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    shuffled = torch.randperm(12, generator=generator(1))
    ids = torch.arange(12).div(4, rounding_mode="floor")
    got = gk.group_advantages(rewards[shuffled], group_ids=ids[shuffled], reward_weights=weights, **options)
    torch.testing.assert_close(got.double(), want[shuffled], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
def test_one_reward_in_a_column_is_that_reward(backend: str, scale: str) -> None:
    rewards = some_rewards(2, True)[:, :1]
    flat = gk.group_advantages(rewards[:, 0], 4, scale_rewards=scale, backend=backend)
    assert same_bits(gk.group_advantages(rewards, 4, scale_rewards=scale, backend=backend), flat)
    if scale != "batch":
        got = gk.group_advantages(rewards, 4, scale_rewards=scale, multi_objective_aggregation=WAYS[1], backend=backend)
        assert same_bits(got, flat)


@pytest.mark.parametrize("way", WAYS)
def test_rewards_without_a_difference_give_exactly_0(backend: str, way: str) -> None:
    for rewards in (
        torch.full((8, 2), 0.1),
        torch.full((8, 2), NAN),
        torch.ones(8, 2, dtype=torch.bool),
        torch.zeros(0, 2),
    ):
        got = gk.group_advantages(rewards, 4, multi_objective_aggregation=way, backend=backend)
        assert got.shape == (len(rewards),) and got.dtype == torch.float32 and (got == 0).all()
    got = gk.group_advantages(
        torch.tensor([[0.1, 0.2], [0.1, 0.7]]), 2, multi_objective_aggregation=way, reward_weights=[3.0, 0.0], backend=backend
    )
    assert (got == 0).all()


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"reward_weights": [1.0]}, "reward_weights"),
        ({"reward_weights": torch.ones(3, 1)}, "reward_weights"),
        ({"rewards": torch.ones(12, 3, 1)}, "rewards"),
        ({"rewards": torch.ones(12), "reward_weights": [1.0]}, "reward_weights"),
        ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation"),
        ({"rewards": torch.ones(12, 0)}, "rewards"),
        ({"num_generations": 5}, "num_generations"),
        ({"group_ids": torch.zeros(12).long()}, "num_generations, group_ids"),
    ],
    ids=str,
)
def test_wrong_arguments_of_several_rewards_are_named(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: "):
        gk.group_advantages(**({"rewards": torch.ones(12, 3), "num_generations": 4} | bad))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, last: Tensor) -> Tensor:
    """A_t = sum_k (gamma lam)^k delta_(t + k), over the tokens that are not masked."""
    out = torch.zeros(rewards.shape, dtype=torch.float64)
    for i in range(len(rewards)):
        steps = [t for t in range(rewards.shape[1]) if mask[i, t]]
        V = [float(values[i, t]) for t in steps] + [float(last[i])]
        deltas = [float(rewards[i, t]) + gamma * V[n + 1] - V[n] for n, t in enumerate(steps)]
        for n, t in enumerate(steps):
            out[i, t] = sum((gamma * lam) ** (k - n) * deltas[k] for k in range(n, len(steps)))
    return out


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0), (0.0, 0.95)])
@pytest.mark.parametrize("cut_off", [False, True])
def test_gae_is_the_discounted_sum_of_its_differences(gamma: float, lam: float, cut_off: bool) -> None:
    g = generator(0)
    rewards, values, last = torch.randn(5, 7, generator=g), torch.randn(5, 7, generator=g), torch.randn(5, generator=g)
    mask = torch.rand(5, 7, generator=g) < torch.tensor([1, 0, 0.5, 0.7, 0.9])[:, None]
    want = gae(rewards, values, mask, gamma, lam, last if cut_off else torch.zeros(5))
    options: dict[str, Any] = {"gamma": gamma, "lam": lam, "last_values": last if cut_off else None}
    poisoned = (torch.where(mask, x, NAN) for x in (rewards, values))
    got = gk.gae_advantages(*poisoned, mask, **options)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)
    everything = gk.gae_advantages(rewards, values, **options)
    assert same_bits(everything, gk.gae_advantages(rewards, values, torch.ones(5, 7), **options))
    torch.testing.assert_close(everything.double(), gae(rewards, values, torch.ones(5, 7), gamma, lam, last if cut_off else torch.zeros(5)))


def test_gae_takes_any_dtype_no_tokens_and_values_that_require_grad(backend: str) -> None:
    for shape in ((0, 3), (2, 0)):
        assert gk.gae_advantages(torch.zeros(shape), torch.zeros(shape)).shape == shape
    rewards = torch.tensor([[0, 0, 1]])
    got = gk.gae_advantages(rewards, torch.full((1, 3), 0.5, dtype=torch.bfloat16, requires_grad=True), lam=1.0)
    assert got.tolist() == [[0.5, 0.5, 0.5]] and not got.requires_grad
    loss = gk.grpo_loss(torch.zeros(1, 3), got, loss_type="dapo", backend=backend).loss
    assert loss == -0.5


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"gamma": 1.1}, "gamma"),
        ({"lam": -0.1}, "lam"),
        ({"lam": NAN}, "lam"),
        ({"values": torch.zeros(2, 4)}, "values"),
        ({"values": torch.zeros(2)}, "values"),
        ({"rewards": torch.zeros(2)}, "rewards"),
        ({"completion_mask": torch.ones(3)}, "completion_mask"),
        ({"last_values": torch.zeros(3)}, "last_values"),
    ],
    ids=str,
)
def test_wrong_arguments_of_gae_are_named(bad: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: "):
        gk.gae_advantages(**({"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3)} | bad))
