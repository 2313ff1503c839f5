"""Which average it is: every normaliser in numbers, what splitting a batch leaves unchanged, and that no option is inert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
import oracle
from cases import batch, run, same_bits

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
MASK = torch.tensor([[1, 0, 0], [1, 1, 1]])


def loss_of_tokens(values: Tensor, mask: Tensor | None, backend: str, **options: Any) -> float:
    """The loss whose tokens are worth `values`: on-policy, an advantage is minus the token's loss."""
    return gk.grpo_loss(torch.full(values.shape, -1.0), -values, completion_mask=mask, **options, backend=backend).loss.item()


@pytest.mark.parametrize(
    ("loss_type", "options", "loss"),
    [
        ("grpo", {}, 1.5),
        ("bnpo", {}, 1.75),
        ("dapo", {}, 1.75),
        ("dr_grpo", {"max_completion_length": 3}, 7 / 6),
        ("grpo", {"num_sequences": 8}, 3 / 8),
        ("grpo", {"num_sequences": 8, "num_processes": 4}, 1.5),
        ("dr_grpo", {"max_completion_length": 3, "num_sequences": 8, "num_processes": 2}, 7 / 12),
        ("dapo", {"num_items_in_batch": 14}, 0.5),
        ("dapo", {"num_items_in_batch": torch.tensor(14), "num_processes": 2}, 1.0),
        ("dapo", {"num_items_in_batch": 3.5}, 2.0),
        ("dapo", {"num_items_in_batch": 0}, 7.0),
        ("dapo", {"num_items_in_batch": torch.tensor(-1.0)}, 7.0),
        ("grpo", {"num_sequences": torch.tensor(0)}, 3.0),
        ("bnpo", {"num_items_in_batch": 100, "num_sequences": 50, "num_processes": 7}, 1.75),
        ("grpo", {"num_items_in_batch": 100}, 1.5),
        ("dapo", {"num_sequences": 100}, 1.75),
        ("grpo", {"loss_scale": 0.5}, 0.75),
        ("bnpo", {"loss_scale": 0.5}, 0.875),
        ("dapo", {"loss_scale": 0.25, "num_items_in_batch": 14}, 0.125),
    ],
)
def test_the_average_is_the_one_that_was_named(backend: str, loss_type: str, options: dict[str, Any], loss: float) -> None:  # F11
    values = torch.tensor([[1.0, 9.0, 9.0], [2.0, 2.0, 2.0]])
    assert loss_of_tokens(values, MASK, backend, loss_type=loss_type, **options) == pytest.approx(loss, rel=1e-6)


def test_a_ratio_is_of_a_token_not_of_a_sequence(backend: str) -> None:  # F11
    logps = torch.tensor([[1.1, 0.9, 1.5]]).log()
    output = gk.grpo_loss(logps, torch.ones(1), old_logps=torch.zeros(1, 3), backend=backend)
    assert output.loss.item() == pytest.approx(-(1.1 + 0.9 + 1.2) / 3, rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_empty_sequence_adds_nothing_and_still_counts(backend: str, loss_type: str) -> None:  # F09
    values, mask = torch.tensor([[5.0, 5.0, 5.0], [2.0, 2.0, 2.0]]), torch.tensor([[0, 0, 0], [1, 1, 1]])
    want = {"grpo": 1.0, "bnpo": 2.0, "dapo": 2.0, "dr_grpo": 6 / 8}[loss_type]
    assert loss_of_tokens(values, mask, backend, loss_type=loss_type, max_completion_length=4) == pytest.approx(want, rel=1e-6)


def test_token_weights_replace_every_normaliser(backend: str) -> None:
    values, weights = torch.tensor([[1.0, 9.0, 9.0], [2.0, 2.0, 2.0]]), torch.tensor([[3.0, 5.0, 5.0], [1.0, 0.0, -1.0]])
    for options in ({}, {"loss_type": "dr_grpo"}, {"loss_scale": 7.0, "num_processes": 3, "num_sequences": 2}, {"loss_type": "bnpo"}):
        assert loss_of_tokens(values, MASK, backend, token_weights=weights, **options) == 3.0
    logps, entropy = torch.full((2, 3), -1.0), torch.full((2, 3), 10.0)
    bonus = gk.grpo_loss(
        logps, torch.zeros(2), entropy=entropy, entropy_coef=0.1, completion_mask=MASK, token_weights=weights, backend=backend
    ).loss
    assert bonus.item() == pytest.approx(-3.0)  # it follows the weights: 3 + 1 + 0 - 1


@pytest.mark.parametrize(("aggregation", "bonus"), [("loss", 0.5 * (1 + 3) / 2), ("token_mean", 0.5 * (1 + 3 * 3) / 4)])
def test_the_entropy_bonus_is_the_average_that_was_named(backend: str, aggregation: str, bonus: float) -> None:
    entropy = torch.tensor([[1.0, 9.0, 9.0], [3.0, 3.0, 3.0]], requires_grad=True)
    options = {"entropy_coef": 0.5, "entropy_aggregation": aggregation, "loss_scale": 2.0}
    output = gk.grpo_loss(torch.full((2, 3), -1.0), torch.zeros(2), entropy=entropy, completion_mask=MASK, **options, backend=backend)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-2 * bonus, rel=1e-6)
    assert (entropy * entropy.grad).sum().item() == pytest.approx(-2 * bonus, rel=1e-6) and (entropy.grad[MASK == 0] == 0).all()


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_splitting_a_batch_changes_nothing_with_global_counts(backend: str, loss_type: str, ranks: int) -> None:
    """Gradients of micro-batches add; the trainer averages over ranks."""
    inputs = batch(1, (6, 5, 31)) | {"beta": 0.1, "loss_type": loss_type, "max_completion_length": 5}
    whole = run(inputs, backend)
    counts = {"num_items_in_batch": inputs["completion_mask"].sum(), "num_sequences": 6}
    parts = [
        run({name: x[rows] if isinstance(x, Tensor) else x for name, x in inputs.items()} | counts | {"num_processes": ranks}, backend)
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    torch.testing.assert_close(torch.cat([part.dlogits for part in parts]) / ranks, whole.dlogits, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(sum(part.output.loss for part in parts) / ranks, whole.output.loss, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss_type", "name"), [("dapo", "num_items_in_batch"), ("grpo", "num_sequences")])
def test_a_count_is_a_constant(backend: str, loss_type: str, name: str, level: str) -> None:
    logps, count = torch.full((2, 3), -1.0, requires_grad=True), torch.tensor(4.0, requires_grad=True)
    options = {"loss_type": loss_type, "importance_sampling_level": level, name: count}
    gk.grpo_loss(logps, torch.tensor([1.0, 2.0]), **options, backend=backend).loss.backward()
    assert count.grad is None and logps.grad is not None


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_padded_length_changes_nothing(backend: str, loss_type: str) -> None:
    inputs = batch(2, (3, 4, 31)) | {"beta": 0.1, "loss_type": loss_type, "max_completion_length": 9, "entropy_coef": 0.1}
    longer = {
        name: torch.cat([x, torch.zeros_like(x[:, :2])], 1) if isinstance(x, Tensor) and x.dim() > 1 else x for name, x in inputs.items()
    }
    want, got = run(inputs, backend), run(longer, backend)
    torch.testing.assert_close(got.dlogits[:, :4], want.dlogits, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.output.loss, want.output.loss, rtol=1e-6, atol=0)


# Two values of every option on an input where both matter; the second must change the loss or its gradient.
ACTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "loss_type": ("grpo", "bnpo", {}),
    "epsilon": (0.2, 0.05, {}),
    "epsilon_high": (None, 0.4, {}),
    "delta": (None, 1.05, {}),
    "dual_clip": (None, 1.05, {}),
    "beta": (0.0, 0.1, {}),
    "max_log_ratio": (None, 0.1, {}),
    "entropy_coef": (0.0, 0.1, {}),
    "entropy_aggregation": ("loss", "token_mean", {"entropy_coef": 0.1}),
    "num_items_in_batch": (None, 9, {"loss_type": "dapo"}),
    "num_sequences": (None, 9, {}),
    "num_processes": (1, 2, {"num_sequences": 9}),
    "max_completion_length": (5, 9, {"loss_type": "dr_grpo"}),
    "loss_scale": (1.0, 0.5, {}),
    "temperature": (1.0, 0.5, {}),
    "old_logps": (None, torch.full((4, 6), -3.0), {}),
    "ref_logps": (torch.full((4, 6), -3.0), torch.full((4, 6), -2.0), {"beta": 0.1}),
    "completion_mask": (None, torch.eye(4, 6), {}),
    "importance_weights": (None, torch.full((4,), 2.0), {}),
    "policy_weights": (None, torch.full((4, 6), 0.5), {}),
    "token_weights": (None, torch.ones(4, 6), {}),
    "advantages": (torch.ones(4), -torch.ones(4), {}),
}


@pytest.mark.parametrize("name", ACTS)
def test_no_option_is_inert(backend: str, name: str) -> None:  # F32
    first, second, options = ACTS[name]
    inputs = batch(3, (4, 6, 31)) | options
    one, other = run(inputs | {name: first}, backend), run(inputs | {name: second}, backend)
    assert not same_bits(one.dlogits, other.dlogits)
    expected = oracle.grpo(**(inputs | {name: second}))
    torch.testing.assert_close(other.dlogits.double(), expected.dlogits, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("unused", "options"),
    [
        ({"max_completion_length": 99}, {}),
        ({"num_items_in_batch": 99}, {}),
        ({"num_sequences": 99}, {"loss_type": "dapo"}),
        ({"num_items_in_batch": 9, "num_sequences": 9, "num_processes": 3}, {"loss_type": "bnpo"}),
        ({"entropy_aggregation": "token_mean"}, {}),
        ({"max_log_ratio": 80.0}, {}),
        ({"ref_logps": torch.zeros(4, 6)}, {}),
        ({"loss_scale": 3.0, "num_sequences": 9}, {"token_weights": torch.ones(4, 6)}),
        ({"one_pass": True}, {"loss_scale": 2.0}),
    ],
)
def test_an_unused_option_changes_no_bit(backend: str, unused: dict[str, Any], options: dict[str, Any]) -> None:  # F32
    inputs = batch(4, (4, 6, 31)) | options
    one, other = run(inputs, backend), run(inputs | unused, backend)
    assert same_bits(one.output.loss.detach(), other.output.loss.detach())
    if "one_pass" not in unused:
        assert same_bits(one.dlogits, other.dlogits)
