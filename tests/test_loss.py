"""The whole loss from logits: value, parts and gradient against float64, over the options in pairs, every mode, dtype and layout."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import grpo_kernels as gk
import oracle
from cases import DTYPES, LAYOUTS, MODES, WIDE, assert_matches, batch, generator, pairwise, run, same_bits

# One value of every kind that the public interface takes; pairs of them meet. Tensors are made for the case at hand by `arguments`.
FACTORS: dict[str, tuple] = {
    "vocab": (3, 130, 1025),
    "dtype": DTYPES,
    "mode": MODES,
    "layout": LAYOUTS,
    "upstream": (1.0, 0.37),
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo"),
    "reference": ("none", "reported", 0.04, 1.0),
    "old": (True, False),
    "advantages": ("(B,)", "(B, T)"),
    "mask": (None, torch.bool, torch.int64, torch.float32),
    "ids": (torch.int64, torch.int32),
    "temperature": ("1", "0.7", "(B,)", "(B, T)"),
    "epsilons": ((0.2, None), (0.2, 0.28), (0.0, 0.0), (0.1, 2.0)),
    "caps": ((None, None), (1.1, None), (None, 1.2), (1.4, 3.0)),
    "max_log_ratio": (None, 0.3, 20.0),
    "entropy": ((0.0, "loss"), (0.1, "loss"), (-0.05, "token_mean")),
    "importance_weights": (None, "(B,)", "(B, 1)", "(B, T)"),
    "policy_weights": (None, "(B,)", "(B, 1)", "(B, T)"),
    "token_weights": (None, None, None, "(B, T)"),
    "counts": ("local", "numbers", "tensors"),
    "loss_scale": (1.0, 0.25),
    "spare": (False, True),
}
PAIRS = pairwise(FACTORS, seed=0)


def arguments(case: dict[str, Any], seed: int) -> dict[str, Any]:
    """fused_grpo_loss's arguments of a row of FACTORS."""
    g, (B, T) = generator(seed), (4, 6)

    def positive(shape: str) -> torch.Tensor:
        return torch.empty(eval(shape, {"B": B, "T": T})).uniform_(0.5, 1.5, generator=g)

    temperature = positive(case["temperature"]) if "B" in case["temperature"] else float(case["temperature"])
    inputs = batch(seed, (B, T, case["vocab"]), case["dtype"], temperature=temperature, spare=case["spare"])
    inputs["completion_ids"] = inputs["completion_ids"].to(case["ids"])
    inputs["completion_mask"] = None if case["mask"] is None else inputs["completion_mask"].to(case["mask"]) * 2
    if case["advantages"] == "(B, T)":
        inputs["advantages"] = torch.randn(B, T, generator=g)
    if not case["old"]:
        inputs["old_logps"] = None
    if case["reference"] == "none":
        inputs["ref_logps"] = None
    elif case["reference"] != "reported":
        inputs["beta"] = case["reference"]
    for name in ("importance_weights", "policy_weights", "token_weights"):
        if case[name] is not None:
            inputs[name] = positive(case[name])
    if case["counts"] != "local":
        make = float if case["counts"] == "numbers" else torch.tensor
        inputs |= {"num_items_in_batch": make(41.5), "num_sequences": make(7.0), "num_processes": 3}
    inputs |= {name: case[name] for name in ("loss_type", "max_log_ratio", "loss_scale")}
    inputs["epsilon"], inputs["epsilon_high"] = case["epsilons"]
    inputs["delta"], inputs["dual_clip"] = case["caps"]
    inputs["entropy_coef"], inputs["entropy_aggregation"] = case["entropy"]
    return inputs | {"max_completion_length": 16}


def check(case: dict[str, Any], backend: str, seed: int) -> None:
    inputs = arguments(case, seed)
    result = run(inputs, backend, case["mode"], case["layout"], case["upstream"])
    expected = assert_matches(result, inputs, case["mode"], case["upstream"])
    assert (expected.dlogits != 0).any()


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_every_pair_of_options_is_within_budget(backend: str, number: int) -> None:
    check(PAIRS[number], backend, seed=number)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_random_options_are_within_budget(backend: str, seed: int) -> None:
    rng = random.Random(seed)
    check({name: rng.choice(values) for name, values in FACTORS.items()}, backend, seed=1000 + seed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [31, 1023, *WIDE])
def test_every_mode_is_within_budget_at_every_vocabulary(backend: str, vocab: int, dtype: torch.dtype, mode: str) -> None:
    shape = (1, 6, vocab) if vocab > 5000 else (3, 6, vocab)
    inputs = batch(vocab, shape, dtype, temperature=0.9) | {"beta": 0.04, "entropy_coef": 0.01 if vocab % 4 == 1 else 0.0}
    assert_matches(run(inputs, backend, mode), inputs, mode)


@pytest.mark.parametrize("mode", ["default", "one_pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_at_the_vocabulary_of_qwen(backend: str, dtype: torch.dtype, mode: str) -> None:
    """At most twice eager's own error in that dtype, or the budget; the target's column and the others apart (`-s` prints them)."""
    inputs = batch(7, (2, 6, 151936), dtype) | {"beta": 0.04, "loss_type": "dapo", "old_logps": None}
    inputs["completion_ids"][0, 0] = inputs["logits"][0, 0].argsort()[-2]  # its neighbours have large gradients as well
    expected = oracle.grpo(**inputs)
    got, eager = run(inputs, backend, mode).dlogits, oracle.grpo(**inputs, dtype=torch.float32).dlogits
    oracle.assert_dlogits(got, expected, inputs["completion_ids"], dtype, eager=eager)

    target = torch.zeros(got.shape, dtype=torch.bool).scatter_(-1, inputs["completion_ids"][..., None], True)
    budget = oracle.dlogits_budget(expected, dtype)
    for name, columns in (("target", target), ("others", ~target)):
        ours, theirs = ((x.double() - expected.dlogits).abs()[columns].max() for x in (got, eager))
        largest, allowed = expected.dlogits.abs()[columns].max(), budget[columns].max()
        assert largest > 1e-2
        print(f"{backend} {mode} {dtype} {name}: {ours:.2e} (eager {theirs:.2e}, budget {allowed:.2e}, largest {largest:.2e})")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_bits(backend: str, mode: str) -> None:  # MATH: one row, many ways
    inputs = batch(5, (4, 6, 1025), torch.bfloat16, temperature=0.7) | {"beta": 0.04, "entropy_coef": 0.01}
    want, got = run(inputs, backend), run(inputs, backend, mode)
    scored = gk.token_logprobs_and_entropy(
        inputs["logits"], inputs["completion_ids"], temperature=0.7, mask=inputs["completion_mask"], backend=backend
    )
    assert same_bits(got.output.logps, scored.logps) and same_bits(got.output.entropy, scored.entropy)
    for name in want.output._fields:
        assert same_bits(getattr(got.output, name).detach(), getattr(want.output, name).detach()), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_layout_gives_the_same_bits(backend: str, mode: str, layout: str) -> None:  # F13
    inputs = batch(6, (4, 6, 1023)) | {"beta": 0.04}
    # Over a view the one pass leaves writing to the backward: autograd could not rebuild the view otherwise.
    in_backward = mode == "one_pass+inplace" and layout != "contiguous"
    want, got = run(inputs, backend, "inplace" if in_backward else mode), run(inputs, backend, mode, layout)
    assert same_bits(got.dlogits, want.dlogits) and same_bits(got.output.loss.detach(), want.output.loss.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("upstream", [1.5, 0.37, -2.0])
def test_a_stored_gradient_is_scaled_with_torchs_rounding(backend: str, dtype: torch.dtype, upstream: float) -> None:
    """Half of the products with 1.5 lie in the middle between two values of a half dtype: to the even one, and none is biased."""
    inputs = batch(12, (4, 6, 1023), dtype) | {"beta": 0.1}
    for mode in ("one_pass", "one_pass+inplace"):
        stored, scaled = run(inputs, backend, mode), run(inputs, backend, mode, upstream=upstream)
        want = (stored.dlogits.float() * upstream).to(dtype)
        assert torch.equal(scaled.dlogits, want) and (want != 0).any()


@pytest.mark.parametrize("name", ["advantages", "old_logps", "ref_logps", "completion_mask", "completion_ids", "temperature"])
def test_tensors_per_token_come_in_any_stride(backend: str, name: str) -> None:  # F13
    inputs = batch(8, (4, 6, 31), temperature=torch.rand(4, 6, generator=generator(8)) + 0.5) | {"beta": 0.04}
    inputs["advantages"] = torch.randn(4, 6, generator=generator(8))
    want = run(inputs, backend)
    for strided in (inputs[name].t().contiguous().t(), inputs[name].repeat_interleave(2, 1)[:, ::2]):
        got = run(inputs | {name: strided}, backend)
        assert same_bits(got.dlogits, want.dlogits)
    constant = inputs[name][:1]
    assert same_bits(
        run(inputs | {name: constant.expand(4, 6)}, backend).dlogits, run(inputs | {name: constant.repeat(4, 1)}, backend).dlogits
    )


@pytest.mark.parametrize("name", ["old_logps", "ref_logps", "advantages"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_constants_come_in_any_dtype(backend: str, name: str, dtype: torch.dtype) -> None:  # F14
    inputs = batch(9, (4, 6, 31), torch.bfloat16) | {"beta": 0.04}
    rounded = inputs[name].to(dtype)
    want, got = run(inputs | {name: rounded.float()}, backend), run(inputs | {name: rounded}, backend)
    assert same_bits(got.dlogits, want.dlogits) and got.output.loss.dtype == torch.float32


@pytest.mark.parametrize("mode", MODES[:4])
def test_autocast_changes_nothing(backend: str, mode: str) -> None:  # F14
    inputs = batch(10, (4, 6, 129)) | {"beta": 0.04, "entropy_coef": 0.01}
    want = run(inputs, backend, mode)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        got = run(inputs, backend, mode)
    assert same_bits(got.dlogits, want.dlogits) and same_bits(got.output.loss.detach(), want.output.loss.detach())


def test_float64_logits_are_served_by_torch_alone() -> None:
    inputs = batch(11, (4, 6, 129), torch.float64, temperature=0.7) | {"beta": 0.04, "entropy_coef": 0.1, "delta": 1.5}
    expected = oracle.grpo(**inputs)
    for mode in MODES:
        result = run(inputs, None, mode)
        torch.testing.assert_close(result.dlogits, expected.dlogits, rtol=1e-8, atol=1e-12)
        assert result.output.loss.dtype == result.output.logps.dtype == torch.float64
    with pytest.raises(TypeError, match="float64"):
        run(inputs, "cpu")
