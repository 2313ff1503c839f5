"""Packed rows are the padded batch without the padding: same loss, same gradient, for every loss and level; and their own rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import same_bits
from combination_cases import CU_SEQLENS, LENGTHS, TAIL, answer, batch, lay_out
from combination_oracle import LEVELS, LOSS_TYPES

S, N = len(LENGTHS), sum(LENGTHS) + TAIL


def case(name: str, **options: Any) -> dict[str, Any]:
    needed = {"cispo": {"epsilon_high": 1.3}}.get(options.get("loss_type", "grpo"), {})
    return batch(name, torch.float32, {"loss_type": "grpo", "kl_estimator": "k3", "beta": 0.1} | needed | options)


def run(inputs: dict[str, Any], backend: str, **changed: Any) -> tuple[gk.GRPOLossOutput, Tensor]:
    """Packed arguments as they are, but what is changed."""
    arguments, logits, _, _ = lay_out(inputs, "packed")
    arguments |= changed
    leaf = arguments.pop("logits", logits).clone().requires_grad_()
    output = gk.fused_grpo_loss(leaf, **arguments, backend=backend)
    output.loss.backward()
    return output, leaf.grad


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("layout", ["packed", "model_packed"])
def test_packed_equals_padded(backend: str, layout: str, loss_type: str, level: str) -> None:
    inputs = case(f"packed {loss_type} {level}", loss_type=loss_type, importance_sampling_level=level)
    padded, packed = (answer(inputs, x, "default", backend) for x in ("padded", layout))
    for name in ("loss", "policy_loss"):
        torch.testing.assert_close(getattr(packed.output, name), getattr(padded.output, name), rtol=1e-5, atol=1e-6)
    for name in ("logps", "entropy"):
        assert same_bits(getattr(packed.output, name), getattr(padded.output, name)), name
    torch.testing.assert_close(packed.output.kl, padded.output.kl, rtol=1e-5, atol=1e-7)
    assert torch.equal(packed.output.clipped, padded.output.clipped)
    torch.testing.assert_close(packed.dlogits, padded.dlogits, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo", "sapo"])
def test_empty_sequences_count(backend: str, loss_type: str) -> None:
    """Two of the six have no active token; one of them has no row. Without them the mean is over four."""
    inputs = case("empty", loss_type=loss_type) | {"num_sequences": None, "num_processes": 1}
    loss, _ = run(inputs, backend)
    fewer, _ = run(inputs | {"num_sequences": 4}, backend)
    torch.testing.assert_close(loss.policy_loss * 6, fewer.policy_loss * 4, rtol=1e-5, atol=1e-7)


def test_as_many_sequences_as_rows_take_one_value_each(backend: str) -> None:
    """(3,) beside sequences of 1, 0 and 2 rows could be either; (1, 3) cannot."""
    rows = {"logits": torch.zeros(3, 7), "completion_ids": torch.tensor([1, 2, 3]), "cu_seqlens": torch.tensor([0, 1, 1, 3])}
    values = torch.tensor([1.0, 2.0, 4.0])

    def policy_loss(advantages: Tensor) -> Tensor:
        return gk.fused_grpo_loss(**rows, advantages=advantages, loss_type="dapo", backend=backend).policy_loss

    torch.testing.assert_close(policy_loss(values), torch.tensor(-(1.0 + 4.0 + 4.0) / 3))
    torch.testing.assert_close(policy_loss(values[None]), torch.tensor(-(1.0 + 2.0 + 4.0) / 3))


def test_rows_behind_the_last_offset_change_no_bit(backend: str) -> None:
    for level in ("token", "sequence"):
        inputs = case("tail", importance_sampling_level=level)
        arguments, logits, _, _ = lay_out(inputs, "packed")
        want, dlogits = run(inputs, backend)
        shorter = {name: x[:-TAIL] if isinstance(x, Tensor) and x.shape[:1] == (N,) else x for name, x in arguments.items()}
        got, short = run(inputs, backend, **shorter, logits=logits[:-TAIL])
        assert (dlogits[-TAIL:] == 0).all() and same_bits(dlogits[:-TAIL], short)
        for name in got._fields:
            whole = getattr(want, name)
            assert same_bits((whole if whole.dim() == 0 else whole[:-TAIL]).detach(), getattr(got, name).detach()), name


def test_without_a_mask_every_row_of_a_sequence_counts_and_no_other(backend: str) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    logits[4] = torch.nan
    ids = torch.tensor([1, 2, 3, 4, -100])
    output = gk.fused_grpo_loss(logits, ids, torch.ones(2), cu_seqlens=torch.tensor([0, 3, 4]), loss_type="dapo", backend=backend)
    assert output.loss == -1.0 and output.logps[4] == 0 and (output.logps[:4] != 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_come_in_both_integer_types(backend: str, dtype: torch.dtype) -> None:
    inputs = case("offsets", importance_sampling_level="sequence")
    (want, dwant), (got, dgot) = run(inputs, backend), run(inputs, backend, cu_seqlens=CU_SEQLENS.to(dtype))
    assert same_bits(want.loss.detach(), got.loss.detach()) and same_bits(dwant, dgot)


@pytest.mark.parametrize("name", ["advantages", "importance_weights", "policy_weights", "temperature"])
@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_one_value_a_sequence_is_that_value_at_each_of_its_rows(backend: str, name: str, loss_type: str) -> None:
    inputs = case("spread", loss_type=loss_type)
    values = torch.empty(S).uniform_(0.6, 1.4, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([values.repeat_interleave(torch.tensor(LENGTHS)), torch.full((TAIL,), torch.nan)])
    if (name, loss_type) == ("importance_weights", "vespo"):  # of which one a row would be folded as often as there are rows
        lengths = inputs["completion_mask"].sum(1)
        rows[:-TAIL] **= 1 / lengths.clamp(min=1).repeat_interleave(torch.tensor(LENGTHS))
    (want, dwant), *others = (run(inputs, backend, **{name: x}) for x in (values, rows, rows[None]))
    for got, dgot in others:
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(dgot, dwant, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["advantages", "importance_weights", "policy_weights", "temperature"])
def test_where_there_are_as_many_sequences_as_rows_one_value_a_sequence_wins(backend: str, name: str) -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    arguments = {"advantages": torch.ones(3), "cu_seqlens": torch.tensor([0, 2, 2, 3]), "loss_type": "luspo", "backend": backend}
    ids, old = torch.tensor([0, 1, 2]), torch.full((3,), -1.5)

    def loss(values: list[float]) -> Tensor:
        return gk.fused_grpo_loss(logits, ids, **{**arguments, name: torch.tensor(values)}, old_logps=old, epsilon=9.0).loss

    assert loss([1.0, 7.0, 2.0]) == loss([1.0, 1.0, 2.0])  # the second sequence is empty
    assert loss([1.0, 1.0, 2.0]) != loss([1.0, 1.0, 1.0])


@pytest.mark.parametrize("name", ["completion_ids", "old_logps", "ref_logps", "completion_mask"])
def test_what_is_per_token_is_not_taken_per_sequence(backend: str, name: str) -> None:
    inputs = case("per token")
    x = lay_out(inputs, "packed").arguments[name]
    with pytest.raises(ValueError, match=f"{'completion_ids' if name == 'completion_ids' else name}: expected"):
        run(inputs, backend, **{name: x[:S]})


@pytest.mark.parametrize("offsets", [[1, 3, 5], [0, 4, 3], [0, 3, 24], [0, 3, -1]], ids=str)
def test_offsets_that_do_not_ascend_from_0_within_the_rows_raise(backend: str, offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets that ascend from 0 to at most the 23 rows"):
        run(case("bad"), backend, cu_seqlens=torch.tensor(offsets), advantages=torch.ones(N))


MISSHAPEN = [(torch.tensor([0.0, 3.0]), TypeError), (torch.tensor([[0, 3]]), ValueError), (torch.zeros(0, dtype=torch.int64), ValueError)]


@pytest.mark.parametrize("offsets, error", MISSHAPEN)
def test_offsets_of_another_shape_or_type_raise(backend: str, offsets: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="cu_seqlens: expected"):
        run(case("bad"), backend, cu_seqlens=offsets)
    with pytest.raises(TypeError, match="cu_seqlens: expected a torch.Tensor"):
        run(case("bad"), backend, cu_seqlens=[0, 3])


def test_packed_rows_without_offsets_raise(backend: str) -> None:
    arguments, logits, _, _ = lay_out(case("none"), "packed")
    del arguments["cu_seqlens"]
    with pytest.raises(ValueError, match="completion_ids: expected .*cu_seqlens"):
        gk.fused_grpo_loss(logits, **arguments, backend=backend)


@pytest.mark.parametrize("one_pass", [False, True])
def test_packed_rows_have_no_spare_position(backend: str, one_pass: bool) -> None:
    """Ids (1, N) beside logits (1, N + 1, V) are right without offsets; with them the kernels would read and write behind the rows."""
    logits, ids = torch.randn(1, 7, 11), torch.randint(11, (1, 6))
    with pytest.raises(ValueError, match=r"completion_ids: expected packed logits .* got logits \(1, 7, 11\) beside \(1, 6\)"):
        gk.fused_grpo_loss(logits, ids, torch.ones(2), cu_seqlens=torch.tensor([0, 3, 6]), one_pass=one_pass, backend=backend)


def test_no_sequences_and_no_rows_give_loss_0(backend: str) -> None:
    for offsets, rows in (([0], 0), ([0, 0, 0], 0), ([0, 0], 2), ([0], 2)):
        logits = torch.full((rows, 5), torch.nan, requires_grad=True)
        for level in LEVELS:
            output = gk.fused_grpo_loss(
                logits, torch.full((rows,), -1), torch.ones(len(offsets) - 1), cu_seqlens=torch.tensor(offsets),
                importance_sampling_level=level, backend=backend,
            )  # fmt: skip
            (gradient,) = torch.autograd.grad(output.loss, logits)
            assert output.loss == 0 and gradient.shape == logits.shape and (gradient == 0).all()
            assert all(x.isfinite().all() for x in gk.grpo_metrics(output, None, cu_seqlens=torch.tensor(offsets)).values())


def test_targets_are_the_next_token_of_the_same_sequence() -> None:
    ids, offsets = torch.tensor([5, 6, 7, 8, 9, 3, 4]), torch.tensor([0, 3, 3, 4, 5], dtype=torch.int32)
    targets, mask = gk.packed_targets(ids, offsets)
    assert mask.tolist() == [1, 1, 0, 0, 0, 0, 0] and targets[:2].tolist() == [6, 7] and mask.dtype == torch.int32
    completion = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    targets, mask = gk.packed_targets(ids[None].int(), offsets, completion)
    assert mask.tolist() == [0, 1, 0, 0, 0, 0, 0] and targets.shape == (7,) and targets[1] == 7
    for empty in (torch.tensor([0]), torch.tensor([0, 0])):
        targets, mask = gk.packed_targets(ids[:0], empty)
        assert targets.shape == mask.shape == (0,)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets that ascend"):
        gk.packed_targets(ids, torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="input_ids: expected packed"):
        gk.packed_targets(ids.view(7, 1), offsets)
    with pytest.raises(ValueError, match="completion_mask: expected"):
        gk.packed_targets(ids, offsets, completion[:, 1:])


def test_a_packed_forward_of_a_model_gives_the_padded_loss_and_gradients(backend: str) -> None:
    """A model that mixes nothing between positions sees the same prompts and completions padded, shifted by slicing, and packed, shifted by
    packed_targets; (1, N, V) as it returns them."""
    g = torch.Generator().manual_seed(0)
    table = torch.randn(11, 8, generator=g)
    heads = [(torch.randn(8, 11, generator=torch.Generator().manual_seed(1))).requires_grad_() for _ in range(2)]
    prompts, completions = [2, 1, 3], [3, 4, 0]
    sequences = [torch.randint(11, (p + c,), generator=g) for p, c in zip(prompts, completions)]
    longest = max(map(len, sequences))
    ids = torch.stack([torch.cat([x, x.new_zeros(longest - len(x))]) for x in sequences])
    places = torch.arange(longest)
    mask = torch.stack([(places >= p) & (places < p + c) for p, c in zip(prompts, completions)])
    advantages = torch.tensor([1.0, -0.5, 2.0])
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence", "backend": backend}
    padded = gk.fused_grpo_loss((table[ids] @ heads[0])[:, :-1], ids[:, 1:], advantages, completion_mask=mask[:, 1:], **options)

    packed_ids = torch.cat([*sequences, torch.zeros(2, dtype=torch.int64)])[None]
    offsets = torch.tensor([0, *map(len, sequences)]).cumsum(0).int()
    flags = torch.cat([*(m[: len(x)] for m, x in zip(mask, sequences)), torch.ones(2, dtype=torch.bool)])[None]
    targets, packed_mask = gk.packed_targets(packed_ids, offsets, flags)
    packed = gk.fused_grpo_loss(
        table[packed_ids] @ heads[1], targets, advantages, completion_mask=packed_mask, cu_seqlens=offsets, inplace=True, **options
    )
    assert packed_mask.sum() == sum(completions) and packed.logps.shape == packed_ids[0].shape
    padded.loss.backward(), packed.loss.backward()
    torch.testing.assert_close(packed.loss, padded.loss)
    torch.testing.assert_close(heads[1].grad, heads[0].grad, rtol=1e-5, atol=1e-7)


COMPILED = [{"one_pass": True}, {"importance_sampling_level": "sequence"}, {"loss_type": "vespo", "inplace": True}]


@pytest.mark.parametrize("options", COMPILED, ids=str)
def test_compiled_whole_gives_the_same(options: dict[str, Any]) -> None:
    """fullgraph: no graph break; a second number of rows and of sequences is another run of the same function."""

    def loss(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor, offsets: Tensor, mask: Tensor) -> Tensor:
        return gk.fused_grpo_loss(hidden @ weight, ids, advantages, cu_seqlens=offsets, completion_mask=mask, **options).loss

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for lengths in ((3, 0, 2), (4, 1, 0, 6)):
        g = torch.Generator().manual_seed(len(lengths))
        rows = sum(lengths) + 1
        hidden, weight = torch.randn(rows, 8, generator=g), torch.randn(8, 11, generator=g).requires_grad_()
        offsets = torch.tensor((0, *lengths)).cumsum(0).int()
        arguments = (torch.randint(11, (rows,), generator=g), torch.randn(len(lengths), generator=g), offsets, torch.arange(rows) % 4 != 1)
        results = [(y, torch.autograd.grad(y, weight)[0]) for y in (f(hidden, weight, *arguments) for f in (loss, compiled))]
        torch.testing.assert_close(results[0], results[1])
