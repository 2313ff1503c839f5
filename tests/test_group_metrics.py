"""Means and clip ratios as they are defined, token by token, at every level and in every layout; and over the ranks of a group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from combination_cases import answer, batch, lay_out
from ranks import on_every_rank


def brute_force(output: gk.GRPOLossOutput, mask: Tensor, level: str) -> dict[str, float]:
    """From (B, T) outputs, token by token."""
    tokens = [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t]]
    sequences = [[int(output.clipped[i, t]) for t in range(mask.shape[1]) if mask[i, t]] for i in range(mask.shape[0])]
    shares = {side: [x.count(side) / len(x) if x else 0.0 for x in sequences] for side in (-1, 1)}
    everyone = {side: [x.count(side) / len(x) for x in sequences if x] for side in (-1, 1)}
    mean = {}
    for side in (-1, 1):
        if level == "token":
            mean[side] = sum(x.count(side) for x in sequences) / max(len(tokens), 1)
        else:
            mean[side] = sum(shares[side]) / max(len(sequences), 1)
    return {
        "kl": sum(float(output.kl[i]) for i in tokens) / max(len(tokens), 1),
        "entropy": sum(float(output.entropy[i]) for i in tokens) / max(len(tokens), 1),
        "clip_ratio/low_mean": mean[-1],
        "clip_ratio/low_min": min(everyone[-1], default=0.0),
        "clip_ratio/high_mean": mean[1],
        "clip_ratio/high_max": max(everyone[1], default=0.0),
        "clip_ratio/region_mean": mean[-1] + mean[1],
    }


@pytest.mark.parametrize("layout", ["padded", "packed", "model_packed"])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_metrics_are_the_means_of_their_definitions(backend: str, level: str, layout: str) -> None:
    options = {"loss_type": "grpo", "importance_sampling_level": level, "kl_estimator": "k3", "beta": 0.1}
    inputs = batch(f"metrics {level}", torch.float32, options) | {"epsilon": 0.02, "epsilon_high": 0.03}
    drift = torch.tensor([0.3, 0.0, -0.3, 0.3, 0.0, 0.0])[:, None] * torch.tensor([1, 1, 1, -1, 1, 0.1, 1])
    inputs["advantages"] = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    inputs["old_logps"] = answer(inputs, "padded", "default", backend).output.logps - drift
    padded = answer(inputs, "padded", "default", backend).output
    want = brute_force(padded, inputs["completion_mask"], level)
    assert 0 < want["clip_ratio/low_mean"] < 1 and 0 < want["clip_ratio/high_mean"] < 1
    arguments, full, view, _ = lay_out(inputs, layout)
    output = gk.fused_grpo_loss(view(full), **arguments, backend=backend)
    got = gk.grpo_metrics(output, arguments["completion_mask"], importance_sampling_level=level, cu_seqlens=arguments.get("cu_seqlens"))
    assert all(x.shape == () and x.dtype == torch.float32 for x in got.values())
    assert {name: float(x) for name, x in got.items()} == pytest.approx(want, rel=1e-5, abs=1e-7)


def test_wrong_arguments_of_metrics_raise_and_are_named() -> None:
    output = gk.grpo_loss(torch.zeros(2, 3), torch.ones(2))
    for named, error, arguments in (
        ("importance_sampling_level", ValueError, {"importance_sampling_level": "batch"}),
        ("completion_mask", ValueError, {"completion_mask": torch.ones(2)}),
        ("completion_mask", TypeError, {"completion_mask": [1]}),
        ("cu_seqlens", TypeError, {"cu_seqlens": torch.tensor([0.0])}),
        ("output.clipped", ValueError, {"cu_seqlens": torch.tensor([0, 2])}),
    ):
        with pytest.raises(error, match=f"^{named}: "):
            gk.grpo_metrics(output, **({"completion_mask": None} | arguments))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("empty_rank", [False, True])
def test_metrics_over_a_group_are_those_of_the_whole_batch(level: str, empty_rank: bool, tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    logps, old = torch.randn(5, 4, generator=g), torch.randn(5, 4, generator=g)
    mask = torch.rand(5, 4, generator=g) < (torch.tensor([1, 1, 1, 0, 0]) if empty_rank else torch.tensor([0.7, 0, 1, 1, 0.5]))[:, None]
    options = {"importance_sampling_level": level}

    def metrics(part: slice, group=None) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
        advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -2.0])[part]
        held = {"old_logps": old[part], "ref_logps": old[part], "completion_mask": mask[part]}
        output = gk.grpo_loss(logps[part], advantages, entropy=logps[part].exp(), **held, **options)
        return gk.grpo_metrics(output, mask[part], group=group, **options)

    want = {name: float(x) for name, x in metrics(slice(None)).items()}
    ranks = on_every_rank(2, tmp_path, lambda rank, group: metrics((slice(0, 3), slice(3, 5))[rank], group))
    for got in ranks:
        assert {name: float(x) for name, x in got.items()} == pytest.approx(want, rel=1e-6)
