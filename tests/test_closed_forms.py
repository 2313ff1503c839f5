"""Where autograd itself is NaN or cancels: the gradient by hand, for every loss type and level."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import same_bits
from combination_cases import answer, batch, compare, wanted
from combination_oracle import LEVELS, LOSS_TYPES

FLOAT_MAX = torch.finfo(torch.float32).max


def options_of(loss_type: str, level: str, **others: Any) -> dict[str, Any]:
    needed = {"cispo": {"epsilon_high": 5.0}, "dr_grpo": {"max_completion_length": 4}}.get(loss_type, {})
    return {"loss_type": loss_type, "importance_sampling_level": level} | needed | others


def gradient(logps: Tensor, *args: Any, **options: Any) -> tuple[gk.GRPOLossOutput, Tensor]:
    leaf = logps.clone().requires_grad_()
    output = gk.grpo_loss(leaf, *args, **options)
    output.loss.backward()
    return output, leaf.grad


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("drift", [0.0, -3.0, 5.0, 79.9])
def test_bias_corrected_kl_has_its_closed_form_gradient(backend: str, level: str, drift: float) -> None:
    """The product rule's two terms cancel at small d (8 % off at d = 1e-3 in float32), so this is not what autograd of float32 gives."""
    d = torch.tensor([[1e-6, -1e-6, 1e-3, -1e-3, 0.3], [1.5, -4.0, 20.0, 90.0, -90.0], [1e-5, 0.0, 1e-2, -0.6, 0.2]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 1, 0]])
    logps = torch.full((3, 5), -1.0)
    ref, old = logps + d, logps - drift
    output, got = gradient(
        logps, torch.zeros(3), old_logps=old, ref_logps=ref, completion_mask=mask, backend=backend,
        beta=0.5, kl_bias_correction=True, loss_type="luspo", importance_sampling_level=level,
    )  # fmt: skip
    m, w = mask.double(), mask.double() / 3
    d, log_rho = (ref.double() - logps.double()) * m, logps.double() - old.double()
    rho, held = log_rho.exp(), d.clamp(-80, 80)
    kl = (rho * (torch.expm1(held) - held)).clamp(max=FLOAT_MAX)
    if level == "sequence":
        own = torch.where(d.abs() <= 80, rho * -torch.expm1(held), 0).clamp(-FLOAT_MAX, FLOAT_MAX)
        want = 0.5 * (w * own + m / m.sum(1, keepdim=True) * (w * kl).sum(1, keepdim=True))
    else:
        want = 0.5 * w * (rho * -d).clamp(-FLOAT_MAX, FLOAT_MAX)
    want = want.clamp(-FLOAT_MAX, FLOAT_MAX)
    torch.testing.assert_close(output.kl.double(), kl * m, rtol=2e-5, atol=1e-30)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("level", LEVELS)
def test_bias_corrected_kl_stays_finite_where_ratio_and_estimate_are_both_held(backend: str, level: str) -> None:
    output, got = gradient(
        torch.tensor([[-500.0, -1.0]]), torch.ones(1), old_logps=torch.tensor([[-1000.0, -900.0]]), ref_logps=torch.tensor([[0.0, -2.0]]),
        beta=1.0, kl_bias_correction=True, importance_sampling_level=level, backend=backend,
    )  # fmt: skip
    assert output.kl[0, 0] == FLOAT_MAX and got.isfinite().all() and got[0, 0] == 0
    assert (got[0, 1] != 0) == (level == "sequence")  # its own d is not held; the product rule's first term is left


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", ["grpo", "sapo"])
def test_gradient_passes_at_the_bound_of_a_log_ratio_and_is_0_beyond(backend: str, loss_type: str, level: str) -> None:
    """Exact numbers: the mean of 0.5 and 1.5 is the bound 1; a quarter more is beyond. At a negative advantage nothing is clipped."""
    logps = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    at = torch.tensor([[1.0, 1.0], [1.0, 1.0]]) if level == "token" else torch.tensor([[0.5, 1.5], [1.5, 0.5]])
    for sign in (1, -1):
        # a ratio below the clip range passes at a positive advantage, one above it at a negative one
        options = options_of(loss_type, level, max_log_ratio=1.0, backend=backend)
        advantages = torch.tensor([-1.0, -1.0]) * sign
        log_ratios = sign * at
        _, got = gradient(logps, advantages, old_logps=logps - log_ratios, **options)
        ratio = math.exp(sign)
        slope = -ratio * -sign
        if loss_type == "sapo":
            k = 1.0 if sign < 0 else 1.05
            gate = 1 / (1 + math.exp(-k * (ratio - 1)))
            slope = 4 * gate * (1 - gate) * ratio * sign
        torch.testing.assert_close(got, torch.full((2, 2), slope / 4), rtol=1e-6, atol=0)
        log_ratios[0, 0] += sign * 0.25
        _, got = gradient(logps, advantages, old_logps=logps - log_ratios, **options)
        beyond = torch.tensor([[True, level != "token"], [False, False]])
        assert (got[beyond] == 0).all() and (got[1] != 0).all()
        assert level != "token" or got[0, 1] != 0


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_passes_at_the_bound_of_k3_and_is_0_beyond(backend: str, level: str) -> None:
    logps = torch.tensor([[-3.0, -3.0, -3.0, -3.0]])
    d = torch.tensor([[2.0, 2.25, -2.0, -2.25]])
    output, got = gradient(
        logps, torch.zeros(1), ref_logps=logps + d, beta=1.0, max_log_ratio=2.0, importance_sampling_level=level, backend=backend
    )
    e = math.exp(2.0)
    torch.testing.assert_close(got * 4, torch.tensor([[1 - e, 0.0, 1 - 1 / e, 0.0]]), rtol=1e-6, atol=0)
    torch.testing.assert_close(output.kl, torch.tensor([[e - 3, e - 3, 1 / e + 1, 1 / e + 1]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_columns_of_minus_infinity_are_as_if_they_were_not_there(backend: str, loss_type: str, level: str) -> None:
    inputs = batch(f"columns {loss_type} {level}", torch.float32, options_of(loss_type, level, kl_estimator="k3", beta=0.1))
    allowed = torch.ones_like(inputs["logits"], dtype=torch.bool)
    allowed[..., 3::4] = False
    ids = inputs["completion_ids"].clamp(0, allowed.shape[-1] - 1)
    allowed.scatter_(-1, ids[..., None], True)
    low = inputs | {"logits": torch.where(allowed, inputs["logits"], -1e4)}  # e^-10,000 is 0 in float64 too
    expected = wanted(low)
    for layout in ("padded", "packed"):
        got = answer(inputs | {"logits": torch.where(allowed, inputs["logits"], -torch.inf)}, layout, "default", backend)
        assert (got.dlogits[~allowed] == 0).all()
        compare(f"{backend} -inf columns, {loss_type}, {level}", got, expected, torch.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo"])
def test_an_impossible_chosen_token_leaves_loss_and_gradient_finite(backend: str, loss_type: str, level: str) -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    logits[0, 1, 2] = -torch.inf
    for advantage in (1.0, -1.0):
        leaf = logits.clone().requires_grad_()
        output = gk.fused_grpo_loss(
            leaf, ids, torch.full((2,), advantage), old_logps=torch.full((2, 3), -2.0), ref_logps=torch.full((2, 3), -2.0),
            beta=0.1, backend=backend, **options_of(loss_type, level),
        )  # fmt: skip
        output.loss.backward()
        assert output.logps[0, 1] == -torch.inf and output.loss.isfinite() and leaf.grad.isfinite().all()
        assert (leaf.grad[0, 1] == 0).all()  # its log-ratio, and the d of its k3, are held
        assert (leaf.grad[1] != 0).all()


PENALTIES = {
    "none": {},
    "k3": {"kl_estimator": "k3", "beta": 0.1},
    "corrected": {"kl_estimator": "k3", "kl_bias_correction": True, "beta": 0.1},
}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("bad", ["NaN", "+inf", "all -inf"])
def test_a_degenerate_row_spoils_its_own_sequence_at_most(
    backend: str, bad: str, loss_type: str, level: str, penalty: str, layout: str
) -> None:
    inputs = batch(f"degenerate {loss_type} {level}", torch.float32, options_of(loss_type, level, **PENALTIES[penalty]))
    spoiled = inputs | {"logits": inputs["logits"].clone()}
    row = spoiled["logits"][3, 0]
    row[:] = torch.where(torch.arange(len(row)) == 5, math.nan, row) if bad == "NaN" else row
    row[5] = math.inf if bad == "+inf" else row[5]
    row[:] = -math.inf if bad == "all -inf" else row
    if inputs["advantages"].dim() == 1:  # also where the advantage is 0
        spoiled["advantages"] = inputs["advantages"] = inputs["advantages"] * (torch.arange(len(inputs["advantages"])) != 3)
    healthy, got = (answer(x, layout, "default", backend) for x in (inputs, spoiled))
    assert got.output.loss.isnan() and got.output.logps[3, 0].isnan() and got.output.entropy[3, 0].isnan()
    assert got.dlogits[3, 0].isnan().all()
    if level != "token" and loss_type not in ("vespo", "reinforce"):
        active = inputs["completion_mask"][3]
        assert got.dlogits[3][active].isnan().all() and (got.dlogits[3][~active] == 0).all()
    others = torch.arange(len(got.dlogits)) != 3
    assert same_bits(got.dlogits[others], healthy.dlogits[others])
    for name in ("logps", "entropy", "kl", "clipped"):
        assert same_bits(getattr(got.output, name)[others], getattr(healthy.output, name)[others]), name


def test_a_weight_of_vespo_that_is_not_finite_is_0(backend: str) -> None:
    """k = 100 at a log-ratio of 18 is e^1800."""
    logps, old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[-10.0, -10.0], [-1.0, -1.0]])
    steep = {"vespo_k_pos": 100.0, "vespo_lambda_pos": 1e-30, "loss_type": "vespo", "backend": backend}
    output, got = gradient(logps, torch.ones(2), old_logps=old, **steep)
    assert output.loss.isfinite() and (got[0] == 0).all()
    torch.testing.assert_close(got[1], torch.full((2,), -0.25))  # PHI(1) = 1


@pytest.mark.parametrize(
    "drifts, q", [((-100.0, 0.0), math.log(1e-8)), ((300.0, 0.0), 20.0), ((-100.0, 15.0), -5.0), ((300.0, -15.0), 5.0)]
)
def test_the_log_ratio_of_vespo_is_clamped_for_each_token_and_for_the_sequence(backend: str, drifts: tuple[float, float], q: float) -> None:
    """q = clamp(sum of clamp(l - l_old, -20, 20), log 1e-8, 20)."""
    logps = torch.tensor([[-1.0, -2.0]])
    mild = {"vespo_k_pos": 0.1, "vespo_lambda_pos": 1e-9, "loss_type": "vespo", "backend": backend}
    _, got = gradient(logps, torch.ones(1), old_logps=logps - torch.tensor([drifts]), **mild)
    phi = math.exp(1e-9 + 0.1 * q - 1e-9 * math.exp(q))
    torch.testing.assert_close(got, torch.full((1, 2), -phi / 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("weight", ["policy_weights", "token_weights"])
def test_an_impossible_token_without_weight_adds_nothing(backend: str, weight: str) -> None:
    logits = torch.zeros(1, 2, 4)
    logits[0, 0, 1] = -torch.inf
    inputs = {weight: torch.tensor([[0.0, 1.0]]), "ref_logps": torch.zeros(1, 2), "kl_estimator": "k1", "loss_type": "reinforce"}
    beta = 0.1 if weight == "token_weights" else 0.0
    logits.requires_grad_()
    output = gk.fused_grpo_loss(logits, torch.ones(1, 2, dtype=torch.long), torch.ones(1), beta=beta, backend=backend, **inputs)
    output.loss.backward()
    scale = 1 if weight == "token_weights" else 1 / 2
    torch.testing.assert_close(output.loss, scale * (1 - beta) * torch.tensor(4.0).log())
    assert logits.grad.isfinite().all() and logits.grad[0, 1].abs().sum() > 0


def test_impossible_tokens_on_both_sides_leave_a_sequence_finite(backend: str) -> None:
    logits = torch.zeros(1, 2, 4)
    logits[0, 0, 1] = -torch.inf
    logits.requires_grad_()
    old_logps = torch.tensor([[-1.0, -torch.inf]])
    ids = torch.ones(1, 2, dtype=torch.long)
    output = gk.fused_grpo_loss(logits, ids, torch.ones(1), old_logps=old_logps, importance_sampling_level="sequence", backend=backend)
    output.loss.backward()
    assert output.loss.isfinite() and logits.grad.isfinite().all()
