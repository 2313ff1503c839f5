"""Inputs at the edge, the same answers on every backend and in every mode: infinite and NaN logits, masked tokens, no tokens at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
import oracle
from cases import DTYPES, MODES, Run, assert_matches, batch, generator, run, same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

INF, NAN = math.inf, math.nan


def assert_same_bits(got: Run, want: Run, rows: Tensor | None = None) -> None:
    """Of everything, or of the tokens of `rows` alone (then not of the sums)."""
    select = (lambda x: x) if rows is None else (lambda x: x[rows])
    for name in ("logps", "entropy", "kl", "clipped", *(("loss", "policy_loss") if rows is None else ())):
        assert same_bits(select(getattr(got.output, name).detach()), select(getattr(want.output, name).detach())), name
    assert same_bits(select(got.dlogits), select(want.dlogits)), "dlogits"


# Columns that are impossible: whole packs and blocks before the first finite one, after the last, in between, all but one.
IMPOSSIBLE = {
    "first": lambda columns: columns < 2500,
    "last": lambda columns: columns >= 3,
    "most": lambda columns: columns % 97 != 5,
    "every other": lambda columns: columns % 2 == 0,
    "all but the very last": lambda columns: columns < 4096,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("where", IMPOSSIBLE)
def test_impossible_columns_have_probability_and_gradient_zero(backend: str, where: str, dtype: torch.dtype, mode: str) -> None:
    inputs = batch(1, (2, 6, 4097), dtype, temperature=0.7) | {"entropy_coef": 0.1}
    impossible = IMPOSSIBLE[where](torch.arange(4097))
    inputs["logits"][..., impossible] = -INF
    possible = torch.arange(4097)[~impossible]
    inputs["completion_ids"] = possible[torch.randint(len(possible), (2, 6), generator=generator(1))]
    logps, _ = oracle.logps_and_entropy(inputs["logits"].double(), inputs["completion_ids"], torch.full((2, 6), 0.7, dtype=torch.float64))
    inputs["old_logps"] = (logps - 0.1).float()
    result = run(inputs, backend, mode)
    assert_matches(result, inputs, mode)
    assert (result.dlogits[..., impossible] == 0).all()


DEGENERATE = {
    "all -inf": {...: -INF},
    "NaN": {3: NAN},
    "NaN at the target": {1: NAN},
    "+inf": {3: INF},
    "+inf at the target": {1: INF},
    "two of +inf": {2: INF, 3: INF},
    "NaN among -inf": {...: -INF, 5: NAN},
    "NaN in the last column": {-1: NAN},
}


SETTINGS = {
    "short": (8, {}),
    "long": (1300, {"beta": 0.1}),
    "entropy": (8, {"entropy_coef": 0.1}),
    "no advantage": (8, {"advantages": torch.zeros(2)}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_degenerate_row_is_nan_and_leaves_its_neighbours_alone(
    backend: str, setting: str, kind: str, dtype: torch.dtype, mode: str
) -> None:
    vocab, options = SETTINGS[setting]
    healthy = batch(2, (2, 4, vocab), dtype) | options
    healthy["completion_ids"][:] = 1
    healthy["completion_mask"] = torch.ones(2, 4, dtype=torch.bool)
    bad = {**healthy, "logits": healthy["logits"].clone()}
    for column, value in DEGENERATE[kind].items():
        bad["logits"][1, 2, column] = value
    row = torch.zeros(2, 4, dtype=torch.bool)
    row[1, 2] = True
    want, got = run(healthy, backend, mode), run(bad, backend, mode)
    assert got.output.logps[row].isnan().all() and got.output.entropy[row].isnan().all()
    assert got.dlogits[row].isnan().all(), "the whole gradient row is NaN, whatever the advantage"
    assert got.output.loss.isnan()
    assert_same_bits(got, want, ~row)

    mask = ~row  # masked out, it never existed
    assert_same_bits(run(bad | {"completion_mask": mask}, backend, mode), run(healthy | {"completion_mask": mask}, backend, mode))


def impossible_target(advantage: float, **options: Any) -> dict[str, Any]:
    return {
        "logits": torch.tensor([[[0.5, -INF, 1.0, 0.0], [0.5, 0.2, 1.0, 0.0]]]),
        "completion_ids": torch.tensor([[1, 1]]),
        "advantages": torch.tensor([advantage]),
        "temperature": 0.5,
        **options,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_an_impossible_target_on_policy_has_ratio_one(backend: str, mode: str, advantage: float) -> None:
    inputs = impossible_target(advantage)
    healthy = inputs["logits"].double() / 0.5
    probs = healthy.softmax(-1)
    # loss = -A, and its derivative a = -A / 2 (a mean over two tokens) flows: a / tau at the target, -a p / tau elsewhere
    target = torch.tensor([0.0, 1, 0, 0], dtype=torch.float64)
    want = -advantage / 2 * (target - probs) / 0.5
    for old in (None, torch.tensor([[-INF, healthy.log_softmax(-1)[0, 1, 1]]])):  # None, or what token_logprobs gives
        got = run(inputs | {"old_logps": old}, backend, mode)
        assert got.output.logps[0, 0] == -INF and got.output.entropy.isfinite().all()
        torch.testing.assert_close(got.output.loss.double(), torch.tensor(-advantage).double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(got.dlogits.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
@pytest.mark.parametrize("bound", [None, 3.0])
def test_an_impossible_target_off_policy_is_held(backend: str, mode: str, advantage: float, bound: float | None) -> None:
    inputs = impossible_target(advantage, old_logps=torch.tensor([[-1.0, -2.1]]), max_log_ratio=bound)
    got = run(inputs, backend, mode)
    expected = oracle.grpo(**inputs)
    assert got.output.logps[0, 0] == -INF
    assert (got.dlogits[0, 0] == 0).all() and (got.dlogits[0, 1] != 0).any()
    torch.testing.assert_close(got.output.loss.double(), expected.loss, rtol=1e-6, atol=0)
    assert torch.equal(got.output.clipped, expected.clipped.to(torch.int8))

    bound = bound or 80.0
    penalised = run(inputs | {"ref_logps": torch.tensor([[-1.0, -1.0]]), "beta": 0.1}, backend, mode)
    torch.testing.assert_close(penalised.output.kl[0, 0].double(), torch.tensor(math.exp(bound) - 1 - bound).double(), rtol=1e-5, atol=0)
    assert (penalised.dlogits[0, 0] == 0).all()
    corrected = run(inputs | {"ref_logps": torch.tensor([[-1.0, -1.0]]), "beta": 0.1, "kl_bias_correction": True}, backend, mode)
    assert (corrected.dlogits[0, 0] == 0).all() and corrected.dlogits.isfinite().all()
    both_impossible = run(inputs | {"ref_logps": torch.tensor([[-INF, -1.0]]), "beta": 0.1}, backend, mode)
    assert both_impossible.output.kl[0, 0] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1], ids=hex)
@pytest.mark.parametrize("where", ["advantage", "upstream"])
def test_a_nan_of_any_bits_stays_nan_in_the_gradient(backend: str, where: str, bits: int, dtype: torch.dtype, mode: str) -> None:
    """0x7fffffff is what a GPU's arithmetic makes: rounding it to bfloat16 as if it were a number gives -0."""
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    inputs = batch(1, (1, 2, 40), dtype)
    inputs["advantages"] = torch.ones(1, 2)
    if where == "advantage":
        inputs["advantages"][0, 0] = nan
    got = run(inputs, backend, mode, **({"upstream": nan} if where == "upstream" else {}))
    assert got.dlogits[0, 0].isnan().all()
    assert got.dlogits[0, 1].isnan().all() == (where == "upstream")


def poison(inputs: dict[str, Any], value: float, token_id: int) -> dict[str, Any]:
    """The same with `value` in everything of the masked tokens, and of sequences without a token."""
    hidden, poisoned = inputs["completion_mask"] == 0, {}
    for name, x in inputs.items():
        if isinstance(x, Tensor) and name != "completion_mask" and x.dim() > 0:
            bad = token_id if name == "completion_ids" else value
            where = hidden.all(-1) if x.dim() == 1 else hidden[..., None] if x.dim() == 3 else hidden
            x = torch.where(where, torch.tensor(bad, dtype=x.dtype), x)
        poisoned[name] = x
    return poisoned


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(("value", "token_id"), [(NAN, -100), (INF, 2**40), (-INF, 31), (0.0, -1)])
@pytest.mark.parametrize("per_token", [True, False])
def test_masked_tokens_change_no_bit(backend: str, mode: str, loss_type: str, value: float, token_id: int, per_token: bool) -> None:
    g, shape = generator(3), (4, 6) if per_token else (4,)
    inputs = batch(3, (4, 6, 31), temperature=torch.rand(shape, generator=g) + 0.5) | {"beta": 0.1, "entropy_coef": 0.1}
    inputs |= {name: torch.rand(shape, generator=g) for name in ("advantages", "importance_weights", "policy_weights")}
    if per_token:
        inputs["token_weights"] = torch.rand(shape, generator=g)
    inputs |= {"loss_type": loss_type, "max_completion_length": 6}
    inputs["completion_mask"][2] = False
    hidden = ~inputs["completion_mask"]
    want, got = run(inputs, backend, mode), run(poison(inputs, value, token_id), backend, mode)
    assert_same_bits(got, want)
    assert (want.dlogits != 0).any() and (got.dlogits[hidden] == 0).all()
    for name in ("logps", "entropy", "kl", "clipped"):
        assert (getattr(got.output, name)[hidden] == 0).all()


def test_masked_tokens_of_log_probs_are_zero(backend: str) -> None:
    inputs = batch(4, (4, 6, 31))
    mask, hidden = inputs["completion_mask"], ~inputs["completion_mask"]
    poisoned = poison(inputs, NAN, -100)
    logits = poisoned["logits"].requires_grad_()
    logps, entropy = gk.token_logprobs_and_entropy(logits, poisoned["completion_ids"], mask=mask, backend=backend)
    (logps + entropy).sum().backward()
    want = gk.token_logprobs_and_entropy(inputs["logits"], inputs["completion_ids"], backend=backend)
    for got, whole in zip((logps, entropy), want):
        assert (got[hidden] == 0).all() and same_bits(got[mask].detach(), whole[mask])
    assert (logits.grad[hidden] == 0).all() and (logits.grad[mask] != 0).any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("token_id", [-1, 31, -100, 2**31 - 1, 2**40])
def test_an_active_id_outside_the_vocabulary_is_named(backend: str, mode: str, dtype: torch.dtype, token_id: int) -> None:
    if dtype == torch.int32 and token_id > 2**31:
        token_id = -(2**31)
    inputs = batch(5, (2, 3, 31))
    inputs["completion_ids"] = inputs["completion_ids"].to(dtype)
    inputs["completion_ids"][1, 2] = token_id
    inputs["completion_mask"][1, 2] = True
    with pytest.raises(IndexError, match=rf"\(1, 2\).*{token_id}"):
        run(inputs, backend, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("constant", [1e6, -1e6, 65536.0])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 10.0])
def test_a_constant_added_to_a_row_changes_nothing(backend: str, constant: float, temperature: float, mode: str) -> None:
    inputs = batch(6, (2, 6, 1025), temperature=temperature) | {"beta": 0.1, "entropy_coef": 0.1}
    inputs["logits"] = (inputs["logits"] * 16).round().clamp(-400, 400) / 16  # sixteenths: the sum with 1e6 is exact
    shifted = inputs | {"logits": inputs["logits"] + constant}
    assert torch.equal(shifted["logits"] - constant, inputs["logits"])
    want, got = run(inputs, backend, mode), run(shifted, backend, mode)
    for name in ("logps", "entropy", "loss"):
        torch.testing.assert_close(getattr(got.output, name), getattr(want.output, name), rtol=0, atol=1e-6)
    torch.testing.assert_close(got.dlogits, want.dlogits, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("temperature", [1e-4, 1e-2, 30.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_temperatures_are_within_budget(backend: str, dtype: torch.dtype, temperature: float) -> None:
    inputs = batch(7, (1, 12, 1025), dtype, temperature=temperature) | {"entropy_coef": 0.1}
    for mode in ("default", "one_pass"):
        assert_matches(run(inputs, backend, mode), inputs, mode)


@pytest.mark.parametrize("mode", MODES)
def test_the_largest_finite_logits_are_finite(backend: str, mode: str) -> None:
    largest = {torch.float32: 3.4e38, torch.bfloat16: 3.38e38, torch.float16: 65504.0}
    for dtype, top in largest.items():
        rows = [[top, -top, 0, -top], [-top, -top, -top, -top], [top, top, 0, 0], [-top, 0, 0, 1]]
        inputs = {"logits": torch.tensor([rows], dtype=dtype), "completion_ids": torch.tensor([[0, 1, 1, 3]]), "advantages": torch.ones(1)}
        got = run(inputs | {"entropy_coef": 0.1}, backend, mode)
        want = torch.tensor([[0.0, -math.log(4), -math.log(2), 1 - math.log(2 + math.e)]])
        torch.testing.assert_close(got.output.logps, want, rtol=0, atol=1e-6)
        assert got.output.entropy.isfinite().all() and got.dlogits.isfinite().all() and (got.dlogits[0, 1:] != 0).any(-1).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("case", ["masked", "no time", "no sequences"])
def test_nothing_to_learn_from_is_a_loss_of_zero(backend: str, mode: str, loss_type: str, beta: float, case: str) -> None:
    inputs = batch(8, (2, 3, 5)) | {"beta": beta, "loss_type": loss_type, "max_completion_length": 4, "entropy_coef": 0.1}
    if case == "masked":
        inputs["completion_mask"][:] = False
    elif case == "no time":
        inputs |= {name: x[:, :0] for name, x in inputs.items() if isinstance(x, Tensor) and x.dim() > 1}
    else:
        inputs |= {name: x[:0] for name, x in inputs.items() if isinstance(x, Tensor)}
    result = run(inputs, backend, mode)
    assert result.output.loss == 0 and result.output.loss.requires_grad and result.output.policy_loss == 0
    assert result.dlogits.shape == inputs["logits"].shape and (result.dlogits == 0).all()
    assert result.output.logps.shape == inputs["completion_ids"].shape and (result.output.logps == 0).all()
    metrics = gk.grpo_metrics(result.output, inputs["completion_mask"])
    assert all(value == 0 for value in metrics.values())
