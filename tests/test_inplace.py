"""Who may still read the logits: by default everybody, as often as they like; in place nobody, and who tries gets an error, not a number.

`inplace` alone writes in the backward, with `one_pass` already in the forward.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import grpo_kernels as gk
from cases import same_bits
from modes import FLAGS, OPTIONS, gradient, loss_and_leaf, small_batch

INPLACE = {name: flags for name, flags in FLAGS.items() if "inplace" in name}
OF_SEQUENCES = {"importance_sampling_level": "sequence"}
on_the_cpu = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="about memory of the CPU")


@pytest.fixture(params=FLAGS)
def flags(request: pytest.FixtureRequest) -> dict[str, bool]:
    return FLAGS[request.param]


@pytest.fixture(params=INPLACE)
def inplace_flags(request: pytest.FixtureRequest) -> dict[str, bool]:
    return INPLACE[request.param]


def loss_of(z: torch.Tensor, backend: str, **flags) -> torch.Tensor:
    return gk.fused_grpo_loss(**{**small_batch(), "logits": z}, **OPTIONS, **flags, backend=backend).loss


# --- where the gradient lies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("one_pass", [False, True])
def test_logits_keep_every_bit_by_default(backend, one_pass, dtype):
    z = small_batch(dtype)["logits"].requires_grad_().clone()
    before, version = z.detach().clone(), z._version
    (3 * loss_of(z, backend, one_pass=one_pass)).backward()
    gk.token_logprobs_and_entropy(z, small_batch()["completion_ids"], backend=backend).entropy.sum().backward()
    assert same_bits(z.detach(), before) and z._version == version


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_in_place_the_storage_of_the_logits_is_their_gradient(backend, inplace_flags, dtype):
    inputs = small_batch(dtype, spare=True)
    leaf = inputs["logits"].clone().requires_grad_()
    received = []
    leaf.register_hook(received.append)
    z = leaf.clone()
    address, version = z.data_ptr(), z._version
    loss = gk.fused_grpo_loss(**{**inputs, "logits": z}, **OPTIONS, **inplace_flags, backend=backend).loss
    assert (z._version > version) == ("one_pass" in inplace_flags)
    loss.backward()
    assert received[0].data_ptr() == address and z.data_ptr() == address
    assert z._version > version
    assert same_bits(z.detach(), leaf.grad)
    one_pass = inplace_flags.get("one_pass", False)
    assert same_bits(leaf.grad, gradient(inputs, **OPTIONS, one_pass=one_pass, backend=backend))


def test_in_place_backward_of_token_logprobs(backend):
    inputs = small_batch()
    leaf = inputs["logits"].requires_grad_()
    z, ids, mask = leaf.clone(), inputs["completion_ids"], inputs["completion_mask"]
    weights = torch.randn(2, 3)
    (gk.token_logprobs(z, ids, mask=mask, inplace_backward=True, backend=backend) * weights).sum().backward()
    in_place, leaf.grad = leaf.grad, None
    assert same_bits(z.detach(), in_place)
    (gk.token_logprobs(leaf, ids, mask=mask, backend=backend) * weights).sum().backward()
    assert same_bits(in_place, leaf.grad)


# --- what cannot be written over --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, :3], lambda x: x.view(2, -1, 11)], ids=["leaf", "slice", "view"])
def test_a_leaf_and_its_views_are_refused_and_keep_their_values(backend, inplace_flags, view):
    """A parameter in place of which its gradient stands is lost, whichever name it went by."""
    leaf = small_batch(spare=True)["logits"].requires_grad_()
    before = leaf.detach().clone()
    with pytest.raises(RuntimeError, match="leaf"):
        loss_of(view(leaf), backend, **inplace_flags)
    with pytest.raises(RuntimeError, match="inplace_backward: .*leaf"):
        gk.token_logprobs(view(leaf)[:, :3], small_batch()["completion_ids"], inplace_backward=True, backend=backend)
    assert same_bits(leaf.detach(), before)


@pytest.mark.parametrize(
    "overlapping",
    [lambda x: x[:1].expand(2, 3, 11), lambda x: x[:, :1].expand(2, 3, 11), lambda x: x.as_strided((2, 3, 11), (33, 5, 1))],
    ids=["batch", "time", "sliding windows"],
)
def test_logits_that_overlap_themselves_are_refused(backend, inplace_flags, overlapping):
    z = small_batch()["logits"].requires_grad_().clone()
    with pytest.raises(ValueError, match="overlap"):
        loss_of(overlapping(z), backend, **inplace_flags)
    loss_of(overlapping(z), backend).backward()  # and taken by default


VIEWS = {  # what a model hands over, and the (2, 3, 11) logits in it
    "spare position sliced off": ((2, 4, 11), lambda full: full[:, :-1]),
    "prompt sliced off": ((2, 5, 11), lambda full: full[:, 2:]),
    "padded vocabulary": ((2, 3, 16), lambda full: full[..., :11]),
    "time first": ((3, 2, 11), lambda full: full.transpose(0, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_in_place_on_a_view_gives_the_base_its_gradient(backend, flags, view):
    shape, pick = VIEWS[view]
    leaf = torch.full(shape, 1e4).requires_grad_()
    with torch.no_grad():
        pick(leaf).copy_(small_batch()["logits"])
    base = leaf * 1
    loss_of(pick(base), backend, **flags).backward()
    expected = torch.zeros(shape)
    pick(expected).copy_(gradient(small_batch(), **OPTIONS, backend=backend))
    torch.testing.assert_close(leaf.grad, expected)
    outside = torch.ones(shape, dtype=torch.bool)
    pick(outside).fill_(False)
    assert same_bits(leaf.grad[outside], expected[outside])
    if "inplace" not in flags:
        assert same_bits(base.detach(), leaf.detach())


def test_a_leaf_that_is_a_view_of_a_tensor_without_grad_is_refused(backend, inplace_flags):
    z = torch.randn(4, 3, 11)[1:3].requires_grad_()
    before = z.detach().clone()
    assert z.is_leaf and z._is_view()
    with pytest.raises(RuntimeError, match="inplace: the logits are a leaf that requires grad"):
        loss_of(z, backend, **inplace_flags).backward()
    assert same_bits(z.detach(), before)


@on_the_cpu
def test_a_row_of_zeros_ends_where_the_row_ends_at_any_address(backend):
    """A buffer may start between two elements, where no element is ever aligned; in a child, since a fault of this kind kills it."""
    program = """
        import sys, torch, grpo_kernels as gk
        rows, vocab = 2, 20000
        z = torch.frombuffer(bytearray(2 * rows * vocab + 64), dtype=torch.bfloat16, count=rows * vocab, offset=1).view(1, rows, vocab)
        z.add_(torch.zeros(1, dtype=torch.bfloat16, requires_grad=True))
        loss = gk.fused_grpo_loss(z, torch.tensor([[1, 2]]), torch.tensor([[1.0, 0.0]]), inplace=True, backend=sys.argv[1]).loss
        loss.backward()
        assert (z[0, 1] == 0).all() and (z[0, 0] != 0).all()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(program), backend]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if backend == "cuda_on_host":  # a GPU reads no such element; nor has torch a tensor there whose elements are not aligned
        assert "a misaligned access" in child.stderr or "misaligned address" in child.stderr  # the machine's word, or UBSan's
    else:
        assert child.returncode == 0, child.stderr


def test_without_grad_the_flags_leave_the_logits_alone(backend, inplace_flags):
    inputs = small_batch()
    needs, before = inputs["logits"].clone().requires_grad_(), inputs["logits"].clone()
    with torch.no_grad():
        for z in (needs.clone(), needs, needs[:, :3]):
            assert not loss_of(z, backend, **inplace_flags).requires_grad
    assert not loss_of(inputs["logits"], backend, **inplace_flags).requires_grad  # grad mode, but nothing to differentiate
    assert same_bits(inputs["logits"], before) and same_bits(needs.detach(), before)


# --- other readers ----------------------------------------------------------------------------------------------------------------------

READERS = {"that saves the logits": lambda z: z.pow(3).sum(), "that saves its result": lambda z: z.softmax(-1).pow(2).sum()}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("order", ["reads before", "reads after"])
@pytest.mark.parametrize("added", ["first", "last"])
def test_another_reader_of_the_logits_is_right_or_raises(backend, flags, reader, order, added):
    """Both losses on hidden states @ head, as users had them when an overwritten tensor gave wrong gradients without an error."""
    hidden, head = torch.randn(2, 3, 8), torch.randn(8, 11)

    def total(flags: dict[str, bool]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [x.clone().requires_grad_() for x in (hidden, head)]
        z = leaves[0] @ leaves[1]
        terms = [lambda: loss_of(z, backend, **flags), lambda: READERS[reader](z)]
        values = [term() for term in (terms[::-1] if order == "reads before" else terms)]
        return (sum(values) if added == "first" else values[1] + values[0]), leaves

    expected, expected_leaves = total({})
    expected.backward()
    may_raise = "inplace" in flags
    must_raise = flags == FLAGS["one_pass+inplace"] and (order == "reads after" or reader == "that saves the logits")
    try:
        loss, leaves = total(flags)
        loss.backward()
    except RuntimeError as error:
        assert may_raise, error
        assert "modified by an inplace operation" in str(error) or "turned them into their gradient" in str(error)
    else:
        assert not must_raise
        for leaf, want in zip(leaves, expected_leaves):
            torch.testing.assert_close(leaf.grad, want.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [torch.softmax, torch.log_softmax], ids=["softmax", "log_softmax"])
def test_logits_that_an_earlier_operation_saved_are_right_or_raise(backend, flags, make):
    leaf = small_batch()["logits"].requires_grad_()
    z = make(leaf, -1)  # saves its result, which is the logits
    loss = loss_of(z, backend, **flags)
    if "inplace" in flags:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
        dlogits = gradient({**small_batch(), "logits": z.detach()}, **OPTIONS, backend=backend)
        (expected,) = torch.autograd.grad(make(leaf, -1), leaf, dlogits)
        torch.testing.assert_close(leaf.grad, expected)


def test_in_place_at_sequence_level_is_the_gradient_of_two_sweeps(backend):
    leaf = small_batch()["logits"].requires_grad_()
    z = leaf.clone()
    loss_of(z, backend, inplace=True, **OF_SEQUENCES).backward()
    assert same_bits(z.detach(), leaf.grad)
    assert same_bits(leaf.grad, gradient(small_batch(), **OPTIONS, **OF_SEQUENCES, backend=backend))


def test_two_losses_in_place_on_the_same_logits_raise(backend, inplace_flags):
    z = small_batch()["logits"].requires_grad_().clone()
    with pytest.raises(RuntimeError):
        (loss_of(z, backend, **inplace_flags) + loss_of(z, backend, **inplace_flags)).backward()


# --- a second backward ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, OF_SEQUENCES, {"loss_type": "vespo"}], ids=str)
def test_any_number_of_backwards_gives_the_same_bits(backend, options):
    loss, leaf = loss_and_leaf(small_batch(), **OPTIONS, **options, backend=backend)
    gradients = []
    for _ in range(3):
        leaf.grad = None
        loss.backward(retain_graph=True)
        gradients.append(leaf.grad)
    assert same_bits(gradients[0], gradients[1]) and same_bits(gradients[0], gradients[2])


@pytest.mark.parametrize(
    "flags", [FLAGS["one_pass"], FLAGS["inplace"], FLAGS["one_pass+inplace"], {**FLAGS["inplace"], **OF_SEQUENCES}], ids="-".join
)
def test_a_handed_over_gradient_is_not_handed_over_twice(backend, flags):
    loss, leaf = loss_and_leaf(small_batch(), **OPTIONS, **flags, backend=backend)
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    with pytest.raises(RuntimeError):
        loss.backward()
    assert same_bits(leaf.grad, first)


def test_gradients_of_two_calls_add_up(backend, flags):
    """One pass hands a tensor over that autograd may keep as `.grad`: the next call must not write into it."""
    leaf = small_batch()["logits"].requires_grad_()
    once = gradient(small_batch(), **OPTIONS, **flags, backend=backend)
    for _ in range(2):
        loss_of(leaf.clone(), backend, **flags).backward()
    torch.testing.assert_close(leaf.grad, 2 * once)
    if "inplace" not in flags:
        direct = small_batch()["logits"].requires_grad_()
        for _ in range(2):
            loss_of(direct, backend, **flags).backward()
        torch.testing.assert_close(direct.grad, 2 * once)


def test_logits_that_keep_their_gradient_get_it_in_place_too(backend: str) -> None:
    hidden = torch.randn(2, 3, 5, requires_grad=True)
    ids, advantages = torch.zeros(2, 3, dtype=torch.long), torch.tensor([1.0, -0.5])
    gradients = []
    for flags in ({}, {"one_pass": True, "inplace": True}):
        logits = hidden * 1.0
        logits.retain_grad()
        gk.fused_grpo_loss(logits, ids, advantages, backend=backend, **flags).loss.backward()
        gradients.append(logits.grad.clone())
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0
