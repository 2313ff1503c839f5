"""The registry tells the truth: an option moves loss or gradient exactly where `ObjectiveParams.acting` says so, else it moves no bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import generator, same_bits
from grpo_kernels.options import CHOICES, LIMITS, OPTION_NAMES, ObjectiveParams
from grpo_kernels.registry import BIAS_CORRECTED_K3, KL_TERMS, LOSS_TYPES

B, T, V = 4, 6, 5

# Every option that is read has something to do: ratios of tokens and of sequences inside and on both sides of the clip range, under
# advantages of both signs; every term is in the loss; counts differ from those of the batch.
LOG_RATIOS = torch.tensor([-0.7, 0.05, 0.6, 1.1])[:, None] + torch.tensor([-0.9, -0.2, 0.0, 0.1, 0.3, 0.7])
ADVANTAGES = torch.tensor([1.0, -0.7, 0.4, -1.3, 0.8, -0.5]).expand(B, T)
BASE: dict[str, Any] = {
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.1,
    "entropy_coef": 0.05,
    "num_items_in_batch": 31.0,
    "num_sequences": 7.0,
    "max_completion_length": 16,
}

# another value of each; where that would be the value in hand, the next one is taken
OTHERS: dict[str, tuple[Any, ...]] = {
    "loss_type": tuple(LOSS_TYPES),
    "importance_sampling_level": ("token", "sequence", "sequence_token"),
    "epsilon": (0.3,),
    "epsilon_high": (0.45, 2.2),
    "delta": (1.5,),
    "dual_clip": (1.6,),
    "beta": (0.3, 0.0),
    "kl_estimator": tuple(KL_TERMS),
    "kl_bias_correction": (True, False),
    "max_log_ratio": (0.5,),
    "entropy_coef": (0.0, -0.1),
    "entropy_aggregation": ("token_mean", "loss"),
    "sapo_temperature_pos": (1.4,),
    "sapo_temperature_neg": (1.4,),
    "vespo_k_pos": (1.3,),
    "vespo_lambda_pos": (1.3,),
    "vespo_k_neg": (1.3,),
    "vespo_lambda_neg": (1.3,),
    "num_items_in_batch": (57.0, None),
    "num_sequences": (11.0, None),
    "num_processes": (3,),
    "max_completion_length": (8,),
    "loss_scale": (0.25,),
    "old_logps": ("moved",),
}

# beside the base: what decides which options are read
SETTINGS: dict[str, dict[str, Any]] = {
    "token, k3": {},
    "sequence, k3": {"importance_sampling_level": "sequence"},
    "sequence_token, k2": {"importance_sampling_level": "sequence_token", "kl_estimator": "k2"},
    "token, k1": {"kl_estimator": "k1"},
    "sequence, abs": {"importance_sampling_level": "sequence", "kl_estimator": "abs"},
    "token, corrected k3": {"kl_bias_correction": True},
    "sequence, corrected k3": {"importance_sampling_level": "sequence", "kl_bias_correction": True},
    "policy term alone": {"beta": 0.0, "entropy_coef": 0.0},
    "sequence, policy term alone": {"importance_sampling_level": "sequence", "beta": 0.0, "entropy_coef": 0.0},
    "own weights": {"token_weights": torch.linspace(0.02, 0.05, B * T).view(B, T)},
}


def tensors() -> dict[str, Tensor]:
    g = generator(0)
    logits, ids = torch.randn(B, T, V, generator=g), torch.randint(V, (B, T), generator=g)
    logps = logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 5] = mask[2, 3:] = False
    return {
        "logits": logits, "completion_ids": ids, "advantages": ADVANTAGES, "old_logps": logps - LOG_RATIOS,
        "ref_logps": logps + 0.8 * torch.randn(B, T, generator=g), "completion_mask": mask,
    }  # fmt: skip


INPUTS = tensors()


def from_logits(backend: str, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Loss and gradient."""
    logits = INPUTS["logits"].clone().requires_grad_()
    loss = gk.fused_grpo_loss(logits, **{k: x for k, x in INPUTS.items() if k != "logits"} | options, backend=backend).loss
    return loss.detach(), *torch.autograd.grad(loss, logits)


def from_logps(backend: str, options: dict[str, Any]) -> tuple[Tensor, ...]:
    arguments = {k: x for k, x in INPUTS.items() if k not in ("logits", "completion_ids")}
    logps = (INPUTS["old_logps"] + LOG_RATIOS).requires_grad_()
    entropy = torch.linspace(0.1, 1.5, B * T).view(B, T).requires_grad_()
    loss = gk.grpo_loss(logps, entropy=entropy, **arguments | options, backend=backend).loss
    gradients = torch.autograd.grad(loss, (logps, entropy), allow_unused=True)
    return loss.detach(), *(torch.zeros(B, T) if x is None else x for x in gradients)


def another(name: str, options: dict[str, Any]) -> Any:
    if name == "old_logps":
        return INPUTS["old_logps"] + 0.05
    value = options.get(name, getattr(ObjectiveParams, name))
    return next(other for other in OTHERS[name] if other != value)


def settings_of(loss_type: str, setting: str) -> dict[str, Any]:
    return BASE | {"loss_type": loss_type} | ({"epsilon_high": 1.8} if loss_type == "cispo" else {}) | SETTINGS[setting]


def params_of(options: dict[str, Any]) -> ObjectiveParams:
    return ObjectiveParams(**{name: value for name, value in options.items() if name in OPTION_NAMES})


def test_every_option_has_another_value() -> None:
    assert OTHERS.keys() == {*OPTION_NAMES, "old_logps"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_option_acts_exactly_where_the_registry_says(backend: str, loss_type: str, setting: str) -> None:
    base = settings_of(loss_type, setting)
    acting = params_of(base).acting(token_weights="token_weights" in base)
    for run in (from_logits, from_logps):
        before = run(backend, base)
        assert all(x.isfinite().all() for x in before) and before[1].any()
        for name in OTHERS:
            changed = base | {name: another(name, base)}
            if name == "loss_type":
                changed["epsilon_high"] = settings_of(changed["loss_type"], setting)["epsilon_high"]
                if "token_weights" in base:  # the aggregations are one then
                    continue
            try:
                params_of(changed)
            except ValueError as refused:
                assert name in str(refused) and name in ("delta", "dual_clip", "kl_estimator", "kl_bias_correction"), refused
                continue
            after = run(backend, changed)
            same = all(same_bits(x, y) for x, y in zip(before, after))
            assert same == (name not in acting), f"{run.__name__}: {name} = {changed[name]} {'does nothing' if same else 'acts'}"


def test_own_weights_make_the_aggregations_one(backend: str) -> None:
    clipped = [name for name, kind in LOSS_TYPES.items() if kind.objective == "clip"]
    results = [from_logits(backend, settings_of(name, "own weights")) for name in clipped]
    assert len(clipped) == 5 and all(same_bits(x, y) for other in results[1:] for x, y in zip(results[0], other))


def test_without_an_upper_epsilon_the_lower_one_is_both(backend: str) -> None:
    one, both = (from_logits(backend, {"epsilon": 0.3, "epsilon_high": high}) for high in (None, 0.3))
    assert all(same_bits(x, y) for x, y in zip(one, both))


OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(CHOICES, ("", "no such")),
    **dict.fromkeys(("epsilon", "epsilon_high", "beta"), (-0.1, math.nan)),
    **{name: (0.0, -1.0, math.inf) for name, limit in LIMITS.items() if limit == {"above": 0}},
    "dual_clip": (1.0, 0.5),
    "entropy_coef": (math.nan, math.inf),
    "num_items_in_batch": (math.nan, torch.ones(2)),
    "num_sequences": (math.nan, torch.ones(2)),
    "num_processes": (0, -1, 1.5),
}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_range_is_checked_also_where_the_option_does_nothing(loss_type: str) -> None:
    assert OUT_OF_RANGE.keys() == {*OPTION_NAMES} - {"kl_bias_correction"}
    needed = {"loss_type": loss_type, "epsilon_high": 0.3}
    for name, values in OUT_OF_RANGE.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}: expected"):
                ObjectiveParams(**{**needed, name: value})
    with pytest.raises(TypeError, match="^kl_bias_correction: expected"):
        ObjectiveParams(**needed, kl_bias_correction=1)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_does_not_go_together_raises_by_name(backend: str, loss_type: str) -> None:
    needed, kind = settings_of(loss_type, "token, k3"), LOSS_TYPES[loss_type]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("ref_logps", {"ref_logps": None}),
        *(("kl_bias_correction", {"kl_bias_correction": True, "kl_estimator": name}) for name in ("k1", "k2", "abs")),
        *((name, {name: 2.0}) for name in ("delta", "dual_clip") if kind.objective != "clip"),
        *((name, {name: None}) for name in {"cispo": ["epsilon_high"], "dr_grpo": ["max_completion_length"]}.get(loss_type, [])),
        *(("one_pass", {"one_pass": True, "importance_sampling_level": level}) for level in ("sequence", "sequence_token")),
        *([("one_pass", {"one_pass": True})] if loss_type == "vespo" else []),
    ]
    missing = {"num_processes": 2, "num_items_in_batch": None, "num_sequences": None}
    if kind.global_count is None:
        from_logits(backend, needed | missing)
    else:
        refused.append((kind.global_count, missing))
    for name, options in refused:
        with pytest.raises(ValueError, match=f"^{name}: "):
            from_logits(backend, needed | options)
    with pytest.raises(ValueError, match="^entropy: "):
        gk.grpo_loss(INPUTS["old_logps"], ADVANTAGES, backend=backend, **needed | {"beta": 0.0})


@pytest.mark.parametrize("estimator", [*KL_TERMS, "corrected k3"])
def test_a_kl_penalty_descends_what_the_registry_says(backend: str, estimator: str) -> None:
    """Every token of a small vocabulary once, weighted by its probability: the expectation of the gradient, in closed form."""
    corrected, size = estimator == "corrected k3", 7
    z, reference, old = (torch.randn(size, generator=generator(seed)).double() for seed in (1, 2, 3))
    policy = z.clone().requires_grad_()
    probs, q = policy.softmax(-1), reference.softmax(-1)
    divergence = {
        "KL(reference || policy)": (q * (q.log() - probs.log())).sum(),
        "KL(policy || reference)": (probs * (probs.log() - q.log())).sum(),
        "nothing": 0 * probs.sum(),
        "sum_y abs(policy - reference)": (probs - q).abs().sum(),
    }[(BIAS_CORRECTED_K3 if corrected else KL_TERMS[estimator]).descends.split(":")[0].split(",")[0]]
    (expected,) = torch.autograd.grad(divergence, policy)

    sampler = old.softmax(-1) if corrected else probs.detach()
    logits = z.float().expand(1, size, size).clone().requires_grad_()
    loss = gk.fused_grpo_loss(
        logits, torch.arange(size)[None], torch.zeros(1), old_logps=sampler.log().float()[None], ref_logps=q.log().float()[None],
        token_weights=sampler.float()[None], beta=1.0, kl_estimator="k3" if corrected else estimator, kl_bias_correction=corrected,
        backend=backend,
    ).loss  # fmt: skip
    (got,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got[0].sum(0).double(), expected, rtol=1e-5, atol=1e-6)
