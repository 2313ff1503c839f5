"""The loss of a token from its log-probability: values and derivatives over the whole range, at ties and at the bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
import oracle
from cases import generator
from grpo_kernels import reference

CLIPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "higher": {"epsilon_high": 0.28},
    "delta": {"delta": 1.5},
    "low delta": {"delta": 1.1},
    "dual": {"dual_clip": 3.0},
    "delta and dual": {"delta": 4.0, "dual_clip": 1.5, "epsilon": 0.1},
    "wide": {"epsilon": 1.0, "epsilon_high": 5.0},
    "no room": {"epsilon": 0.0},
    "short hold": {"max_log_ratio": 0.5},
    "long hold": {"max_log_ratio": 200.0},
}


def token(logp: float, advantage: float, backend: str, old: float | None = 0.0, ref: float | None = None, **options: Any):
    """Output and dLoss/dlogp of one token of weight 1."""
    logps = torch.tensor([[logp]], requires_grad=True)
    constants = {name: None if x is None else torch.tensor([[x]]) for name, x in (("old_logps", old), ("ref_logps", ref))}
    output = gk.grpo_loss(logps, torch.tensor([advantage]), **constants, **options, backend=backend)
    output.loss.backward()
    return output, logps.grad.item()


def random_tokens(seed: int, least: float = 1e-8, count: int = 4000) -> dict[str, Tensor]:
    """Log-ratios and distances to the reference of both signs, from `least` to beyond what is held, a third of them 0."""
    g = generator(seed)

    def distance() -> Tensor:
        size = torch.empty(1, count).uniform_(math.log(least), math.log(120), generator=g).exp()
        return size * torch.randint(-1, 2, (1, count), generator=g)

    logps = -torch.rand(1, count, generator=g) * 20
    advantages = torch.randn(1, count, generator=g) * torch.randint(0, 3, (1, count), generator=g)
    return {"logps": logps, "advantages": advantages, "old_logps": logps + distance(), "ref_logps": logps + distance()}


@pytest.mark.parametrize("beta", [0.0, 0.04, 1.0])
@pytest.mark.parametrize("clip", CLIPS)
def test_value_and_derivative_hold_over_the_whole_range(backend: str, clip: str, beta: float) -> None:
    # without room, a log-ratio that float32 rounds to 0 is on the other side of the edge
    tokens = random_tokens(seed=len(clip) + int(100 * beta), least=1e-3 if clip == "no room" else 1e-8)
    weights = torch.rand(tokens["logps"].shape, generator=generator(1))
    logps = tokens.pop("logps").requires_grad_()
    exact = logps.detach().double().requires_grad_()
    policy, kl, clipped = oracle.token_terms(exact, **{name: x.double() for name, x in tokens.items()}, **CLIPS[clip])
    (dlogps,) = torch.autograd.grad((weights * (policy + beta * kl)).sum(), exact)

    output = gk.grpo_loss(logps, **tokens, token_weights=weights, beta=beta, **CLIPS[clip], backend=backend)
    output.loss.backward()
    # float32 subtracts two log-probs of up to 140 first, so the exponent is off by up to 2^-18: 8e-6 of e^d, whatever the method
    d = (tokens["ref_logps"] - logps).detach().double().abs()
    oracle.assert_within("kl of a token", output.kl, kl.detach(), 1e-5 * kl.detach() + 4e-6 * torch.expm1(d.clamp(max=80)))
    scale = 2e-5 * weights.double() * (policy.abs() + beta * (kl + 1)).detach() + 1e-7
    oracle.assert_within("dlogps of a token", logps.grad, dlogps, scale + 2e-5 * dlogps.abs())
    for got, want in ((output.loss, policy + beta * kl), (output.policy_loss, policy)):
        total, size = (weights * want).sum().detach(), (weights * want).abs().sum().detach()
        oracle.assert_within("sum over tokens", got, total, 1e-5 * size + 1e-6)
    assert torch.equal(output.clipped, clipped.to(torch.int8)) and (dlogps != 0).any()


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("clip", CLIPS)
def test_the_reference_is_the_oracle(clip: str, beta: float) -> None:
    tokens = {name: x.double() for name, x in random_tokens(seed=5).items()}
    logps = tokens.pop("logps")
    options = {"epsilon": 0.2, "epsilon_high": 0.2, **CLIPS[clip]}
    if "epsilon" in CLIPS[clip] and "epsilon_high" not in CLIPS[clip]:
        options["epsilon_high"] = options["epsilon"]
    options["max_log_ratio"] = min(options.get("max_log_ratio", 80.0), 80.0)
    results = []
    for terms in (oracle.token_terms, reference.token_objective):
        x = logps.clone().requires_grad_()
        policy, kl, clipped = terms(x, **tokens, **options)
        results.append((policy, kl, clipped.int(), torch.autograd.grad((policy + beta * kl).sum(), x)[0]))
    for want, got in zip(*results):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("advantage", "losses"), [(1.0, (-0.5, -1.0, -1.2)), (-1.0, (0.8, 1.0, 1.5)), (0.0, (0.0, 0.0, 0.0))])
def test_ppo_clips_what_would_gain(backend: str, advantage: float, losses: tuple[float, ...]) -> None:  # F28
    for ratio, loss in zip((0.5, 1.0, 1.5), losses):
        output, dlogp = token(math.log(ratio), advantage, backend)
        clipped = abs(loss) != ratio and advantage != 0
        assert output.loss.item() == pytest.approx(loss, abs=1e-6)
        assert dlogp == pytest.approx(0 if clipped else -ratio * advantage, abs=1e-6)
        assert output.clipped.item() == (0 if not clipped else 1 if ratio > 1 else -1)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_tie_passes_the_whole_gradient(backend: str, advantage: float) -> None:
    """At ratio 1 with epsilon 0 the two branches are equal; a minimum that splits its gradient would halve it."""
    for old in (None, -1.5):
        output, dlogp = token(-1.5, advantage, backend, old=old, epsilon=0.0)
        assert dlogp == -advantage and output.clipped.item() == 0


def test_a_ratio_exactly_on_a_bound_passes_the_gradient_and_one_beyond_does_not(backend: str) -> None:
    beyond = 0.5000001  # the log-ratio of more than one ulp of the ratio further
    ratio = token(0.5, -1.0, backend)[0].loss.item()  # e^0.5 with the bits of this backend
    assert ratio == pytest.approx(math.exp(0.5), rel=1e-6)
    for advantage, options in (
        (1.0, {"epsilon_high": ratio - 1}),
        (-1.0, {"dual_clip": ratio}),
        (-1.0, {"delta": ratio}),
    ):
        assert token(0.5, advantage, backend, **options)[1] == pytest.approx(-ratio * advantage, rel=1e-6), options
        output, dlogp = token(beyond, advantage, backend, **options)
        assert dlogp == 0 and output.loss.item() == pytest.approx(-ratio * advantage, rel=1e-6)
        assert output.clipped.item() == (1 if "epsilon_high" in options else 0)  # delta and dual clip do not count
    low = token(-0.5, 1.0, backend)[0].loss.item()
    assert token(-0.5, -1.0, backend, epsilon=1 + low)[1] == pytest.approx(-low, rel=1e-6)
    assert token(-0.5000001, -1.0, backend, epsilon=1 + low)[1] == 0


@pytest.mark.parametrize("bound", [80.0, 20.0, 0.25])
def test_a_log_ratio_is_held_at_the_bound(backend: str, bound: float) -> None:  # F04
    options = {"max_log_ratio": bound}
    for log_ratio in (bound, bound * (1 + 1e-6), 1000.0, math.inf):
        output, dlogp = token(0.0, -1.0, backend, old=-log_ratio, **options)
        assert output.loss.item() == pytest.approx(math.exp(bound), rel=1e-5)
        assert dlogp == (pytest.approx(math.exp(bound), rel=1e-5) if log_ratio == bound else 0)
        output, dlogp = token(0.0, 1.0, backend, old=log_ratio, **options)
        assert output.loss.item() == pytest.approx(-math.exp(-bound), rel=1e-5)
        assert dlogp == (pytest.approx(-math.exp(-bound), rel=1e-5) if log_ratio == bound else 0)
        for sign in (1, -1):
            output, dlogp = token(0.0, 0.0, backend, ref=sign * log_ratio, beta=1.0, **options)
            assert output.kl.item() == pytest.approx(math.expm1(sign * bound) - sign * bound, rel=1e-5)
            assert dlogp == (pytest.approx(-math.expm1(sign * bound), rel=1e-5) if log_ratio == bound else 0)


def test_the_bound_is_never_above_80(backend: str) -> None:
    for bound in (80.0, 100.0, 1e6, None):
        output, dlogp = token(0.0, -6000.0, backend, old=-90.0, max_log_ratio=bound)
        assert output.loss.item() == pytest.approx(6000 * math.exp(80), rel=1e-5) and dlogp == 0
        output, dlogp = token(0.0, -6000.0, backend, old=-80.0, max_log_ratio=bound)
        assert math.isfinite(dlogp) and dlogp == pytest.approx(6000 * math.exp(80), rel=1e-5)


def test_k3_keeps_its_digits_near_equality(backend: str) -> None:  # F05
    distances = [s * x for x in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.4999, 0.5, 0.5001, 1.0, 5.0, 20.0) for s in (1, -1)]
    for d in distances:
        output, dlogp = token(0.0, 0.0, backend, ref=d, beta=1.0)
        exact = torch.tensor(d).double().item()  # the float32 that was given
        want = exact**2 / 2 + exact**3 / 6 + exact**4 / 24 if abs(exact) < 1e-3 else math.expm1(exact) - exact
        assert output.kl.item() >= 0
        assert output.kl.item() == pytest.approx(want, rel=1e-6) and dlogp == pytest.approx(-math.expm1(exact), rel=1e-6)
    assert token(-3.0, 0.0, backend, ref=-3.0, beta=1.0)[0].kl.item() == 0


@pytest.mark.parametrize("poisoned", ["logp", "old", "ref"])
def test_nan_stays_nan(backend: str, poisoned: str) -> None:
    values = {"logp": -1.0, "advantage": 1.0, "old": -1.0, "ref": -1.0} | {poisoned: math.nan}
    for advantage in (1.0, -1.0, 0.0):
        for options in ({}, {"delta": 2.0, "dual_clip": 3.0}):
            output, dlogp = token(**(values | {"advantage": advantage}), backend=backend, beta=0.1, **options)
            assert output.loss.isnan() and math.isnan(dlogp) and output.clipped.item() == 0
    if poisoned == "logp":  # also where the derivative, -A, does not hold the log-prob
        assert math.isnan(token(math.nan, 1.0, backend, loss_type="reinforce")[1])


def test_a_reference_without_a_penalty_is_only_reported(backend: str) -> None:
    output, dlogp = token(-1.0, 1.0, backend, old=None, ref=math.nan)
    assert output.kl.isnan() and output.loss.item() == -1 and dlogp == -1
    assert token(-1.0, 1.0, backend, ref=-1.5)[0].kl.item() == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-6)
    assert token(-1.0, 1.0, backend, ref=None)[0].kl.item() == 0


def test_advantages_of_one_sequence_may_differ_by_token(backend: str) -> None:  # F15: (3,) beside (3, 3) is one a sequence
    logps = torch.zeros(3, 3, requires_grad=True)
    gk.grpo_loss(logps, torch.tensor([1.0, 2.0, 3.0]), backend=backend).loss.backward()
    torch.testing.assert_close(logps.grad, -torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 3) / 9)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_policy_loss_is_the_policy_term_alone(backend: str, beta: float) -> None:
    logps = torch.full((1, 2), -1.0)
    entropy, common = torch.full((1, 2), 0.3), {"old_logps": logps - 0.1, "ref_logps": logps + 1, "backend": backend}
    output = gk.grpo_loss(logps, torch.ones(1), entropy=entropy, beta=beta, entropy_coef=0.2, **common)
    alone = gk.grpo_loss(logps, torch.ones(1), **common)
    assert output.policy_loss == alone.loss
    torch.testing.assert_close(output.loss - output.policy_loss, torch.tensor(beta * (math.e - 2) - 0.06))
