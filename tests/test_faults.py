"""Faults that users of this kind of software have met, each by the smallest input that showed it.

Those whose whole kind has tests elsewhere are there: temperature (F03), legal ranges (F06), vocabulary tiles (F12) and one pass for both
outputs (F33) in test_logprobs; k3 near equality (F05) and clip fractions (F28) in test_objective and test_metrics; nothing to learn from
(F09) in test_edges; averages (F11) and inert options (F32) in test_aggregation; mixed dtypes (F14) in test_loss and test_contexts;
off by one (F15) in test_logprobs and test_interface; memory (F16) in test_memory and test_autograd; logits overwritten (F17) in
test_inplace; torch.compile (F18) in test_compile; one row in many batches (F30) in test_bits; a loss of 0 (F31) in test_autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
import oracle
from cases import MODES, batch, generator, run, same_bits

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("change", "logp"),
    [({...: -INF}, NAN), ({1: -INF}, -INF), ({5: NAN}, NAN), ({5: INF}, NAN), ({1: INF}, NAN)],
    ids=["all -inf", "-inf chosen", "NaN", "+inf", "+inf chosen"],
)
def test_degenerate_rows_are_not_plausible_numbers(backend: str, change: dict[Any, float], logp: float) -> None:  # F01
    healthy = torch.randn(2, 1, 8, generator=generator(1))
    logits, ids = healthy.clone(), torch.ones(2, 1, dtype=torch.int64)
    for column, value in change.items():
        logits[0, 0, column] = value
    want, got = gk.token_logprobs(healthy, ids, backend=backend), gk.token_logprobs(logits, ids, backend=backend)
    torch.testing.assert_close(got[0], torch.tensor([logp]), equal_nan=True)
    torch.testing.assert_close(got, logits.log_softmax(-1)[..., 1], equal_nan=True)
    assert same_bits(got[1], want[1])

    logits.requires_grad_()
    output = gk.fused_grpo_loss(logits, ids, torch.ones(2), completion_mask=torch.tensor([[0], [1]]), backend=backend)
    output.loss.backward()
    assert output.loss == -0.5 and (logits.grad[0] == 0).all() and logits.grad.isfinite().all() and (logits.grad[1] != 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [100, 151936])
def test_half_precision_logits_give_float32_log_probs(backend: str, dtype: torch.dtype, vocab: int) -> None:  # F02
    g, count = generator(2), 64 if vocab == 100 else 8
    logits, ids = torch.rand(count, 1, vocab, generator=g).to(dtype), torch.randint(vocab, (count, 1), generator=g)
    got = gk.token_logprobs(logits, ids, backend=backend)
    want = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    assert got.dtype == torch.float32 and (got.double() - want).abs().max() <= 1e-5
    assert (got - got.to(dtype)).abs().max() > 1e-4, "the input is one on which a half-precision result would show"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("distance", [100.0, 80.0, 20.0, -100.0])
def test_a_far_reference_poisons_no_gradient(backend: str, mode: str, distance: float) -> None:  # F04
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 0] = -100.0
    inputs = {"logits": logits, "completion_ids": torch.zeros(1, 2, dtype=torch.int64), "advantages": torch.ones(1)}
    new = oracle.grpo(**inputs).logps
    expected = oracle.grpo(**inputs, ref_logps=(new + distance).float(), beta=0.04)
    healthy = run(inputs | {"ref_logps": new.float(), "beta": 0.04}, backend, mode)
    ref = new.float()
    ref[0, 0] = (new[0, 0] + distance).float()
    got = run(inputs | {"ref_logps": ref, "beta": 0.04}, backend, mode)
    assert got.dlogits.isfinite().all() and got.output.loss.isfinite()
    torch.testing.assert_close(got.dlogits[0, 0].double(), expected.dlogits[0, 0], rtol=2e-5, atol=1e-6)
    assert same_bits(got.dlogits[0, 1], healthy.dlogits[0, 1]) and (healthy.dlogits[0, 1] != 0).all()


@pytest.mark.parametrize(
    ("row", "dtype", "entropy"),
    [([0, -INF], torch.float32, 0.0), ([0, 0, -INF], torch.float32, math.log(2)), ([65504, -65504], torch.float16, 0.0)],
)
def test_entropy_knows_tokens_without_probability(backend: str, row: list[float], dtype: torch.dtype, entropy: float) -> None:  # F07
    logits = torch.tensor([[row]], dtype=dtype, requires_grad=True)
    value = gk.token_logprobs_and_entropy(logits, torch.zeros(1, 1, dtype=torch.int64), backend=backend).entropy
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.tensor([[entropy]]), rtol=0, atol=1e-7)
    assert logits.grad.isfinite().all() and logits.grad[0, 0, -1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("peak", [5.0, 40.0, 160.0])
def test_backward_rounds_as_the_forward_did(backend: str, dtype: torch.dtype, peak: float) -> None:  # F08
    g = generator(3)
    z = torch.randn(8, 1, 64000, generator=g)
    logits = (z / z.abs().amax(-1, keepdim=True) * peak).to(dtype).requires_grad_()
    ids, upstream = torch.randint(64000, (8, 1), generator=g), torch.randn(8, 1, generator=g)
    gk.token_logprobs(logits, ids, backend=backend).backward(upstream)
    exact = logits.detach().double().requires_grad_()
    (exact.log_softmax(-1).gather(-1, ids[..., None])[..., 0] * upstream).sum().backward()
    rounding = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert logits.grad.dtype == dtype and (exact.grad.abs() > 0.1).any()
    assert ((logits.grad.double() - exact.grad).abs() <= rounding * exact.grad.abs() + 1e-6).all()
    if dtype == torch.float32:
        assert logits.grad.double().sum(-1).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_an_id_outside_the_vocabulary_reads_no_neighbour(backend: str, dtype: torch.dtype) -> None:  # F10
    logits = torch.tensor([[[0.0, 1, 2, 3], [10, 11, 12, 13]]])
    for bad in (-100, 4):  # masked: no effect, also not of a remap to a believable id
        ids, mask = torch.tensor([[bad, 1]], dtype=dtype), torch.tensor([[0, 1]])
        output = gk.fused_grpo_loss(logits, ids, torch.ones(1), completion_mask=mask, backend=backend)
        assert output.logps[0, 0] == 0 and output.loss == -1
        assert gk.token_logprobs(logits, ids, mask=mask, backend=backend)[0, 0] == 0
    for ids, place in (([[4, 0]], r"\(0, 0\)"), ([[0, -1]], r"\(0, 1\)")):
        with pytest.raises(IndexError, match=place):
            gk.token_logprobs(logits, torch.tensor(ids, dtype=dtype), backend=backend)


# Views of a larger tensor with (2, 3, 6) logits in them; the last two have no contiguous vocabulary.
VIEWS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "all but the last position": ((2, 4, 6), lambda full: full[:, :-1]),
    "all but the first position": ((2, 4, 6), lambda full: full[:, 1:]),
    "padded vocabulary": ((2, 3, 8), lambda full: full[..., :6]),
    "time first": ((3, 2, 6), lambda full: full.transpose(0, 1)),
    "one sequence twice": ((1, 3, 6), lambda full: full.expand(2, 3, 6)),
    "every other column": ((2, 3, 12), lambda full: full[..., ::2]),
    "vocabulary first": ((6, 3, 2), lambda full: full.permute(2, 1, 0)),
}


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_read_where_it_is_or_refused(backend: str, name: str, one_pass: bool) -> None:  # F13
    shape, view = VIEWS[name]
    full = torch.full(shape, 1e4)
    rows = torch.randn(2, 3, 6, generator=generator(4))
    (full if "twice" in name else view(full)).copy_(rows[:1] if "twice" in name else rows)
    before, full = full.clone(), full.requires_grad_()
    ids, advantages = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([1.0, -2.0])
    if name in ("every other column", "vocabulary first"):
        with pytest.raises(ValueError, match=r"contiguous.*stride"):
            gk.fused_grpo_loss(view(full), ids, advantages, one_pass=one_pass, backend=backend)
        return
    got = gk.fused_grpo_loss(view(full), ids, advantages, one_pass=one_pass, backend=backend)
    copy = view(full).detach().contiguous().requires_grad_()
    want = gk.fused_grpo_loss(copy, ids, advantages, one_pass=one_pass, backend=backend)
    (got.loss + want.loss).backward()
    expected = torch.zeros(shape)
    if "twice" in name:
        expected = copy.grad.sum(0, keepdim=True)
    else:
        view(expected).copy_(copy.grad)
    assert torch.equal(full.grad, expected) and (expected != 0).any() and same_bits(got.logps, want.logps)
    assert torch.equal(full.detach(), before)


def test_two_dimensional_logits_may_be_transposed_only_with_a_contiguous_vocabulary(backend: str) -> None:  # F13
    square, ids = torch.randn(6, 6, generator=generator(5)), torch.arange(6)
    with pytest.raises(ValueError, match=r"contiguous.*stride"):
        gk.token_logprobs(square.t(), ids, backend=backend)
    got = gk.token_logprobs(square.t().contiguous(), ids, backend=backend)
    torch.testing.assert_close(got, square.log_softmax(0).diagonal(), rtol=0, atol=1e-6)


OPTIONAL = ("old_logps", "ref_logps", "completion_mask", "policy_weights", "entropy_coef")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("ref", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("bonus", [False, True])
def test_an_absent_input_is_no_other_tensor(
    backend: str, mode: str, old: bool, ref: bool, mask: bool, policy: bool, bonus: bool, poisoned_memory: None
) -> None:  # F21
    """Each optional input there or not: a dummy that shares its address with an output would show."""
    given = (old, ref, mask, policy, bonus)
    inputs = batch(6, (2, 3, 31)) | {"policy_weights": torch.tensor([0.5, 2.0]), "entropy_coef": 0.1}
    absent = dict.fromkeys(OPTIONAL) | {"entropy_coef": 0.0}
    inputs |= {name: absent[name] for name, there in zip(OPTIONAL, given) if not there}
    inputs["beta"] = 0.0 if inputs["ref_logps"] is None else 0.1
    got, expected = run(inputs, backend, mode), oracle.grpo(**inputs)
    torch.testing.assert_close(got.dlogits.double(), expected.dlogits, rtol=1e-4, atol=1e-7)
    for name in ("loss", "policy_loss", "logps", "entropy", "kl"):
        torch.testing.assert_close(getattr(got.output, name).double(), getattr(expected, name), rtol=1e-5, atol=1e-6)
