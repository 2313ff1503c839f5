"""Corrections of the policy term and advantages of a critic, against loops over tokens; several rewards, against TRL 1.16's formulas."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import generator, same_bits
from combination_cases import CU_SEQLENS, INSIDE, LENGTHS, TAIL, B, T
from ranks import on_every_rank

NAN, INF = math.nan, math.inf
LEVELS, MODES = ("token", "sequence"), ("truncate", "mask")
BOUNDS = ((None, 3.0), (0.5, 2.0), (0.9, None), (None, None), (1.0, 1.0), (0.0, 0.0))


def ragged(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of two policies with NaN where the second could not score and where masked, and the mask."""
    g = generator(seed)
    logps, sampler = -3 * torch.rand(B, T, generator=g), -3 * torch.rand(B, T, generator=g)
    mask = INSIDE & (torch.rand(B, T, generator=g) < 0.8)
    mask[-1] = False
    sampler[0, 1] = sampler[3, 0] = NAN
    return torch.where(mask, logps, NAN), torch.where(mask, sampler, INF), mask


def packed(x: Tensor) -> Tensor:
    return torch.cat([x[INSIDE], torch.full((TAIL,), NAN if x.is_floating_point() else 1, dtype=x.dtype)])


def log_ratios(old: Tensor, sampler: Tensor, mask: Tensor) -> list[list[float]]:
    """Of the active tokens of each sequence; 0 where one of the two is NaN."""

    def one(i: int, t: int) -> float:
        difference = float(old[i, t]) - float(sampler[i, t])
        return 0.0 if math.isnan(difference) else difference

    return [[one(i, t) for t in range(T) if mask[i, t]] for i in range(len(mask))]


def bounded(log_ratio: float, mode: str, low: float | None, high: float | None) -> float:
    ratio, low, high = math.exp(log_ratio), 0.0 if low is None else low, INF if high is None else high
    return (low if ratio < low else high if ratio > high else ratio) if mode == "truncate" else ratio if low <= ratio <= high else 0.0


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_importance_weights_are_bounded_ratios(level: str, mode: str, bounds: tuple[Any, Any]) -> None:
    old, sampler, mask = ragged(1)
    expected = log_ratios(old, sampler, mask)
    options = {"level": level, "mode": mode, "clip_min": bounds[0], "clip_max": bounds[1]}
    got = gk.truncated_importance_weights(old, sampler, mask, **options)
    if level == "sequence":
        want = torch.tensor([bounded(sum(x), mode, *bounds) for x in expected])
    else:
        want = torch.ones(B, T)
        want[mask] = torch.tensor([bounded(x, mode, *bounds) for row in expected for x in row])
    torch.testing.assert_close(got.weights, want, rtol=1e-5, atol=0)
    tokens = [x for row in expected for x in row]
    k3 = sum(math.expm1(x) - x for x in tokens) / len(tokens)
    assert got.mismatch_kl.item() == pytest.approx(k3, rel=1e-5) and got.mismatch_kl.dtype == torch.float32
    assert not got.weights.requires_grad

    rows = gk.truncated_importance_weights(packed(old), packed(sampler), packed(mask), cu_seqlens=CU_SEQLENS, **options)
    if level == "token":
        assert same_bits(rows.weights[:-TAIL], got.weights[INSIDE]) and (rows.weights[-TAIL:] == 1).all()
    else:
        torch.testing.assert_close(rows.weights, got.weights)
    torch.testing.assert_close(rows.mismatch_kl, got.mismatch_kl)


def test_importance_weights_go_on_into_the_loss_as_they_come(backend: str) -> None:
    old, sampler, mask = ragged(2)
    for level, cu_seqlens in itertools.product(LEVELS, (None, CU_SEQLENS)):
        x, y, m = (old, sampler, mask) if cu_seqlens is None else (packed(old), packed(sampler), packed(mask))
        weights = gk.truncated_importance_weights(x, y, m, level=level, cu_seqlens=cu_seqlens).weights
        shared: dict[str, Any] = {"completion_mask": m, "cu_seqlens": cu_seqlens, "backend": backend, "loss_type": "dapo"}
        loss = gk.grpo_loss(x, torch.ones(B), importance_weights=weights, **shared).loss
        per_row = (
            weights
            if level == "token"
            else weights.repeat_interleave(torch.tensor(LENGTHS))
            if cu_seqlens is not None
            else weights[:, None].expand(B, T)
        )
        active = m if cu_seqlens is None else m[:-TAIL]
        torch.testing.assert_close(loss, -(per_row[: len(active)][active]).mean())


def test_extreme_log_probs_give_finite_weights_and_no_negative_mismatch() -> None:
    old, sampler = torch.tensor([[-INF, -INF, 0.0, -1e-4]]), torch.tensor([[-INF, 0.0, -INF, -2e-4]])
    got = gk.truncated_importance_weights(old, sampler, clip_max=None)
    assert (
        got.weights[0, 0] == 1
        and got.weights[0, 1] == pytest.approx(math.exp(-80))
        and got.weights[0, 2] == pytest.approx(math.exp(80), rel=1e-5)
    )
    assert got.mismatch_kl.isfinite() and gk.truncated_importance_weights(old[:, 3:], sampler[:, 3:]).mismatch_kl >= 0
    assert gk.truncated_importance_weights(old, sampler, level="sequence", clip_max=None).weights.isfinite().all()
    double = gk.truncated_importance_weights(old.double(), sampler.double())
    assert double.weights.dtype == double.mismatch_kl.dtype == torch.float64
    for shape in ((0, 3), (2, 0)):
        empty = gk.truncated_importance_weights(torch.zeros(shape), torch.zeros(shape), level="sequence")
        assert empty.weights.tolist() == [1.0] * shape[0] and empty.mismatch_kl == 0


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.1])
@pytest.mark.parametrize("per_token", [False, True])
def test_off_policy_sequences_are_dropped_at_negative_advantages(threshold: float, per_token: bool) -> None:
    logps, sampler, mask = ragged(3)
    sampler = sampler + torch.tensor([0.5, 0.0, 0.5, -0.5, 0.5, 0.0])[:, None]
    advantages = torch.tensor([-1.0, -1.0, 1.0, -0.5, 0.0, -2.0])
    advantages = advantages[:, None] * torch.tensor([1, -1, 1, 1, -1, 1, 1]) if per_token else advantages
    moved = [-sum(x) / max(len(x), 1) for x in log_ratios(logps, sampler, mask)]
    by_token = advantages if per_token else advantages[:, None].expand(B, T)
    want = (by_token >= 0) | (torch.tensor(moved) <= threshold)[:, None]
    assert 0 < want.float().mean() < 1
    got = gk.off_policy_mask(logps.requires_grad_(), sampler, advantages, mask, threshold=threshold)
    assert got.dtype == torch.float32 and torch.equal(got, want.float())
    logps = logps.detach()
    rows = gk.off_policy_mask(
        packed(logps),
        packed(sampler),
        packed(advantages) if per_token else advantages,
        packed(mask),
        threshold=threshold,
        cu_seqlens=CU_SEQLENS,
    )
    assert torch.equal(rows[:-TAIL], want[INSIDE].float())


def expected_top(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    values = entropy[mask]
    return mask & (entropy >= torch.quantile(values, 1 - quantile)) if len(values) else mask


@pytest.mark.parametrize("quantile", [1e-6, 0.2, 0.5, 0.8, 1.0])
def test_the_tokens_of_highest_entropy_are_kept(quantile: float) -> None:
    for seed in range(5):
        g = generator(seed)
        entropy, mask = 2 * torch.rand(B, T, generator=g), torch.rand(B, T, generator=g) < 0.7
        want = expected_top(entropy, mask, quantile)
        got = gk.high_entropy_mask(torch.where(mask, entropy, NAN).requires_grad_(), mask.int() * 3, top_entropy_quantile=quantile)
        assert got.dtype == torch.float32 and torch.equal(got != 0, want)
        assert torch.equal(gk.high_entropy_mask(entropy[mask], top_entropy_quantile=quantile) != 0, want[mask])
    assert gk.high_entropy_mask(torch.full((2, 3), 0.5), top_entropy_quantile=0.1).all()  # ties with the threshold are kept
    for shape in ((2, 0), (0, 3), (0,)):
        assert gk.high_entropy_mask(torch.zeros(shape), top_entropy_quantile=quantile).shape == shape
    assert not gk.high_entropy_mask(torch.rand(2, 3), torch.zeros(2, 3), top_entropy_quantile=quantile).any()


@pytest.mark.parametrize("empty_rank", [False, True])
def test_the_entropy_quantile_is_of_all_ranks(empty_rank: bool, tmp_path: Path) -> None:
    g = generator(7)
    entropy, mask = torch.rand(5, 4, generator=g), torch.rand(5, 4, generator=g) < 0.7
    if empty_rank:
        mask[3:] = False
    entropy[:3] += 0.5  # the ranks' own quantiles would differ
    parts = (slice(0, 3), slice(3, 5))
    results = on_every_rank(
        2,
        tmp_path,
        lambda rank, group: gk.high_entropy_mask(entropy[parts[rank]], mask[parts[rank]], top_entropy_quantile=0.3, group=group),
    )
    assert torch.equal(torch.cat(results), gk.high_entropy_mask(entropy, mask, top_entropy_quantile=0.3))
    assert empty_rank or not torch.equal(results[1], gk.high_entropy_mask(entropy[3:], mask[3:], top_entropy_quantile=0.3))


@pytest.mark.parametrize("bad, error, named", [
    ({"level": "batch"}, ValueError, "level"), ({"mode": "clip"}, ValueError, "mode"), ({"clip_min": -1.0}, ValueError, "clip_min"),
    ({"clip_max": NAN}, ValueError, "clip_max"), ({"clip_max": "3"}, TypeError, "clip_max"),
    ({"clip_min": 4.0}, ValueError, "clip_min, clip_max"),
    ({"sampler_logps": torch.zeros(3, 2)}, ValueError, "sampler_logps"), ({"sampler_logps": [0.0]}, TypeError, "sampler_logps"),
    ({"old_logps": torch.zeros(3)}, ValueError, "old_logps"), ({"completion_mask": torch.ones(3)}, ValueError, "completion_mask"),
    ({"cu_seqlens": torch.tensor([0, 2])}, ValueError, "old_logps"),
], ids=str)  # fmt: skip
def test_wrong_arguments_of_importance_weights_are_named(bad: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=f"^{named}: "):
        gk.truncated_importance_weights(**({"old_logps": torch.zeros(2, 3), "sampler_logps": torch.zeros(2, 3)} | bad))


@pytest.mark.parametrize("bad, error, named", [
    ({"threshold": NAN}, ValueError, "threshold"), ({"threshold": None}, TypeError, "threshold"), ({"logps": None}, TypeError, "logps"),
    ({"advantages": torch.ones(2, 1)}, ValueError, "advantages"), ({"sampler_logps": torch.zeros(2)}, ValueError, "sampler_logps"),
    ({"advantages": torch.ones(3)}, ValueError, "advantages"), ({"completion_mask": torch.ones(2, 1)}, ValueError, "completion_mask"),
], ids=str)  # fmt: skip
def test_wrong_arguments_of_the_off_policy_mask_are_named(bad: dict[str, Any], error: type[Exception], named: str) -> None:
    good = {"logps": torch.zeros(2, 3), "sampler_logps": torch.zeros(2, 3), "advantages": torch.ones(2), "threshold": 0.1}
    with pytest.raises(error, match=f"^{named}: "):
        gk.off_policy_mask(**(good | bad))


@pytest.mark.parametrize("quantile", [0.0, -0.1, 1.01, NAN, True, "0.2"])
def test_a_quantile_outside_its_range_raises(quantile: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="^top_entropy_quantile: "):
        gk.high_entropy_mask(torch.rand(2, 3), top_entropy_quantile=quantile)
    with pytest.raises(ValueError, match="^completion_mask: "):
        gk.high_entropy_mask(torch.rand(2, 3), torch.ones(3), top_entropy_quantile=0.5)
    with pytest.raises(TypeError, match="^entropy: "):
        gk.high_entropy_mask([0.1], top_entropy_quantile=0.5)  # type: ignore[arg-type]
