"""Liger-Kernel's triton_grpo_loss, in the same interpreter, agrees with ours on what it gets right; where it does not, the test says who is
right. docs/migration.md has the same in words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
import oracle
from cases import batch, generator, pairwise

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

pytestmark = pytest.mark.emulated("triton")

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")
CASES = [
    *pairwise(
        {
            "loss_type": CLIPPED,
            "level": ("token", "sequence"),
            "beta": (0.0, 0.1),
            "delta": (None, 1.6),
            "kl_bias_correction": (False, True),
            "importance_weights": (None, "sequence", "token"),
            "masked": (True, False),
            "temperature": (1.0, 0.7),
            "on_policy": (False, True),
        },
        seed=11,
    ),
    *pairwise(
        {
            "loss_type": ("cispo", "sapo", "vespo"),
            "level": ("token",),
            "beta": (0.0, 0.1),
            "delta": (None,),
            "kl_bias_correction": (False, True),
            "importance_weights": (None, "sequence", "token"),
            "masked": (True, False),
            "temperature": (1.0, 0.7),
            "on_policy": (False, True),
        },
        seed=12,
    ),
]


def both(inputs: dict[str, Any], **options: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(loss, dlogits) of Liger and of ours. Logits are (B, T + 1, V); inputs are those of fused_grpo_loss."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    inputs = {name: x for name, x in inputs.items() if x is not None} | options
    leaf = inputs.pop("logits").clone().requires_grad_()
    ours = gk.fused_grpo_loss(leaf, **inputs, backend="triton").loss
    (mine,) = torch.autograd.grad(ours, leaf)

    names = {"epsilon": "eps_low", "epsilon_high": "eps_high", "kl_bias_correction": "use_bias_correction_kl"}
    names |= {"importance_weights": "vllm_is_ratio"}
    others = {names.get(name, name): x for name, x in inputs.items()}
    old, ref, ids, advantages = (others.pop(n, None) for n in ("old_logps", "ref_logps", "completion_ids", "advantages"))
    theirs, _ = triton_grpo_loss(leaf, old, ref, ids, advantages, **{"beta": 0.0, "temperature": 1.0} | others, inplace=False, reduce=True)
    (liger,) = torch.autograd.grad(theirs, leaf)
    return (theirs.detach(), liger), (ours.detach(), mine)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(x) for x in case.values()))
def test_losses_and_gradients_agree(case: dict[str, Any]) -> None:
    # 2,300 columns: their tile of 2,048 and a second, partial one
    inputs = batch(5, (3, 4, 2300), temperature=case["temperature"], spare=True)
    inputs["logits"] = torch.nan_to_num(inputs["logits"])  # what stands behind the last token is of no interest here
    inputs["completion_mask"] = inputs["completion_mask"].int() if case["masked"] else None
    inputs |= {"old_logps": None} if case["on_policy"] else {}
    shape = {None: None, "sequence": (3, 1), "token": (3, 4)}[case["importance_weights"]]
    weights = None if shape is None else torch.rand(shape, generator=generator(6)) + 0.5
    if case["masked"] and case["importance_weights"] == "token":
        weights = torch.where(
            inputs["completion_mask"] != 0, weights, 1.0
        )  # as TRL pads them; vespo sums their logarithms there, masked or not
    options = {"loss_type": case["loss_type"], "importance_sampling_level": case["level"], "importance_weights": weights}
    options |= {"epsilon": 0.2, "epsilon_high": 1.2 if case["loss_type"] == "cispo" else 0.3, "beta": case["beta"], "delta": case["delta"]}
    options |= {"kl_bias_correction": case["kl_bias_correction"], "max_completion_length": 5}
    (their_loss, theirs), (our_loss, ours) = both(inputs, **options)
    assert their_loss.item() == pytest.approx(our_loss.item(), rel=2e-5, abs=2e-6)
    assert (ours[:, :-1] != 0).any()
    scale = ours.abs().amax(-1, keepdim=True)
    # against the row's largest: beside a target of p near 1 they have 1 - p to 1e-7 only
    assert ((theirs - ours).abs() <= 1e-4 * scale + 1e-6 * ours.abs().max()).all()


def one_row(logits: Tensor, token_id: int) -> dict[str, Any]:
    spare = torch.zeros_like(logits)
    ids = torch.full((1, 1), token_id)
    return {"logits": torch.stack([logits, spare])[None], "completion_ids": ids, "advantages": torch.ones(1)}


def test_a_row_that_opens_with_a_tile_of_minus_infinity_is_wrong_there_and_exact_here() -> None:
    logits = torch.full((2100,), -math.inf)
    logits[2048:] = torch.randn(52, generator=generator(1))
    inputs = one_row(logits, 2050) | {"old_logps": torch.full((1, 1), -4.0)}
    (their_loss, theirs), (our_loss, ours) = both(inputs)
    expected = oracle.grpo(**inputs)
    assert abs(their_loss - expected.loss) > 0.1  # the ratio is NaN, and the clip lets its bound through
    assert not theirs[0, 0].isfinite().all()
    oracle.assert_within("loss", our_loss, expected.loss, oracle.loss_budget(expected))
    assert ours.isfinite().all() and (ours[0, 0, 2048:] != 0).all()


def test_a_delta_inside_the_clip_range_stops_the_gradient_there_and_not_here() -> None:
    # ratio 1.2 at a negative advantage: the clipped branch, which is not clipped, is the smaller one, and its gradient passes
    logits = torch.randn(64, generator=generator(4))
    old = (logits.log_softmax(0)[3] - math.log(1.2)).reshape(1, 1)
    inputs = one_row(logits, 3) | {"old_logps": old, "advantages": -torch.ones(1)}
    options = {"epsilon_high": 0.3, "delta": 1.1}
    (their_loss, theirs), (our_loss, ours) = both(inputs, **options)
    expected = oracle.grpo(**inputs, **options)
    assert their_loss.item() == pytest.approx(our_loss.item()) and our_loss.item() == pytest.approx(1.2, rel=1e-5)
    assert (theirs == 0).all()
    torch.testing.assert_close(ours[0, 0].double(), expected.dlogits[0, 0], rtol=1e-4, atol=1e-6)


def test_vespo_counts_the_importance_weights_of_masked_tokens_there_and_not_here() -> None:
    inputs = batch(3, (2, 3, 40), spare=True)
    inputs["logits"], inputs["completion_mask"] = torch.nan_to_num(inputs["logits"]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    results = []
    for at_masked in (1.0, 2.0):
        weights = torch.where(inputs["completion_mask"] != 0, 0.9, at_masked)
        results.append(both(inputs, loss_type="vespo", importance_weights=weights))
    (theirs, ours), (theirs_2, ours_2) = results
    assert theirs[0].item() == pytest.approx(ours[0].item(), rel=2e-5)
    assert ours_2[0].item() == ours[0].item() and theirs_2[0].item() != pytest.approx(theirs[0].item(), rel=0.1)


@pytest.mark.parametrize("distance", [1e-4, 1e-3])
def test_their_kl_cancels_near_zero(distance: float) -> None:
    inputs = one_row(torch.zeros(1024), 3)
    exact = -math.log(1024)
    inputs |= {"ref_logps": torch.full((1, 1), exact + distance), "advantages": torch.zeros(1)}
    (theirs, _), (ours, _) = both(inputs, beta=1.0)
    d = inputs["ref_logps"].double().item() - torch.tensor(exact).item()  # of the logp that float32 holds
    kl = math.expm1(d) - d
    assert abs(ours.item() - kl) < 3e-7 * abs(math.expm1(d)) + 1e-5 * kl + 1e-9
    assert abs(theirs.item() - kl) > 1e-2 * kl


def test_their_kl_overflows_where_ours_is_held() -> None:
    inputs = one_row(torch.randn(64, generator=generator(2)), 3) | {"ref_logps": torch.full((1, 1), 100.0)}
    (their_loss, theirs), (our_loss, ours) = both(inputs, beta=0.04)
    assert their_loss.isinf() and not theirs[0, 0].isfinite().all()
    assert our_loss.isfinite() and ours.isfinite().all()


def test_an_id_outside_the_vocabulary_reads_the_next_row_there_and_raises_here() -> None:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits = torch.tensor([[[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]])
    ids, logp = torch.tensor([[4]]), 10.0 - torch.arange(4.0).logsumexp(0)
    loss, *_ = triton_grpo_loss(
        logits, None, None, ids, torch.ones(1), temperature=1.0, beta=0.0, loss_type="cispo", eps_high=5.0, inplace=False
    )
    assert loss.item() == pytest.approx(-logp.item())  # cispo shows the log-probability: of the next row's first column
    with pytest.raises(IndexError, match=r"token id at position \(0, 0\)"):
        gk.fused_grpo_loss(logits, ids, torch.ones(1), backend="triton")


def test_luspo_at_token_level_is_divided_by_the_padded_length_there() -> None:
    inputs = batch(8, (3, 4, 40), spare=True)
    inputs["logits"], inputs["completion_mask"] = torch.nan_to_num(inputs["logits"]), torch.tensor([[1, 1, 0, 0], [1] * 4, [1, 1, 1, 0]])
    (their_loss, _), (our_loss, _) = both(inputs, loss_type="luspo", epsilon_high=0.2)
    n = inputs["completion_mask"].sum(-1, keepdim=True)
    weighted = gk.fused_grpo_loss(**inputs, token_weights=(n / 12.0).expand(3, 4), backend="triton").loss
    assert their_loss.item() == pytest.approx(weighted.item(), rel=1e-5)
    assert our_loss.item() != pytest.approx(their_loss.item(), rel=1e-2)


def test_their_gradient_takes_the_logits_place_unseen_and_ours_raises() -> None:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    inputs = batch(9, (1, 2, 40), spare=True)
    inputs["logits"], ids = torch.nan_to_num(inputs["logits"]), inputs["completion_ids"]
    leaf = inputs["logits"].clone().requires_grad_()

    def second_reader(logits: Tensor) -> Tensor:
        return (logits**2).sum()

    z = leaf * 1
    loss, _ = triton_grpo_loss(z, None, None, ids, inputs["advantages"], beta=0.0, inplace=True, reduce=True)
    second = second_reader(z)
    loss.backward(retain_graph=True)
    (wrong,) = torch.autograd.grad(second, z)
    assert not torch.allclose(wrong, 2 * inputs["logits"])  # 2 dlogits: no error

    z = leaf * 1
    loss = gk.fused_grpo_loss(z, ids, inputs["advantages"], inplace=True, backend="triton").loss
    second = second_reader(z)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(second, z)
