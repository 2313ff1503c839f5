"""Entropy first, tokens later: the same answers and gradients as both at once, from one sweep forward and one backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.scores import RowScores
from sweeps import Sweeps

SHAPES = [(5, 7), (2, 3, 1025), (1, 1, 1), (0, 5)]
LOGP_BUDGET = {"atol": 3e-6, "rtol": 2e-7}


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return (5 * torch.randn(shape, generator=g)).to(dtype).requires_grad_(), torch.randint(shape[-1], shape[:-1], generator=g)


def total(logps: Tensor, entropy: Tensor) -> Tensor:
    return (logps * torch.linspace(-2, 3, logps.numel()).view(logps.shape)).sum() + (entropy**2).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_are_what_one_call_gives(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    logits, ids = made(shape, dtype)
    scores = RowScores(logits, backend=backend)
    entropy, logps = scores.entropy(), scores.logps(logits, ids)
    (got,) = torch.autograd.grad(total(logps, entropy), logits)
    at_once = gk.token_logprobs_and_entropy(logits, ids, backend=backend)
    (wanted,) = torch.autograd.grad(total(*at_once), logits)
    torch.testing.assert_close(logps, at_once.logps, **LOGP_BUDGET)
    assert torch.equal(entropy, at_once.entropy)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("wanted", ["logps", "entropy"])
def test_one_of_them_alone_has_its_gradient(wanted: str, backend: str) -> None:
    logits, ids = made((4, 33))
    scores, at_once = RowScores(logits, backend=backend), gk.token_logprobs_and_entropy(logits, ids, backend=backend)
    answer = scores.entropy() if wanted == "entropy" else scores.logps(logits, ids)
    (got,) = torch.autograd.grad(answer.sum(), logits)
    torch.testing.assert_close(got, torch.autograd.grad(getattr(at_once, wanted).sum(), logits)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True])
def test_one_sweep_forward_and_one_backward(inplace: bool, backend: str) -> None:
    leaf, ids = made((4, 3, 33))
    with Sweeps() as sweeps:
        logits = leaf * 1
        scores = RowScores(logits, inplace_backward=inplace, backend=backend)
        entropy, logps = scores.entropy(), scores.logps(logits, ids)
        total(logps, entropy).backward()
    assert sweeps.counts == {"logprobs_forward": 1, "logprobs_backward_" if inplace else "logprobs_backward": 1}
    at_once = gk.token_logprobs_and_entropy(leaf, ids, backend=backend)
    torch.testing.assert_close(leaf.grad, torch.autograd.grad(total(*at_once), leaf)[0], rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # where the gradient is now
        assert torch.equal(logits, leaf) != inplace


def test_impossible_tokens_and_broken_rows(backend: str) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[0.0, -inf, 0.0], [0.0, -inf, 0.0], [-inf, -inf, -inf], [0.0, nan, 0.0], [0.0, inf, 0.0]], requires_grad=True)
    ids = torch.tensor([0, 1, 0, 0, 0])
    scores = RowScores(logits, backend=backend)
    entropy, logps = scores.entropy(), scores.logps(logits, ids)
    at_once = gk.token_logprobs_and_entropy(logits, ids, backend=backend)
    torch.testing.assert_close(logps, at_once.logps, equal_nan=True)
    torch.testing.assert_close(entropy, at_once.entropy, equal_nan=True)
    (got,) = torch.autograd.grad(logps[:2].sum(), logits)
    torch.testing.assert_close(got, torch.autograd.grad(at_once.logps[:2].sum(), logits)[0], equal_nan=True)


def test_a_common_constant_changes_nothing(backend: str) -> None:
    logits, ids = made((6, 100))
    shifted = (logits.detach() * 4).round() / 4
    near, far = RowScores(shifted, backend=backend), RowScores(shifted + 2.0**18, backend=backend)
    torch.testing.assert_close(near.logps(shifted, ids), far.logps(shifted + 2.0**18, ids), atol=1e-6, rtol=0)


def test_ids_outside_the_vocabulary_are_named(backend: str) -> None:
    logits, _ = made((2, 3, 7))
    scores = RowScores(logits, backend=backend)
    with pytest.raises(IndexError, match=r"\(1, 2\): expected in \[0, 7\), got -100"):
        scores.logps(logits, torch.tensor([[0, 1, 2], [3, 4, -100]]))
    assert torch.equal(scores.logps(logits, torch.full((2, 3), 6)).isfinite(), torch.ones(2, 3, dtype=torch.bool))  # not used up


def test_other_tokens_and_shapes_are_refused() -> None:
    logits, ids = made((2, 3, 7))
    scores = RowScores(logits)
    with pytest.raises(ValueError, match="token_ids"):
        scores.logps(logits, ids[:, :2])
    with pytest.raises(TypeError, match="token_ids"):
        scores.logps(logits, ids.float())
    scores.logps(logits, ids)
    with pytest.raises(RuntimeError, match="have their tokens"):
        scores.logps(logits, ids)
    scores.entropy()
    with pytest.raises(RuntimeError, match="given out"):
        scores.entropy()
    with pytest.raises(TypeError, match="logits"):
        RowScores(ids)


def test_the_callers_ids_may_change_afterwards() -> None:
    logits, ids = made((4, 9))
    kept, scores = ids.clone(), RowScores(logits)
    logps = scores.logps(logits, ids)
    ids.zero_()
    (got,) = torch.autograd.grad(logps.sum(), logits)
    assert torch.equal(got, torch.autograd.grad(gk.token_logprobs(logits, kept).sum(), logits)[0])


def test_changed_logits_raise_in_the_backward() -> None:
    leaf, ids = made((4, 9))
    logits = leaf * 1
    scores = RowScores(logits)
    logps = scores.logps(logits, ids)
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()


def test_float64(backend: str) -> None:
    if backend != "torch":
        pytest.skip("float64 is served by the backend torch")
    logits, ids = made((3, 5), torch.float64)

    def both(z: Tensor) -> tuple[Tensor, Tensor]:
        scores = RowScores(z, backend=backend)
        return scores.entropy(), scores.logps(z, ids)

    assert torch.autograd.gradcheck(both, logits)


def test_no_second_derivative() -> None:
    logits, ids = made((3, 5))
    (gradient,) = torch.autograd.grad(RowScores(logits).logps(logits, ids).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()
