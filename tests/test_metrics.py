"""What a trainer logs: means over the tokens that count, and 0, never NaN, where there are none."""

from __future__ import annotations

import pytest
import torch

import grpo_kernels as gk
from cases import batch, run

NAMES = {"kl", "entropy"} | {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}


def test_clip_ratios_count_clipped_active_tokens_with_an_advantage(backend: str) -> None:  # F28
    ratios = torch.tensor([[0.5, 1.0, 1.5, 5.0]]).expand(3, 4)
    mask = torch.tensor([[1, 1, 1, 0]]).expand(3, 4)
    output = gk.grpo_loss(
        ratios.log(), torch.tensor([1.0, -1.0, 0.0]), old_logps=torch.zeros(3, 4), completion_mask=mask, epsilon=0.2, backend=backend
    )
    assert output.clipped.tolist() == [[0, 0, 1, 0], [-1, 0, 0, 0], [0, 0, 0, 0]]
    metrics = gk.grpo_metrics(output, mask)
    assert metrics.keys() == NAMES
    want = {"low_mean": 1 / 9, "high_mean": 1 / 9, "region_mean": 2 / 9, "low_min": 0.0, "high_max": 1 / 3}
    for name, value in want.items():
        assert metrics[f"clip_ratio/{name}"].item() == pytest.approx(value, rel=1e-6)
    everywhere = gk.grpo_metrics(output, None)
    assert everywhere["clip_ratio/high_mean"].item() == pytest.approx(1 / 12, rel=1e-6)


def test_the_smallest_and_largest_fractions_are_of_sequences_with_a_token(backend: str) -> None:
    logps, old = torch.tensor([[0.5, 0.5, 1.0], [1.0, 1.0, 0.5], [1.0, 1.0, 1.0]]).log(), torch.zeros(3, 3)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    low = gk.grpo_metrics(gk.grpo_loss(logps, -torch.ones(3), old_logps=old, completion_mask=mask, backend=backend), mask)
    assert low["clip_ratio/low_min"].item() == pytest.approx(1 / 3) and low["clip_ratio/low_mean"].item() == pytest.approx(3 / 5)
    high = gk.grpo_metrics(gk.grpo_loss(-logps, torch.ones(3), old_logps=old, completion_mask=mask, backend=backend), mask)
    assert high["clip_ratio/high_max"].item() == 1 and high["clip_ratio/high_mean"].item() == pytest.approx(3 / 5)


@pytest.mark.parametrize("mode", ["default", "one_pass", "from_logps"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_kl_and_entropy_are_means_over_active_tokens(backend: str, mode: str, dtype: torch.dtype) -> None:
    inputs = batch(1, (4, 6, 31))
    mask = inputs["completion_mask"]
    output = run(inputs, backend, mode).output
    metrics = gk.grpo_metrics(output, mask.to(dtype) * (1 if dtype == torch.bool else 3))
    assert metrics["kl"].item() == pytest.approx(output.kl[mask].mean().item(), rel=1e-6) and metrics["kl"] > 0
    assert metrics["entropy"].item() == pytest.approx(output.entropy[mask].mean().item(), rel=1e-6)
    assert all(value.dim() == 0 and value.dtype == torch.float32 and not value.requires_grad for value in metrics.values())


def test_what_is_masked_reaches_no_metric(backend: str) -> None:
    inputs = batch(2, (4, 6, 31))
    output, mask = run(inputs, backend).output, inputs["completion_mask"]
    poisoned = output._replace(**{name: getattr(output, name).masked_fill(~mask, torch.nan) for name in ("kl", "entropy")})
    for name, value in gk.grpo_metrics(output, mask).items():
        assert torch.equal(gk.grpo_metrics(poisoned, mask)[name], value)


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_no_tokens_give_zeros(backend: str, shape: tuple[int, int]) -> None:  # F09, F28
    mask = torch.zeros(shape)
    output = gk.grpo_loss(torch.zeros(shape), torch.ones(shape[0]), completion_mask=mask, backend=backend)
    metrics = gk.grpo_metrics(output, mask)
    assert metrics.keys() == NAMES and all(value == 0 for value in metrics.values())
