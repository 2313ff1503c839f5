"""Log-probabilities, entropy and their gradients against float64, for every size of vocabulary, dtype and way of asking."""

from __future__ import annotations

import math

import pytest
import torch

import grpo_kernels as gk
import oracle
from cases import DTYPES, LAYOUTS, NARROW, WIDE, generator, lay_out, random_logits, same_bits
from grpo_kernels import reference

TEMPERATURES = torch.tensor([[1.0, 0.7, 1.3, 1.0, 0.25, 1.0]])


def rows(vocab: int, dtype: torch.dtype, seed: int = 0, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, 6) rows, one of each kind: flat, target at p > 0.5, target within 1e-6 of 1, and three random ones."""
    g = generator(seed + vocab)
    ids = torch.randint(vocab, (batch, 6), generator=g)
    return random_logits((batch, 6, vocab), g, ids).to(dtype), ids


def expect(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, dlogps, dentropy) -> oracle.Expected:
    """logps, entropy and the gradient of sum(dlogps logps + dentropy entropy)."""
    z = logits.detach().double().requires_grad_()
    logps, entropy = oracle.logps_and_entropy(z, ids, temperature.double())
    (dlogps * logps + dentropy * entropy).sum().backward()
    zero, a, b = torch.zeros_like(logps), dlogps.double(), dentropy.double()
    return oracle.Expected(zero, zero, logps.detach(), entropy.detach(), zero, zero, z.grad, zero, a, b, zero, zero, temperature)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", NARROW + WIDE)
def test_logps_entropy_and_both_gradients_are_within_budget(backend: str, vocab: int, dtype: torch.dtype) -> None:
    logits, ids = rows(vocab, dtype)
    logits.requires_grad_()
    upstream = torch.randn(2, 1, 6, generator=generator(1))
    expected = expect(logits, ids, TEMPERATURES, *upstream)
    logps, entropy = gk.token_logprobs_and_entropy(logits, ids, temperature=TEMPERATURES, backend=backend)
    torch.autograd.backward((logps, entropy), tuple(upstream))
    assert logps.dtype == entropy.dtype == torch.float32
    oracle.assert_within("logps", logps, expected.logps, oracle.logp_budget(expected.logps))
    oracle.assert_within("entropy", entropy, expected.entropy, oracle.logp_budget(expected.entropy))
    assert vocab == 1 or (expected.dlogits != 0).any()
    oracle.assert_dlogits(logits.grad, expected, ids, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [130, 4097, 151936])
@pytest.mark.parametrize("spread", [1, 20])
def test_logps_and_entropy_stay_in_their_range(backend: str, vocab: int, dtype: torch.dtype, spread: float) -> None:  # F06
    g = generator(vocab)
    count = 256 if vocab < 10000 else 24
    logits = (torch.randn(count, 1, vocab, generator=g) * spread).to(dtype)
    ids = torch.randint(vocab, (count, 1), generator=g)
    logits[: count // 2] = 0  # one-hot rows, half of them with the peak at the target
    logits[: count // 2].scatter_(-1, ids[: count // 2, :, None], 50)
    ids[: count // 4] = (ids[: count // 4] + 1) % vocab
    logps, entropy = gk.token_logprobs_and_entropy(logits, ids, backend=backend)
    assert logps.max() <= 0 and logps.min() < 0
    assert entropy.min() >= 0 and entropy.max() <= math.log(vocab) + 1e-4


def test_flat_rows_know_no_padding(backend: str) -> None:  # F12
    logits = torch.full((1, 2, 130), -20.0)
    logps = gk.token_logprobs(logits, torch.tensor([[0, 129]]), backend=backend)
    torch.testing.assert_close(logps, torch.full((1, 2), -math.log(130)), rtol=0, atol=1e-6)


def test_a_vocabulary_of_one_is_certain(backend: str) -> None:  # F12
    logits = torch.tensor([[[3.0], [-1e4]]], requires_grad=True)
    logps, entropy = gk.token_logprobs_and_entropy(logits, torch.zeros(1, 2, dtype=torch.int64), backend=backend)
    (logps + entropy).sum().backward()
    assert (logps == 0).all() and (entropy == 0).all() and (logits.grad == 0).all()


def test_temperature_divides_the_logits_before_the_softmax(backend: str) -> None:  # F03
    logits = torch.tensor([[[2.0, 0.0, 0.0]]], requires_grad=True)
    logps = gk.token_logprobs(logits, torch.tensor([[0]]), temperature=0.5, backend=backend)
    logps.sum().backward()
    torch.testing.assert_close(logps.detach(), torch.tensor([[-0.0359764]]), rtol=0, atol=3e-7)
    torch.testing.assert_close(logits.grad, torch.tensor([[[0.0706738, -0.0353368, -0.0353368]]]), rtol=0, atol=3e-7)


def test_temperature_is_not_applied_in_the_dtype_of_the_logits(backend: str) -> None:  # F02, F03
    g = generator(3)
    logits = (torch.randn(64, 1, 4096, generator=g) * 8).bfloat16()
    ids, before = torch.randint(4096, (64, 1), generator=g), logits.clone()
    want, _ = oracle.logps_and_entropy(logits.double(), ids, torch.full((64, 1), 0.7, dtype=torch.float64))
    got = gk.token_logprobs(logits, ids, temperature=0.7, backend=backend)
    oracle.assert_within("logps at temperature 0.7", got, want, torch.full_like(want, 1e-5))
    assert same_bits(logits, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_temperature_is_a_number_or_one_a_sequence_or_one_a_token(backend: str, dtype: torch.dtype) -> None:  # F33
    logits, ids = rows(129, dtype, batch=3)
    per_sequence = torch.tensor([0.5, 1.0, 2.0])

    def score(temperature: float | torch.Tensor) -> torch.Tensor:
        return gk.token_logprobs(logits, ids, temperature=temperature, backend=backend)

    one_by_one = torch.cat(
        [gk.token_logprobs(logits[i][None], ids[i][None], temperature=float(per_sequence[i]), backend=backend) for i in range(3)]
    )
    for temperature in (per_sequence, per_sequence[:, None].expand(3, 6), per_sequence.double()):
        assert same_bits(score(temperature), one_by_one)
    assert same_bits(score(torch.tensor(0.5))[0], one_by_one[0])
    assert not same_bits(score(1.0), one_by_one)


def test_an_unused_output_costs_no_gradient(backend: str) -> None:  # F33: the upstream gradient of what is not used is None
    logits, ids = rows(1025, torch.float32)
    upstream = torch.randn(2, 1, 6, generator=generator(1))
    gradients = []
    for used in ((0,), (1,), (0, 1)):
        z = logits.clone().requires_grad_()
        outputs = gk.token_logprobs_and_entropy(z, ids, backend=backend)
        torch.autograd.backward([outputs[i] for i in used], [upstream[i] for i in used])
        keep = torch.tensor([i in used for i in range(2)])[:, None, None]
        assert (z.grad != 0).any()
        oracle.assert_dlogits(z.grad, expect(logits, ids, torch.ones(1, 6), *(upstream * keep)), ids, torch.float32)
        gradients.append(z.grad)
    torch.testing.assert_close(gradients[0] + gradients[1], gradients[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_has_the_bits_of_its_copy(backend: str, layout: str, dtype: torch.dtype) -> None:  # F13
    logits, ids = rows(1023, dtype, batch=3)
    upstream = torch.randn(2, 3, 6, generator=generator(1))

    def score(full: torch.Tensor, view) -> tuple[torch.Tensor, ...]:
        full = full.detach().clone().requires_grad_()
        outputs = gk.token_logprobs_and_entropy(view(full), ids, backend=backend)
        torch.autograd.backward(outputs, tuple(upstream))
        return *outputs, view(full.grad), full.grad

    want = score(logits, lambda full: full)
    for sentinel in (1e4, torch.nan):
        full, view = lay_out(logits, layout, sentinel)
        *got, whole = score(full, view)
        assert all(same_bits(x, y) for x, y in zip(got, want))
        assert whole.count_nonzero() == want[2].count_nonzero(), "a gradient in the cells around the view"


def test_expanded_logits_add_their_gradients(backend: str) -> None:  # F13
    logits, ids = rows(31, torch.float32)
    ids = torch.cat([ids, (ids + 1) % 31])
    one = logits.clone().requires_grad_()
    gk.token_logprobs(one.expand(2, 6, 31), ids, backend=backend).sum().backward()
    two = logits.repeat(2, 1, 1).requires_grad_()
    gk.token_logprobs(two, ids, backend=backend).sum().backward()
    assert torch.equal(one.grad, two.grad.sum(0, keepdim=True)) and (one.grad != 0).any()


def test_rows_without_a_batch_and_the_spare_position_have_the_same_bits(backend: str) -> None:  # F15
    logits, ids = rows(129, torch.float32, batch=2)
    want = gk.token_logprobs_and_entropy(logits, ids, backend=backend)
    flat = gk.token_logprobs_and_entropy(logits.view(-1, 129), ids.view(-1).int(), backend=backend)
    spare = gk.token_logprobs_and_entropy(torch.cat([logits, torch.full_like(logits[:, :1], torch.nan)], 1), ids, backend=backend)
    for got in (flat, spare):
        assert all(same_bits(x.view(2, 6), y) for x, y in zip(got, want))


def test_position_t_scores_token_t(backend: str) -> None:  # F15: the spare position would hide a shift by one
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    logits = torch.zeros(2, 5, 6)
    logits[:, :4].scatter_(-1, ids[..., None], 30.0)
    assert (gk.token_logprobs(logits, ids, backend=backend) > -1e-6).all()
    assert (gk.token_logprobs(logits[:, 1:], ids, backend=backend)[:, :3] < -29).all()


def test_the_reference_is_the_oracle() -> None:
    logits, ids = rows(1025, torch.float64, batch=2)
    upstream = torch.randn(2, 2, 6, generator=generator(1), dtype=torch.float64)
    temperature = TEMPERATURES.expand(2, 6).double()
    expected = expect(logits, ids, temperature, *upstream)
    z = logits.clone().requires_grad_()
    logps, entropy = reference.row_stats(z, ids, temperature)
    torch.autograd.backward((logps, entropy), tuple(upstream))
    for got, want in ((logps, expected.logps), (entropy, expected.entropy), (z.grad, expected.dlogits)):
        torch.testing.assert_close(got.detach(), want, rtol=1e-9, atol=1e-12)


def test_float64_logits_stay_float64() -> None:
    logits, ids = rows(1025, torch.float64)
    logits.requires_grad_()
    upstream = torch.randn(2, 1, 6, generator=generator(1), dtype=torch.float64)
    expected = expect(logits, ids, TEMPERATURES.double(), *upstream)
    outputs = gk.token_logprobs_and_entropy(logits, ids, temperature=TEMPERATURES.double())
    torch.autograd.backward(outputs, tuple(upstream))
    for got, want in zip((*outputs, logits.grad), (expected.logps, expected.entropy, expected.dlogits)):
        torch.testing.assert_close(got.detach(), want, rtol=1e-9, atol=1e-12)
