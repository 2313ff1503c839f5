"""Bytes that the Triton kernels move from and to the logits, counted exactly: every load and store of the interpreter, element by element.

In rows of V logits: the forward 1R; the backward 1R + 1W; the one pass 1R, the same row once more, 1W. A masked row is read nowhere, a row
without a gradient in the forward alone; where a gradient is asked for, either is written as zeros. Beside a sweep that computes something
one element is read, or written, once more: the chosen token's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import DTYPES, generator, lay_out, pairwise
from grpo_kernels.backends.triton.configs import forced_block

pytestmark = pytest.mark.emulated("triton")

VOCAB = {"contiguous": 208, "unaligned": 203, "later_time": 208}  # of tiles of 64: three whole ones and a partial one
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])  # 6 of 8 rows
ADVANTAGES = torch.tensor([[1.0, -0.5, 9.0, 0.0], [1.0, 0.0, 2.0, 9.0]])  # of the active ones two have no gradient
ACTIVE, LIVE, ALL = 6, 4, 8


class Traffic:
    """Counts bytes between kernels and the storages that it watches."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter, self.ranges = interpreter, {}
        self.read: dict[str, int] = {}
        self.written: dict[str, int] = {}

    def watch(self, name: str, storage: Tensor) -> None:
        start = storage.untyped_storage().data_ptr()
        self.ranges[name] = (start, start + storage.untyped_storage().nbytes())
        self.read[name] = self.written[name] = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.interpreter, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._count(self.read, addresses, mask, dtype.itemsize if hasattr(dtype, "itemsize") else other.itemsize)
        return self.interpreter.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._count(self.written, addresses, mask, values.itemsize)
        return self.interpreter.store(addresses, values, mask)

    def _count(self, counts: dict[str, int], addresses: Any, mask: Any, itemsize: int) -> None:
        for name, (start, end) in self.ranges.items():
            counts[name] += int(((addresses >= start) & (addresses < end) & mask).sum()) * itemsize


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    import triton.runtime.interpreter as module

    counting = Traffic(module._interpreter)
    monkeypatch.setattr(module, "_interpreter", counting)
    with forced_block(64):
        yield counting


def inputs(dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The storage, the logits in it, and the other arguments of the loss."""
    g, vocab = generator(7), VOCAB[layout]
    storage, view = lay_out(torch.randn(2, 4, vocab, generator=g).to(dtype), layout, sentinel=torch.nan)
    logits = view(storage)
    ids = torch.randint(vocab, (2, 4), generator=g)
    return storage, logits, {"completion_ids": ids, "advantages": ADVANTAGES, "completion_mask": MASK, "backend": "triton"}


CASES = {"dtype": DTYPES, "layout": tuple(VOCAB), "entropy_coef": (0.0, 0.1), "inplace": (False, True)}
every_case = pytest.mark.parametrize("case", pairwise(CASES, seed=3), ids=lambda case: "-".join(map(str, case.values())))


@every_case
def test_the_forward_reads_active_rows_once_and_writes_none(traffic: Traffic, case: dict[str, Any]) -> None:
    storage, logits, arguments = inputs(case["dtype"], case["layout"])
    traffic.watch("logits", storage)
    gk.token_logprobs_and_entropy(logits, arguments["completion_ids"], mask=MASK, backend="triton")
    assert traffic.read["logits"] == ACTIVE * (logits.shape[-1] + 1) * logits.element_size()
    assert traffic.written["logits"] == 0


@every_case
def test_the_backward_reads_rows_with_a_gradient_once_and_writes_every_row_once(traffic: Traffic, case: dict[str, Any]) -> None:
    storage, logits, arguments = inputs(case["dtype"], case["layout"])
    origin = logits.detach().requires_grad_()
    z = origin * 1 if case["inplace"] else origin  # not a leaf: the gradient takes its place
    output = gk.fused_grpo_loss(z, **arguments, entropy_coef=case["entropy_coef"], inplace=case["inplace"])
    gradients: list[Tensor] = []
    allocate = torch.empty_like
    traffic.watch("logits", z)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda x, **options: watched(traffic, gradients, allocate(x, **options), z.shape))
        output.loss.backward()

    row, size = logits.shape[-1], logits.element_size()
    with_gradient = ACTIVE if case["entropy_coef"] else LIVE
    assert traffic.read["logits"] == with_gradient * (row + 1) * size
    where = "logits" if case["inplace"] else "dlogits"
    assert traffic.written[where] == (ALL * row + with_gradient) * size
    if not case["inplace"]:
        assert traffic.written["logits"] == traffic.read["dlogits"] == 0


@every_case
def test_the_one_pass_reads_active_rows_once_and_those_with_a_gradient_again(traffic: Traffic, case: dict[str, Any]) -> None:
    storage, logits, arguments = inputs(case["dtype"], case["layout"])
    z = logits.detach().requires_grad_() * 1
    gradients: list[Tensor] = []
    allocate = torch.empty_like
    traffic.watch("logits", z)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda x, **options: watched(traffic, gradients, allocate(x, **options), z.shape))
        options = {"one_pass": True, "inplace": case["inplace"], "entropy_coef": case["entropy_coef"]}
        gk.fused_grpo_loss(z, **arguments, **options).loss.backward()

    row, size = logits.shape[-1], logits.element_size()
    with_gradient = ACTIVE if case["entropy_coef"] else LIVE
    assert traffic.read["logits"] == (ACTIVE * (row + 1) + with_gradient * row) * size
    where = "logits" if case["inplace"] else "dlogits"
    assert traffic.written[where] == (ALL * row + with_gradient) * size
    if not case["inplace"]:
        assert traffic.written["logits"] == traffic.read["dlogits"] == 0


def watched(traffic: Traffic, gradients: list[Tensor], made: Tensor, shape: torch.Size) -> Tensor:
    if made.shape == shape:
        assert not gradients, "a second tensor of the logits' size"
        gradients.append(made)
        traffic.watch("dlogits", made)
    return made


def test_an_upstream_gradient_of_one_moves_nothing_and_another_reads_and_writes_once(traffic: Traffic) -> None:
    for factor in (1.0, 0.5):
        _, logits, arguments = inputs(torch.float32, "contiguous")
        z = logits.detach().requires_grad_() * 1
        loss = gk.fused_grpo_loss(z, **arguments, one_pass=True, inplace=True).loss
        traffic.watch("logits", z)
        (loss * factor).backward()
        moved = 0 if factor == 1.0 else z.numel() * z.element_size()
        assert traffic.read["logits"] == traffic.written["logits"] == moved


def test_a_planted_third_sweep_is_found(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_kernels.backends.triton import kernels

    once: Callable[..., Any] = kernels.row_stats

    def twice(*arguments: Any) -> Any:
        once(*arguments)
        return once(*arguments)

    monkeypatch.setattr(kernels, "row_stats", twice)
    case = {"dtype": torch.bfloat16, "layout": "contiguous", "entropy_coef": 0.1, "inplace": True}
    with pytest.raises(AssertionError):
        test_the_one_pass_reads_active_rows_once_and_those_with_a_gradient_again(traffic, case)
