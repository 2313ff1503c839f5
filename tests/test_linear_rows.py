"""What the loss from hidden states costs, counted where it can be: rows in the products, memory that is saved, and peaks of a process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import grpo_kernels as gk
import probe_linear
from cases import batch
from linear_cases import problem, run

B, T, V = 4, 6, 31
PRODUCTS = ("logits", "dhidden", "dweight")


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows of (n, D) x (D, V), (n, V) x (V, D) and (V, n) x (n, D) since the last `clear`."""
    counted: dict[str, int] = {}

    def count(a: torch.Tensor, b: torch.Tensor) -> None:
        (rows, inner), columns = a.shape, b.shape[1]
        if columns == V:
            counted["logits"] = counted.get("logits", 0) + rows
        elif inner == V:
            counted["dhidden"] = counted.get("dhidden", 0) + rows
        else:
            assert rows == V, (a.shape, b.shape)
            counted["dweight"] = counted.get("dweight", 0) + inner

    for owner, name, first in ((torch, "mm", 0), (torch, "addmm", 1), (torch.Tensor, "addmm_", 1)):
        original = getattr(owner, name)

        def counting(*args: Any, original: Any = original, first: int = first, **kwargs: Any) -> Any:
            count(*args[first : first + 2])
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)
    return counted


def inputs(**changed: Any) -> dict[str, Any]:
    """Everybody on policy and on one side of the clip range, so that every active token has a gradient."""
    return batch(0, (B, T, V)) | {"old_logps": None, "advantages": torch.tensor([1.0, -0.5, 2.0, 0.7])} | changed


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("chunk_size", [None, 7, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_multiplied_are_rows_that_matter(backend: str, multiplied, dtype: torch.dtype, chunk_size: int | None, level: str) -> None:
    """Masked rows are in no product. A sequence without advantage is scored, since its log-probs are outputs, and is in no other."""
    advantages = torch.tensor([1.0, 0.0, 2.0, 0.7])
    p = problem(inputs(advantages=advantages, importance_sampling_level=level, beta=0.0), dtype, 0, chunk_size=chunk_size)
    active = p.arguments["completion_mask"]
    scored, learning = int(active.sum()), int(active[advantages != 0].sum())
    assert learning < scored < B * T
    run(p, backend)
    twice = level == "sequence" and chunk_size == 2  # no sequence fits into a chunk: logits again, of the rows that have a gradient
    assert multiplied == {"logits": scored + twice * learning, "dhidden": learning, "dweight": learning}

    multiplied.clear()
    whole = problem(inputs(completion_mask=None, importance_sampling_level=level), dtype, 0, chunk_size=12)
    run(whole, backend)
    assert multiplied == dict.fromkeys(PRODUCTS, B * T)


def test_clipped_tokens_leave_where_nothing_else_gives_them_a_gradient(backend: str, multiplied) -> None:
    p = problem(batch(0, (B, T, V)), torch.float32, 0, chunk_size=5)
    output = run(p, backend).output
    clipped = int((output.clipped != 0).sum())
    active = int(p.arguments["completion_mask"].sum())
    assert clipped >= 2 and multiplied == {"logits": active, "dhidden": active - clipped, "dweight": active - clipped}
    for option in ({"beta": 0.1}, {"entropy_coef": 0.1}):
        multiplied.clear()
        run(p, backend, **option)
        assert multiplied == dict.fromkeys(PRODUCTS, active)


@pytest.mark.parametrize("needed", ["hidden", "weight", "bias"])
def test_what_needs_no_gradient_costs_no_product(backend: str, multiplied, needed: str) -> None:
    p = problem(inputs(), torch.float32, 0, bias=True, chunk_size=5)
    active = int(p.arguments["completion_mask"].sum())
    leaves = {"hidden": p.hidden.clone(), "weight": p.weight.clone(), "bias": p.bias.clone()}
    leaves[needed].requires_grad_()
    for call in (
        lambda: gk.fused_linear_grpo_loss(leaves["hidden"], leaves["weight"], bias=leaves["bias"], **p.arguments, backend=backend).loss,
        lambda: gk.fused_linear_logprobs(
            leaves["hidden"], leaves["weight"], p.arguments["completion_ids"], bias=leaves["bias"], mask=p.arguments["completion_mask"],
            chunk_size=5, backend=backend,
        ).logps.sum(),
    ):  # fmt: skip
        multiplied.clear()
        leaves[needed].grad = None
        call().backward()
        assert leaves[needed].grad.any() and [name for name, x in leaves.items() if x.grad is not None] == [needed]
        other = {"hidden": "dhidden", "weight": "dweight"}.get(needed)
        assert multiplied.keys() == {"logits", other} - {None} and multiplied.get(other, active) == active


def test_log_probs_without_grad_are_one_product_of_the_rows_that_matter(backend: str, multiplied) -> None:
    p = problem(inputs(), torch.float32, 0)
    mask, ids = p.arguments["completion_mask"], p.arguments["completion_ids"]
    weight = p.weight.clone().requires_grad_()
    with torch.no_grad():
        gk.fused_linear_logprobs(p.hidden, weight, ids, mask=mask, backend=backend)
        gk.fused_linear_grpo_loss(p.hidden, weight, **p.arguments, backend=backend)
    assert multiplied == {"logits": 2 * int(mask.sum())}

    multiplied.clear()  # of a gradient at a few tokens, the products of those
    logps = gk.fused_linear_logprobs(p.hidden, weight, ids, mask=mask, chunk_size=5, backend=backend).logps
    (logps[:, :2] * 1.0).sum().backward()
    few = int(mask[:, :2].sum())
    assert multiplied == {"logits": int(mask.sum()) + few, "dweight": few}


@pytest.mark.exhaustive
def test_rows_that_leave_change_nothing(backend: str) -> None:
    """Which rows fill the places of those that leave is a matter of order: scattered, at the end, all, none."""
    for seed in range(6):
        advantages = torch.where(torch.rand(B, T, generator=torch.Generator().manual_seed(seed)) < seed / 5, 0.0, 1.0)
        advantages[0, 0] = seed % 2
        p = problem(inputs(advantages=advantages, completion_mask=None), torch.float32, seed, chunk_size=9)
        got, want = run(p, backend), run(p, backend, entropy_coef=1e-30)  # a gradient that is none: nobody leaves
        torch.testing.assert_close(got.dweight, want.dweight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.dhidden, want.dhidden, rtol=1e-5, atol=1e-6)


# --- memory -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("chunk_size", [8, 2])
def test_nothing_of_the_size_of_the_logits_is_saved(backend: str, chunk_size: int, level: str) -> None:  # F16
    p = problem(inputs(importance_sampling_level=level), torch.float32, 0, chunk_size=chunk_size)
    saved: list[torch.Tensor] = []
    ids, mask = p.arguments["completion_ids"], p.arguments["completion_mask"]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        hidden, weight = p.hidden.clone().requires_grad_(), p.weight.clone().requires_grad_()
        loss = gk.fused_linear_grpo_loss(hidden, weight, **p.arguments, backend=backend).loss
        logps = gk.fused_linear_logprobs(hidden, weight, ids, mask=mask, backend=backend)
    assert max(x.numel() for x in saved) <= max(hidden.numel(), weight.numel()) < B * T * V
    (loss + logps.logps.sum()).backward()


MB = 1 << 20
SIZES = {"vocab": 151936, "columns": 256, "chunk_size": 128}


def peak(**options: Any) -> float:
    return probe_linear.measure(**SIZES | options)["extra_bytes"]


PEAKS = [(1024, "float32", "token"), *[(rows, "bfloat16", mode) for rows, mode in
         ((512, "token"), (1024, "token"), (512, "sequence"), (512, "frozen"), (512, "forward"))]]  # fmt: skip


@pytest.mark.serial
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("rows, dtype, mode", PEAKS)
def test_the_buffer_bounds_memory_whatever_the_number_of_tokens(rows: int, dtype: str, mode: str) -> None:
    """The buffer; where the head learns dW, float32, given back part by part while the rounded one fills up; and less than 16 MB: what
    has the size of the hidden states (at most 1 MB each), what libraries keep."""
    buffer = 128 * 151936 * {"float32": 4, "bfloat16": 2}[dtype]
    dweight = 0 if mode in ("frozen", "forward") else 151936 * 256 * 4
    assert dweight < peak(rows=rows, dtype=dtype, mode=mode) - buffer / 2 <= buffer / 2 + dweight + 16 * MB


@pytest.mark.serial
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_chunks_add_up_without_a_float32_sum_beside() -> None:
    assert peak(rows=256, dtype="bfloat16") <= (128 + 256) * 151936 * 2 + 8 * MB
