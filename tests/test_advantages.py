"""Advantages of outcome and process supervision against a definition in exact rational arithmetic, for every rule and every backend."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import generator
from grpo_kernels import reference

SCALES, BASELINES = ("group", "batch", "none"), ("mean", "leave_one_out")


def std(values: list[Fraction], ddof: int) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def outcome(rewards: list[float], groups: list[Any], scale: str, baseline: str, ddof: int, eps: float) -> list[float]:
    """(r - baseline) / (std + eps) of each reward among those of its group that are not NaN."""
    exact = [None if math.isnan(r) else Fraction(r) for r in rewards]
    everything = [r for r in exact if r is not None]
    result = []
    for r, group in zip(exact, groups):
        mine = [x for x, g in zip(exact, groups) if g == group and x is not None]
        if r is None or len(set(mine)) < 2:
            result.append(0.0)
            continue
        base = sum(mine) / len(mine) if baseline == "mean" else (sum(mine) - r) / (len(mine) - 1)
        divisor = {"group": lambda: std(mine, ddof) + eps, "batch": lambda: std(everything, ddof) + eps, "none": lambda: 1.0}[scale]  # noqa: B023
        result.append(float(r - base) / divisor())
    return result


def process(rewards: Tensor, ends: Tensor, real: Tensor, groups: list[Any], length: int, ddof: int, eps: float) -> list[list[float]]:
    """The outcome advantage of every step among all steps of its group, summed over the steps that end at a token or later."""
    flat = torch.where(real, rewards.double(), torch.nan).flatten().tolist()
    of_steps = outcome(flat, [g for g in groups for _ in range(rewards.shape[1])], "group", "mean", ddof, eps)
    steps = list(zip(of_steps, ends.flatten().tolist(), real.flatten().tolist()))
    K = rewards.shape[1]
    return [
        [sum(a for a, end, is_real in steps[i * K : i * K + K] if is_real and end >= t) for t in range(length)] for i in range(len(rewards))
    ]


def assert_equal(got: Tensor, want: list) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64).view_as(got), rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize(("scale", "baseline", "ddof", "eps"), list(itertools.product(SCALES, BASELINES, (0, 1), (1e-4, 0.0))))
def test_outcome_advantages_are_exact(backend: str, scale: str, baseline: str, ddof: int, eps: float) -> None:
    g = generator(1)
    rewards = torch.randn(24, generator=g)
    rewards[4:8] = rewards[4]  # a group of equal rewards
    rewards[[9, 16, 17, 18, 20, 21, 22, 23]] = torch.nan  # one NaN in a group, all but one, all
    options = {"scale_rewards": scale, "baseline": baseline, "ddof": ddof, "eps": eps}
    got = gk.group_advantages(rewards, 4, **options, backend=backend)
    assert_equal(got, outcome(rewards.tolist(), [i // 4 for i in range(24)], scale, baseline, ddof, eps))
    assert (got[4:8] == 0).all() and (got[16:] == 0).all() and (got != 0).sum() > 8


@pytest.mark.parametrize(("scale", "baseline"), list(itertools.product(SCALES, BASELINES)))
@pytest.mark.parametrize("seed", range(4))
def test_groups_come_in_any_order_and_of_any_size(backend: str, seed: int, scale: str, baseline: str) -> None:
    g = generator(seed)
    rewards = torch.randn(40, generator=g).double()
    groups = torch.randint(-3, 9, (40,), generator=g) * 10**12
    groups[0], rewards[5] = 77, torch.nan  # a group of one
    got = gk.group_advantages(rewards, group_ids=groups, scale_rewards=scale, baseline=baseline, backend=backend)
    assert_equal(got, outcome(rewards.tolist(), groups.tolist(), scale, baseline, 1, 1e-4))
    assert got[0] == 0
    shuffled = torch.randperm(40, generator=g)
    again = gk.group_advantages(rewards[shuffled], group_ids=groups[shuffled], scale_rewards=scale, baseline=baseline, backend=backend)
    torch.testing.assert_close(again, got[shuffled], rtol=1e-6, atol=1e-7)
    small = torch.unique(groups, return_inverse=True)[1].int()
    assert torch.equal(gk.group_advantages(rewards, group_ids=small, scale_rewards=scale, baseline=baseline, backend=backend), got)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
)
def test_rewards_come_in_any_dtype(backend: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]).to(dtype)
    assert_equal(
        gk.group_advantages(rewards, 4, backend=backend),
        outcome(rewards.double().tolist(), [i // 4 for i in range(12)], "group", "mean", 1, 1e-4),
    )
    assert not gk.group_advantages(rewards.double().requires_grad_(), 4, backend=backend).requires_grad


@pytest.mark.parametrize("offset", [0.0, 1e8, -1e8, 1e12])
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_huge_common_offset_leaves_the_differences(backend: str, offset: float, baseline: str) -> None:
    rewards = torch.tensor([0.25, 0.5, 0.75, 2.0], dtype=torch.float64) + offset
    got = gk.group_advantages(rewards, 4, baseline=baseline, backend=backend)
    torch.testing.assert_close(
        got.double(), torch.tensor(outcome(rewards.tolist(), [0] * 4, "group", baseline, 1, 1e-4)).double(), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("value", [0.1, 1e-30, 1e8 + 0.3, -7.7, 1e300])
@pytest.mark.parametrize(("scale", "baseline", "eps"), list(itertools.product(SCALES, BASELINES, (1e-4, 0.0))))
def test_equal_rewards_give_exactly_zero(backend: str, value: float, scale: str, baseline: str, eps: float) -> None:
    """0.1 summed three times and divided is not 0.1: the rounding of a mean must not be taken for a signal."""
    rewards = torch.full((7,), value, dtype=torch.float64)
    rewards[6] = torch.nan
    groups = torch.tensor([0, 1, 1, 1, 1, 1, 1])
    options = {"scale_rewards": scale, "baseline": baseline, "eps": eps, "backend": backend}
    assert (gk.group_advantages(rewards, group_ids=groups, **options) == 0).all()
    assert (gk.group_advantages(rewards, 1, **options) == 0).all()


def test_nearly_equal_rewards_are_not_equal(backend: str) -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0 + 1e-12], dtype=torch.float64)
    got = gk.group_advantages(rewards, 4, eps=0.0, backend=backend)
    torch.testing.assert_close(got, torch.tensor([-0.5, -0.5, -0.5, 1.5]), rtol=1e-3, atol=0)


def test_no_rewards_give_no_advantages(backend: str) -> None:
    assert gk.group_advantages(torch.zeros(0), 4, backend=backend).shape == (0,)
    assert gk.group_advantages(torch.zeros(0), group_ids=torch.zeros(0, dtype=torch.int64), backend=backend).shape == (0,)
    assert gk.process_advantages(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64), 5, 2, backend=backend).shape == (0, 5)
    none = gk.process_advantages(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64), 5, 2, backend=backend)
    assert none.shape == (2, 5) and (none == 0).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("ddof", "eps"), [(1, 1e-4), (0, 0.0)])
def test_process_advantages_are_exact(backend: str, seed: int, ddof: int, eps: float) -> None:
    """Steps in any order, several ends on one token, outputs without steps, NaN steps; what is no step may hold anything."""
    g, (B, K, T) = generator(seed), (8, 5, 12)
    rewards, real = torch.randn(B, K, generator=g), torch.rand(B, K, generator=g) < 0.7
    ends = torch.randint(T, (B, K), generator=g)
    real[3] = False
    real[6:] = False
    real[6, 0] = True  # the pool of the last group has one step
    rewards[0, 0] = torch.nan
    groups = [i // 2 for i in range(B)] if seed % 2 else torch.randint(3, (B,), generator=g).tolist()
    how = {"num_generations": 2} if seed % 2 else {"group_ids": torch.tensor(groups)}
    want = process(rewards, ends, real, groups, T, ddof, eps)
    got = gk.process_advantages(rewards, ends, T, step_mask=real, ddof=ddof, eps=eps, backend=backend, **how)
    assert_equal(got, want)
    assert (got != 0).any() and (got[3] == 0).all()

    junk = (
        torch.where(real, ends, torch.tensor([-5, 10**9, T, 2**40, 0])),
        torch.where(real, rewards, torch.tensor([torch.nan, torch.inf, 1e30, 0, 5])),
    )
    again = gk.process_advantages(junk[1], junk[0], T, step_mask=real.float(), ddof=ddof, eps=eps, backend=backend, **how)
    assert torch.equal(again, got)
    order = torch.randperm(K, generator=g)
    permuted = gk.process_advantages(
        rewards[:, order], ends[:, order].int(), T, step_mask=real[:, order], ddof=ddof, eps=eps, backend=backend, **how
    )
    torch.testing.assert_close(permuted, got, rtol=1e-6, atol=1e-6)


def test_a_steps_own_last_token_is_included_and_what_follows_the_last_step_is_zero(backend: str) -> None:
    got = gk.process_advantages(torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.tensor([[1, 3], [0, 0]]), 6, 2, eps=0.0, backend=backend)
    s = math.sqrt(2 / 3)
    assert_equal(got, [[0, 0, 1 / s, 1 / s, 0, 0], [0] * 6])


@pytest.mark.parametrize("rewards", [[[2.5, 2.5], [2.5, 2.5]], [[math.nan, 1.0], [math.nan, math.nan]]])
def test_a_pool_without_a_difference_gives_zero(backend: str, rewards: list[list[float]]) -> None:
    got = gk.process_advantages(torch.tensor(rewards), torch.tensor([[0, 2], [1, 2]]), 4, 2, eps=0.0, backend=backend)
    assert (got == 0).all()


@pytest.mark.parametrize("end", [-1, 4, 2**40])
def test_a_real_step_outside_the_completion_raises(backend: str, end: int) -> None:
    ends, mask = torch.tensor([[0, 2], [1, end]]), torch.tensor([[1, 1], [1, 0]])
    with pytest.raises(ValueError, match=rf"step_ends.*{end}"):
        gk.process_advantages(torch.rand(2, 2), ends, 4, 2, backend=backend)
    gk.process_advantages(torch.rand(2, 2), ends, 4, 2, step_mask=mask, backend=backend)


def test_the_reference_is_the_exact_definition() -> None:
    g = generator(2)
    rewards, groups = torch.randn(20, generator=g).double(), torch.randint(4, (20,), generator=g)
    rewards[3] = torch.nan
    for scale, baseline, ddof in itertools.product(SCALES, BASELINES, (0, 1)):
        got = reference.group_advantages(rewards, groups, scale_rewards=scale, baseline=baseline, ddof=ddof)
        want = torch.tensor(outcome(rewards.tolist(), groups.tolist(), scale, baseline, ddof, 1e-4), dtype=torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    steps, ends = rewards.view(4, 5), torch.randint(-1, 7, (4, 5), generator=g)
    got = reference.process_advantages(steps, ends, torch.tensor([0, 0, 1, 1]), 7)
    want = torch.tensor(process(steps, ends, ends >= 0, [0, 0, 1, 1], 7, 1, 1e-4), dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
