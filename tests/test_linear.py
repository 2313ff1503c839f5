"""The loss from hidden states: value, parts and the gradients of hidden states, weight and bias against float64, over the options in pairs,
every loss type at every level, chunks that split sequences; and beside the loss from logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import combination_cases
import combination_oracle
import grpo_kernels as gk
import oracle
from cases import DTYPES, batch, generator, pairwise, same_bits
from linear_cases import LAYOUTS, Problem, Result, assert_gradients, assert_matches, oracle_arguments, problem, run
from test_loss import FACTORS, arguments

HEADS: dict[str, tuple] = {
    "bias": (False, True),
    "scale": (1.0, 0.5, 2.0),
    "softcap": (None, 3.0),
    "chunk_size": (None, 1, 5, 7, 24),  # of 24 tokens: a sequence has 6
    "logits_dtype": (None, torch.float32),
    "hidden_layout": LAYOUTS,
}
PAIRS = pairwise({name: values for name, values in FACTORS.items() if name not in ("mode", "layout")} | HEADS, seed=1)


def problem_of(case: dict[str, Any], seed: int, dtype: torch.dtype, softcap: float | None) -> Problem:
    logits_dtype = None if dtype == torch.float64 else case["logits_dtype"]
    head = {"bias": case["bias"], "scale": case["scale"], "chunk_size": case["chunk_size"], "logits_dtype": logits_dtype}
    return problem(arguments(case, seed), dtype, seed, softcap=softcap, **head)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_every_pair_of_options_is_exact_in_float64(number: int) -> None:
    case = PAIRS[number]
    p = problem_of(case, number, torch.float64, case["softcap"])
    assert_matches(p, run(p, "torch", layout=case["hidden_layout"], upstream=case["upstream"]), case["upstream"])


# What an emulated backend could do wrong with these options is in the tests of the loss from logits: a third of the pairs is enough there.
SOME = [pytest.param(number, marks=pytest.mark.exhaustive if number % 3 else ()) for number in range(len(PAIRS))]


@pytest.mark.parametrize("number", SOME)
def test_every_pair_of_options_is_within_budget(backend: str, number: int) -> None:
    case = PAIRS[number]
    p = problem_of(case, number, case["dtype"], None)
    expected = assert_matches(p, run(p, backend, layout=case["hidden_layout"], upstream=case["upstream"]), case["upstream"])
    assert (expected.dlogits != 0).any()


def combination(loss_type: str, level: str, penalty: str | None, dtype: torch.dtype, chunk_size: int | None) -> Problem:
    chosen: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level}
    if penalty is not None:
        chosen |= {"kl_estimator": penalty.split()[0], "kl_bias_correction": "corrected" in penalty, "beta": 0.1}
    inputs = combination_cases.batch(f"{loss_type} {level} {penalty}", torch.float32, chosen)
    return problem(inputs, dtype, 0, bias=True, chunk_size=chunk_size)


def check_combination(p: Problem, got: Result) -> None:
    arguments = oracle_arguments(p)
    want = combination_oracle.expect(**arguments, mask=arguments.pop("completion_mask"))
    active = want.logps != 0
    small = oracle.logp_budget(want.logps)
    oracle.assert_within("logps", got.output.logps, want.logps, small)
    oracle.assert_within("entropy", got.output.entropy, want.entropy, oracle.logp_budget(want.entropy))
    oracle.assert_within("kl", got.output.kl, want.kl, 1e-5 * want.kl.abs() + want.kl_error + 1e-300)
    budget = 1e-6 + 1e-5 * want.size.sum() + (want.a.abs() * small).sum()
    oracle.assert_within("loss", got.output.loss, want.loss, budget)
    oracle.assert_within("policy_loss", got.output.policy_loss, want.policy_loss, budget)
    assert torch.equal(got.output.clipped, want.clipped.to(torch.int8))
    budget = 2e-5 * want.dlogits.abs() + ((2e-7 * (want.a.abs() + want.b.abs()) + want.a_error) / want.temperature)[..., None]
    assert_gradients(p, got, want.dlogits, torch.where(active[..., None], budget, 0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("penalty", combination_oracle.PENALTIES)
@pytest.mark.parametrize("level", combination_oracle.LEVELS)
@pytest.mark.parametrize("loss_type", combination_oracle.LOSS_TYPES)
def test_every_loss_at_every_level_is_within_budget(backend: str, loss_type: str, level: str, penalty: str | None) -> None:
    """Chunks that hold whole sequences (of up to 7 tokens), and chunks that do not."""
    for chunk_size in (9, 3):
        p = combination(loss_type, level, penalty, torch.float32, chunk_size)
        check_combination(p, run(p, backend))


@pytest.mark.parametrize("level, loss_type", [("sequence", "grpo"), ("sequence_token", "luspo"), ("token", "vespo"), ("token", "cispo")])
@pytest.mark.parametrize("chunk_size", [None, 7, 2])
def test_losses_of_whole_sequences_in_half_precision(backend: str, level: str, loss_type: str, chunk_size: int | None) -> None:
    p = combination(loss_type, level, "k3", torch.bfloat16, chunk_size)
    check_combination(p, run(p, backend))


# --- packed rows ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 8, 3])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("layout", ["packed", "model_packed"])
def test_packed_rows_are_the_padded_ones(backend: str, layout: str, level: str, chunk_size: int | None) -> None:
    p = combination("grpo", level, "k3", torch.float32, chunk_size)
    padded = run(p, backend)
    inputs = {name: x for name, x in oracle_arguments(p).items() if name != "logits"} | {"logits": p.hidden}
    laid = combination_cases.lay_out(inputs, layout)
    head = {name: p.arguments[name] for name in ("logit_scale", "logit_softcap", "logits_dtype", "chunk_size")}
    packed = run(p._replace(hidden=laid.full if laid.full.dim() == 3 else laid.full[None], arguments=laid.arguments | head), backend)
    torch.testing.assert_close(packed.output.loss, padded.output.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(laid.unpack(packed.output.logps), padded.output.logps)
    assert packed.output.kl.shape == laid.full.shape[-2:-1]
    dhidden = laid.unpack(packed.dhidden[0] if layout == "packed" else packed.dhidden)
    want = torch.where(combination_cases.INSIDE[..., None], padded.dhidden, 0)
    torch.testing.assert_close(dhidden, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed.dweight, padded.dweight, rtol=1e-5, atol=1e-6)


# --- beside the loss from logits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_from_logits_has_the_same_bits(backend: str, dtype: torch.dtype) -> None:
    """Of everything per token: the logits are exact, so they are the same."""
    p = problem(batch(1, (3, 6, 130), dtype) | {"beta": 0.1, "entropy_coef": 0.1}, dtype, 1, chunk_size=4)
    got = run(p, backend).output
    logits = torch.where(p.arguments["completion_mask"][..., None], p.logits, 0).to(dtype).requires_grad_()
    arguments = {name: x for name, x in oracle_arguments(p).items() if name != "logits"}
    want = gk.fused_grpo_loss(logits, **arguments, backend=backend)
    for name in want._fields:
        assert same_bits(getattr(got, name).detach(), getattr(want, name).detach()), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_at_the_vocabulary_of_qwen(backend: str, dtype: torch.dtype) -> None:
    """Ordinary values: at most twice the error that the same loss has from logits, of which autograd makes the products back."""
    g, (B, T, D, V) = generator(2), (2, 8, 64, 151936)
    hidden, weight = torch.randn(B, T, D, generator=g).to(dtype), (0.2 * torch.randn(V, D, generator=g)).to(dtype)
    ids, mask = torch.randint(V, (B, T), generator=g), torch.rand(B, T, generator=g) < 0.8
    exact = (hidden.double() @ weight.double().t()).requires_grad_()
    logps, _ = oracle.logps_and_entropy(exact.detach(), ids, torch.ones(B, T, dtype=torch.float64))
    near = {name: (logps + 0.3 * torch.randn(B, T, generator=g)).float() for name in ("old_logps", "ref_logps")}
    arguments = {"completion_ids": ids, "advantages": torch.randn(B, generator=g), "completion_mask": mask, "beta": 0.04, **near}
    dlogits = oracle.grpo(exact, **arguments).dlogits.view(B * T, V)
    want = (dlogits @ weight.double()).view(B, T, D), dlogits.t() @ hidden.double().view(B * T, D)

    def gradients(loss: Any) -> tuple[torch.Tensor, ...]:
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss(*leaves).loss.backward()
        return tuple(x.grad for x in leaves)

    ours = gradients(lambda h, w: gk.fused_linear_grpo_loss(h, w, **arguments, chunk_size=5, backend=backend))
    theirs = gradients(lambda h, w: gk.fused_grpo_loss(h @ w.t(), **arguments, backend=backend))
    for name, got, other, exactly in zip(("dhidden", "dweight"), ours, theirs, want):
        error, allowed = ((x.double() - exactly).abs().max() for x in (got, other))
        print(f"{backend} {dtype} {name}: {error:.2e} (from logits {allowed:.2e}, largest {exactly.abs().max():.2e})")
        assert exactly.abs().max() > 1e-3 and error <= 2 * allowed + 1e-7 * exactly.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_capped_logits_are_as_exact_as_those_of_eager(backend: str, dtype: torch.dtype) -> None:
    """Gemma 2's cap: the derivative is made of the logits in front of it, so it keeps its digits where the cap holds."""
    inputs = batch(3, (3, 6, 130), dtype) | {"beta": 0.1, "entropy_coef": 0.1}
    p = problem(inputs, dtype, 3, softcap=4.0, scale=0.5, chunk_size=5)
    expected = oracle.grpo(**oracle_arguments(p))
    got = run(p, backend)

    leaves = [torch.where(p.hidden.isnan(), 0, p.hidden).requires_grad_(), p.weight.clone().requires_grad_()]
    logits = 4.0 * torch.tanh((leaves[0] @ leaves[1].t()) * 0.5 / 4.0)
    logits.backward(oracle.grpo(**oracle_arguments(p) | {"logits": logits.detach()}, dtype=torch.float32).dlogits)
    dz = (expected.dlogits * p.slope).view(18, -1)
    hidden = leaves[0].detach().double().view(18, -1)
    for name, x, want, eager in (
        ("dhidden", got.dhidden, (dz @ p.weight.double()).view(3, 6, -1), leaves[0].grad),
        ("dweight", got.dweight, dz.t() @ hidden, leaves[1].grad),
    ):
        error, allowed = ((y.double() - want).norm() / want.norm() for y in (x, eager))
        print(f"{backend} {dtype} {name}: {error:.2e} (eager {allowed:.2e})")
        assert error <= 2 * allowed + 1e-6


def test_a_cap_of_30_at_a_logit_of_124(backend: str) -> None:  # F33: x tanh(x / c) would give 123.94
    hidden, weight = torch.tensor([[124.0]], requires_grad=True), torch.tensor([[1.0], [0.0], [0.0]])
    arguments = {"token_ids": torch.tensor([0]), "logit_softcap": 30.0, "temperature": 10.0, "backend": backend}
    logps = gk.fused_linear_logprobs(hidden, weight, **arguments).logps
    want = torch.tensor([2.99846, 0.0, 0.0]).log_softmax(0)[0]
    torch.testing.assert_close(logps[0].detach(), want, rtol=0, atol=1e-5)
    logps.backward(torch.ones(1))
    slope = 1 - torch.tanh(torch.tensor(124 / 30.0, dtype=torch.float64)) ** 2
    torch.testing.assert_close(hidden.grad[0, 0].double(), slope / 10 * (1 - want.exp().double()), rtol=1e-4, atol=0)


# --- precision --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chunk_size, products", [(512, 1), (256, 2), (1, 512)])
def test_dweight_adds_chunks_up_in_float32(backend: str, dtype: torch.dtype, chunk_size: int, products: int) -> None:
    """Every chunk adds the same: a sum that is kept in half precision stops growing. Here one rounding a product and one of the sum."""
    N, V = 512, 3
    hidden = torch.full((1, N, 2), 1.0, dtype=dtype)
    hidden[..., 1] = 0.75
    weight = torch.zeros(V, 2, dtype=dtype).requires_grad_()
    ids = torch.zeros(1, N, dtype=torch.int64)
    options = {"token_weights": torch.ones(1, N), "chunk_size": chunk_size, "backend": backend}
    gk.fused_linear_grpo_loss(hidden, weight, ids, torch.ones(1), **options).loss.backward()
    exact = torch.tensor([2 / 3, -1 / 3, -1 / 3], dtype=torch.float64)
    stored = (-exact).to(dtype).double()  # dlogits of every row
    want = (N * stored)[:, None] * torch.tensor([1.0, 0.75], dtype=torch.float64)
    budget = products * oracle.half_ulp(want / products, dtype) + oracle.half_ulp(want, dtype)
    oracle.assert_within(f"dweight of {products} products", weight.grad, want, budget)

    running, product = torch.zeros((), dtype=dtype), (want[0, 0] / 512).to(dtype)
    for _ in range(512):
        running = running + product
    if products == 512:
        assert (running.double() - want[0, 0]).abs() > budget[0, 0], "a half-precision sum would pass this test"


def test_three_chunks_of_whole_sequences_add_up_in_float32(backend: str) -> None:
    """Of two tokens each, where two chunks of three rows would hold six tokens: 256 + 1 + 1, of which bfloat16 would lose both ones."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    options = {"importance_sampling_level": "sequence", "token_weights": torch.ones(3, 2), "chunk_size": 3, "backend": backend}
    ids, advantages = torch.zeros(3, 2, dtype=torch.int64), torch.tensor([256.0, 1.0, 1.0])
    gk.fused_linear_grpo_loss(torch.ones(3, 2, 1, dtype=torch.bfloat16), weight, ids, advantages, **options).loss.backward()
    assert weight.grad.flatten().tolist() == [-258.0, 258.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_logits_are_not_rounded(backend: str, dtype: torch.dtype) -> None:
    """4 + 1/128 has more bits than bfloat16 keeps, 4 + 1/4096 than float16 does."""
    small = 1 / 128 if dtype == torch.bfloat16 else 1 / 4096
    hidden, weight = torch.tensor([[1.0, 1.0]], dtype=dtype), torch.tensor([[4.0, small], [4.0, 0.0]], dtype=dtype)
    for logits_dtype, difference in ((torch.float32, small), (None, 0.0)):
        logps = gk.fused_linear_logprobs(hidden, weight, torch.tensor([0]), logits_dtype=logits_dtype, backend=backend).logps
        want = torch.tensor([difference, 0.0], dtype=torch.float64).log_softmax(0)[:1]
        torch.testing.assert_close(logps.double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_multiplies_in_its_dtype_and_gives_gradients_in_theirs(backend: str, dtype: torch.dtype) -> None:  # F14
    p = problem(batch(4, (3, 6, 130)) | {"beta": 0.1, "entropy_coef": 0.1}, torch.float32, 4, bias=True, chunk_size=5)
    half = problem(batch(4, (3, 6, 130)) | {"beta": 0.1, "entropy_coef": 0.1}, dtype, 4, bias=True, chunk_size=5)
    half.arguments.update({name: p.arguments[name] for name in ("old_logps", "ref_logps")})
    want = run(half, backend)
    with torch.autocast(p.hidden.device.type, dtype):
        got = run(p, backend)
        again = run(half, backend)
    for name in want.output._fields:
        assert same_bits(getattr(got.output, name).detach(), getattr(want.output, name).detach()), name
    assert same_bits(again.dweight, want.dweight) and same_bits(again.dhidden, want.dhidden)
    assert {x.dtype for x in got[1:]} == {torch.float32}
    assert same_bits(got.dhidden.to(dtype), want.dhidden) and same_bits(got.dweight.to(dtype), want.dweight)
    with torch.autocast(p.hidden.device.type, dtype, enabled=False):
        assert not same_bits(run(p, backend).dweight, got.dweight)


def test_float16_gradients_under_a_gradscaler(backend: str) -> None:
    """The scaler's factor comes after dlogits were rounded: it belongs in loss_scale where they are small."""
    p = problem(batch(5, (3, 6, 31), torch.float16), torch.float16, 5, chunk_size=5)
    small = {"advantages": p.arguments["advantages"] * 1e-6}
    lost, kept = run(p, backend, upstream=65536.0, **small), run(p, backend, loss_scale=65536.0, **small)
    expected = oracle.grpo(**oracle_arguments(p) | small | {"loss_scale": 65536.0})
    dz = expected.dlogits.view(18, -1).t()
    want = dz @ torch.where(p.hidden.isnan(), 0, p.hidden).double().view(18, -1)
    error = [(x.dweight.double() - want).abs().max() / want.abs().max() for x in (lost, kept)]
    assert all(x.dweight.isfinite().all() for x in (lost, kept)) and error[1] < 2e-3 < error[0]
