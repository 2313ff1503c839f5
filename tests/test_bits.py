"""One row, many ways: a token's log-probability and gradient have the same bits wherever the row stands and whoever computes it.

That is what makes the first ratio of a training step exactly 1: old_logps come from another call, batch and position.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import DTYPES, EMULATED, generator, lay_out, run, same_bits

OPTIONS = {"beta": 0.1, "loss_type": "dapo", "num_items_in_batch": 8.0}
MODES = ("default", "one_pass", "inplace", "one_pass+inplace")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def one_row(vocab: int, dtype: torch.dtype, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    g = generator(vocab)
    return (torch.randn(1, 1, vocab, generator=g) * spread).to(dtype), torch.randint(vocab, (1, 1), generator=g)


def among(row: Tensor, ids: Tensor, count: int, position: int) -> tuple[Tensor, Tensor]:
    """`count` other rows with the row at `position` of the flattened (count / 4, 4)."""
    g = generator(count)
    shape = (count // 4, 4) if count > 1 else (1, 1)
    rows = (torch.randn(*shape, row.shape[-1], generator=g) * 5).to(row.dtype)
    others = torch.randint(row.shape[-1], shape, generator=g)
    rows.view(count, -1)[position], others.view(-1)[position] = row[0, 0], ids[0, 0]
    return rows, others


def loss_inputs(logits: Tensor, ids: Tensor) -> dict:
    shape = ids.shape
    constants = {name: torch.full(shape, value) for name, value in (("advantages", -0.7), ("old_logps", -9.0), ("ref_logps", -9.2))}
    return {"logits": logits, "completion_ids": ids, **constants, **OPTIONS}


def bits(logits: Tensor, ids: Tensor, backend: str, mode: str, position: int = 0, layout: str = "contiguous") -> list[Tensor]:
    """logp, entropy, kl and gradient row of the token at `position`."""
    result = run(loss_inputs(logits, ids), backend, mode, layout)
    return [x.detach().flatten(0, 1)[position] for x in (result.output.logps, result.output.entropy, result.output.kl, result.dlogits)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for name, x, y in zip(("logp", "entropy", "kl", "gradient"), got, want):
        assert same_bits(x, y), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [31, 700, 1023, 4097])
def test_a_row_has_the_same_bits_in_every_batch(backend: str, vocab: int, dtype: torch.dtype, mode: str) -> None:
    row, ids = one_row(vocab, dtype)
    with threads(1):
        want = bits(row, ids, backend, mode)
    assert (want[-1] != 0).any()
    many = 8 if backend in EMULATED else 64
    for count, position, number in ((1, 0, 2), (4, 3, 1), (many, 0, 1), (many, many // 2 + 1, 2), (many, many - 1, 1)):
        with threads(number):
            assert_same(bits(*among(row, ids, count, position), backend, mode, position), want)


def test_a_row_of_qwen_has_the_same_bits_in_every_batch(backend: str) -> None:  # F30
    row, ids = one_row(151936, torch.bfloat16)
    with threads(1):
        want = bits(row, ids, backend, "default")
    assert (want[-1] != 0).any()
    many, repeats = (4, 1) if backend in EMULATED else (64, 5)
    for number in [1, 2] * repeats:
        with threads(number):
            assert_same(bits(row, ids, backend, "default"), want)
    for position, number in ((0, 2), (many - 1, 1)):
        with threads(number):
            assert_same(bits(*among(row, ids, many, position), backend, "default", position), want)
    unaligned = bits(row, ids, backend, "default", layout="unaligned")
    if backend == "triton":  # where 16-byte loads are not possible, the compiler gives columns to threads in another order
        want = bits(*among(row, ids, many, 1), backend, "default", 1, layout="unaligned")
    assert_same(unaligned, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [31, 1023, 1025, 50257])
def test_a_row_has_the_same_bits_at_every_address(backend: str, vocab: int, dtype: torch.dtype) -> None:
    row, ids = one_row(vocab, dtype)
    want = bits(row, ids, backend, "default")
    constants = {name: x for name, x in loss_inputs(row, ids).items() if name not in ("logits", "completion_ids")}
    for shift in range(1, 17, 5 if backend in EMULATED else 1):  # every alignment to 64 bytes, of two or four bytes each
        buffer = torch.full((vocab + 40,), torch.nan, dtype=dtype)
        view = buffer[shift : shift + vocab].view(1, 1, vocab)
        view.copy_(row)
        logps, entropy = gk.token_logprobs_and_entropy(view, ids, backend=backend)
        assert same_bits(logps[0, 0], want[0]) and same_bits(entropy[0, 0], want[1])
        z = view.detach().requires_grad_()
        gk.fused_grpo_loss(z, ids, **constants, backend=backend).loss.backward()
        assert same_bits(z.grad[0, 0], want[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["later_time", "longer_rows", "unaligned", "time_first", "every_second_sequence"])
def test_a_row_has_the_same_bits_in_every_layout(backend: str, layout: str, dtype: torch.dtype) -> None:
    row, ids = one_row(1023, dtype)
    logits, others = among(row, ids, 8 if backend in EMULATED else 64, 5)
    for mode in ("default", "one_pass", "inplace"):
        assert_same(bits(logits, others, backend, mode, 5, layout), bits(row, ids, backend, mode))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_old_logps_of_another_call_make_the_ratio_exactly_one(backend: str, dtype: torch.dtype) -> None:
    """epsilon 0 clips whatever is not exactly 1, and dual ties leave the gradient whole."""
    g = generator(9)
    batch, time = (2, 3) if backend in EMULATED else (8, 6)
    logits, ids = (torch.randn(batch, time, 1025, generator=g) * 4).to(dtype), torch.randint(1025, (batch, time), generator=g)
    full, view = lay_out(logits, "unaligned", torch.nan)
    old = torch.cat([gk.token_logprobs(view(full)[i : i + 1], ids[i : i + 1], temperature=0.7, backend=backend) for i in range(batch)])
    inputs = {"logits": logits, "completion_ids": ids, "advantages": torch.randn(batch, generator=g), "temperature": 0.7, "epsilon": 0.0}
    for mode in MODES:
        given, on_policy = run(inputs | {"old_logps": old}, backend, mode), run(inputs, backend, mode)
        assert (given.output.clipped == 0).all() and same_bits(given.dlogits, on_policy.dlogits)
        assert same_bits(given.output.loss.detach(), on_policy.output.loss.detach())
