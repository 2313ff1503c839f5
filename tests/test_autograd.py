"""What autograd is promised: right gradients for any upstream gradient, joined to the graph even where there is nothing to learn, and an
error instead of an incomplete second derivative."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import grpo_kernels as gk
from cases import same_bits
from modes import FLAGS, OPTIONS, gradient, loss_and_leaf, small_batch, without_logits
from oracle import grpo


@pytest.fixture(params=FLAGS)
def flags(request: pytest.FixtureRequest) -> dict[str, bool]:
    return FLAGS[request.param]


# --- derivatives ------------------------------------------------------------------------------------------------------------------------


def float64_batch() -> dict:
    """No ratio near an edge of the clip range or of the caps that are tested: gradcheck steps by 1e-6."""
    inputs = small_batch()
    return {**inputs, "logits": inputs["logits"].double(), "completion_mask": None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delta": 1.4},
        {"dual_clip": 1.3},
        {"beta": 0.3, "entropy_coef": 0.2},
        {"entropy_coef": 0.2, "entropy_aggregation": "token_mean", "loss_type": "dapo", "epsilon": 0.05, "epsilon_high": 0.3},
        {"loss_type": "dr_grpo", "max_completion_length": 7, "loss_scale": 3.0, "beta": 0.3},
        {"temperature": torch.tensor([0.7, 1.9]), "epsilon": 0.001, "beta": 0.3},
        {"temperature": torch.linspace(0.5, 2, 6).view(2, 3), "entropy_coef": 0.2},
        {"importance_weights": torch.tensor([[0.5], [2.0]]), "policy_weights": torch.tensor([3.0, 0.0]), "beta": 0.3},
        {"loss_type": "sapo", "beta": 0.3, "kl_estimator": "k1"},
        {"loss_type": "reinforce", "beta": 0.3, "kl_estimator": "k2"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "entropy_coef": 0.2},
        {"importance_sampling_level": "sequence", "beta": 0.3, "kl_estimator": "k2", "policy_weights": torch.tensor([3.0, 0.5])},
        {"token_weights": torch.linspace(0, 1, 6).view(2, 3), "completion_mask": torch.tensor([[1, 0, 1], [0, 1, 1]])},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_float64_gradient_of_the_loss_is_the_derivative(options):
    inputs = {**float64_batch(), **options}
    logits = inputs.pop("logits").requires_grad_()
    assert torch.autograd.gradcheck(lambda z: gk.fused_grpo_loss(z, **inputs, backend="torch").loss, logits)


def test_float64_gradients_of_logps_and_entropy_are_the_derivatives():
    inputs = float64_batch()
    logits, ids = inputs["logits"].requires_grad_(), inputs["completion_ids"]
    mask, temperature = torch.tensor([[1, 0, 1], [0, 1, 1]]), torch.linspace(0.5, 2, 6).view(2, 3)
    scored = lambda z: gk.token_logprobs_and_entropy(z, ids, mask=mask, temperature=temperature)  # noqa: E731
    assert torch.autograd.gradcheck(scored, logits)
    assert torch.autograd.gradcheck(lambda z: gk.token_logprobs(z, ids, mask=mask), logits)


@pytest.mark.parametrize("options", [{}, {"delta": 1.4, "beta": 0.3}, {"dual_clip": 1.3, "entropy_coef": 0.2}])
def test_float64_gradient_of_the_loss_from_logps_is_the_derivative(options):
    inputs = float64_batch()
    scored = gk.token_logprobs_and_entropy(inputs["logits"], inputs["completion_ids"])
    scored = tuple(x.requires_grad_() for x in scored)
    assert torch.autograd.gradcheck(lambda x, y: gk.grpo_loss(x, entropy=y, **without_logits(inputs), **options).loss, scored)


def test_on_policy_loss_is_zero_and_its_gradient_is_not(backend):
    """Asked again and again as "the loss is always 0"."""
    logps = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    for old_logps in (None, logps.detach()):
        logps.grad = None
        out = gk.grpo_loss(logps, torch.tensor([1.0, -1.0]), old_logps=old_logps, backend=backend)
        out.loss.backward()
        assert out.loss == 0
        assert torch.equal(logps.grad, torch.tensor([[-0.25, -0.25], [0.25, 0.25]]))  # -A / N


# --- upstream gradients -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upstream", [-3.0, 0.0, torch.tensor(0.5), torch.tensor(2.0, dtype=torch.float64)], ids=str)
def test_upstream_gradient_multiplies_in_every_mode(backend, flags, upstream):
    inputs = small_batch()
    loss, leaf = loss_and_leaf(inputs, **OPTIONS, **flags, backend=backend)
    (loss * upstream).backward()
    expected = grpo(**inputs, **OPTIONS).dlogits * float(upstream)
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=2e-5, atol=2e-6)


def test_float16_gradients_under_a_gradscaler_are_scaled_and_finite(backend):
    inputs = small_batch(torch.float16)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=65536.0)
    for flags in (FLAGS["default"], FLAGS["inplace"]):  # one_pass stores the gradient before it is scaled: documented
        loss, leaf = loss_and_leaf({**inputs, "advantages": inputs["advantages"] * 1e-3}, **flags, backend=backend)
        scaler.scale(loss).backward()
        expected = grpo(**{**inputs, "advantages": inputs["advantages"] * 1e-3}).dlogits * 65536
        assert leaf.grad.dtype == torch.float16 and leaf.grad.isfinite().all()
        torch.testing.assert_close(leaf.grad.double(), expected, rtol=1e-3, atol=1e-4)
    loss, leaf = loss_and_leaf(inputs, one_pass=True, loss_scale=65536.0 * 1e-3, backend=backend)
    loss.backward()
    torch.testing.assert_close(leaf.grad.double(), grpo(**inputs).dlogits * 65.536, rtol=1e-3, atol=1e-4)


def test_expanded_and_transposed_upstream_gradients(backend, flags):
    inputs = small_batch()
    loss, leaf = loss_and_leaf(inputs, **flags, backend=backend)
    loss.expand(4).sum().backward()
    torch.testing.assert_close(leaf.grad, 4 * gradient(inputs, backend=backend))

    ids, leaf = inputs["completion_ids"], inputs["logits"].clone().requires_grad_()
    weights = torch.randn(3, 2).t()
    inplace = flags.get("inplace", False)
    gradients = []
    for upstream in (torch.ones(()).expand(2, 3), torch.ones(2, 3), weights, weights.contiguous()):
        leaf.grad = None
        logps = gk.token_logprobs(leaf.clone(), ids, inplace_backward=inplace, backend=backend)
        logps.backward(upstream)
        gradients.append(leaf.grad)
    assert same_bits(gradients[0], gradients[1]) and same_bits(gradients[2], gradients[3])
    leaf.grad = None
    gk.token_logprobs(leaf.clone(), ids, inplace_backward=inplace, backend=backend).sum().backward()
    assert same_bits(leaf.grad, gradients[0])


def test_only_logps_only_entropy_or_both_may_be_used(backend):
    inputs = small_batch()

    def of(pick):
        leaf = inputs["logits"].clone().requires_grad_()
        pick(gk.token_logprobs_and_entropy(leaf, inputs["completion_ids"], mask=inputs["completion_mask"], backend=backend)).backward()
        return leaf.grad

    logps, entropy = of(lambda out: out.logps.sum()), of(lambda out: out.entropy.sum())
    assert not torch.equal(logps, entropy)
    torch.testing.assert_close(of(lambda out: (out.logps + 2 * out.entropy).sum()), logps + 2 * entropy)


def test_losses_on_the_same_logits_add(backend):
    inputs, other = small_batch(), {"advantages": torch.tensor([0.3, 2.0]), "beta": 0.5}
    leaf = inputs["logits"].clone().requires_grad_()
    z = leaf.clone()
    first = gk.fused_grpo_loss(**{**inputs, "logits": z}, one_pass=True, backend=backend).loss
    second = gk.fused_grpo_loss(**{**inputs, **other, "logits": z}, backend=backend).loss
    (first + second).backward()
    torch.testing.assert_close(leaf.grad, gradient(inputs, backend=backend) + gradient({**inputs, **other}, backend=backend))


def test_spare_position_gets_exactly_zero_gradient(backend, flags):
    inputs = small_batch(spare=True)
    inputs["logits"][:, -1] = torch.nan
    dlogits = gradient(inputs, **OPTIONS, **flags, backend=backend)
    assert dlogits.shape == (2, 4, 11) and same_bits(dlogits[:, -1], torch.zeros(2, 11))
    torch.testing.assert_close(dlogits[:, :-1].double(), grpo(**inputs, **OPTIONS).dlogits[:, :-1], rtol=2e-5, atol=2e-6)


# --- nothing to learn -------------------------------------------------------------------------------------------------------------------

AGGREGATIONS = [{"loss_type": name} for name in ("grpo", "bnpo", "dapo")] + [{"loss_type": "dr_grpo", "max_completion_length": 3}]


@pytest.mark.parametrize("options", AGGREGATIONS, ids=lambda options: options["loss_type"])
def test_fully_masked_batch_gives_zero_loss_and_zero_gradients(backend, flags, options):
    inputs = {**small_batch(), "completion_mask": torch.zeros(2, 3)}
    for beta in (0.0, 0.04):
        leaf = inputs["logits"].clone().requires_grad_()
        out = gk.fused_grpo_loss(**{**inputs, "logits": leaf.clone()}, beta=beta, entropy_coef=0.1, **options, **flags, backend=backend)
        assert out.loss == 0 and out.loss.requires_grad
        out.loss.backward()
        assert same_bits(leaf.grad, torch.zeros_like(leaf))
        assert all(value.isfinite() for value in gk.grpo_metrics(out, inputs["completion_mask"]).values())


def test_an_empty_sequence_adds_nothing_and_counts(backend, flags):
    inputs = {**small_batch(), "completion_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}
    alone = {name: x[1:] for name, x in inputs.items()}
    loss, leaf = loss_and_leaf(inputs, **flags, backend=backend)
    loss.backward()
    expected, expected_leaf = loss_and_leaf(alone, num_sequences=2, **flags, backend=backend)
    expected.backward()
    assert torch.equal(loss, expected) and same_bits(leaf.grad[1:], expected_leaf.grad)
    assert same_bits(leaf.grad[0], torch.zeros(3, 11))


@pytest.mark.parametrize("size", [(0, 3), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("spare", [0, 1])
def test_no_rows_give_an_empty_result_and_zero_loss(backend, flags, size, spare):
    leaf = torch.randn(size[0], size[1] + spare, 11, requires_grad=True)
    zeros = torch.zeros(size)
    out = gk.fused_grpo_loss(
        leaf.clone(), zeros.long(), torch.zeros(size[0]), ref_logps=zeros, completion_mask=zeros, **OPTIONS, **flags, backend=backend
    )
    out.loss.backward()
    assert out.loss == 0 and all(x.shape == size for x in out[2:])
    assert same_bits(leaf.grad, torch.zeros_like(leaf))
    assert all(value == 0 for value in gk.grpo_metrics(out, zeros).values())
    assert gk.token_logprobs(leaf, zeros.long(), backend=backend).shape == size


# --- the graph --------------------------------------------------------------------------------------------------------------------------


def test_all_outputs_but_the_loss_are_detached_and_share_no_memory(backend, flags):
    inputs = {**small_batch(), "completion_mask": None}
    scored = gk.token_logprobs_and_entropy(inputs["logits"], inputs["completion_ids"], backend=backend)
    outs = [gk.fused_grpo_loss(**{**inputs, "logits": inputs["logits"].clone().requires_grad_().clone()}, **flags, backend=backend)]
    logps, entropy = (x.requires_grad_() for x in scored)
    outs.append(gk.grpo_loss(logps, entropy=entropy, **without_logits(inputs), backend=backend))
    given = {x.untyped_storage().data_ptr() for x in (*inputs.values(), *scored) if x is not None}
    for out in outs:
        assert out.loss.requires_grad and not any(x.requires_grad for x in out[1:])
        memory = [x.untyped_storage().data_ptr() for x in out]
        assert len(set(memory)) == len(memory) and not given & set(memory)


def test_what_is_saved_for_the_backward_is_the_logits_and_nothing_else_of_their_size(backend, flags):
    inputs = small_batch(torch.bfloat16)
    z = inputs["logits"].clone().requires_grad_().clone()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = gk.fused_grpo_loss(**{**inputs, "logits": z}, **OPTIONS, **flags, backend=backend).loss
    large = [x for x in saved if x.numel() >= 11]
    assert all(x.untyped_storage().data_ptr() == z.untyped_storage().data_ptr() for x in large)
    assert len(large) == (0 if flags.get("one_pass") else 1)  # one_pass holds the gradient instead
    loss.backward()


def test_nothing_outlives_its_last_reference(backend, flags):
    """A cycle through the graph would keep logits or gradient, 600 MB of them, until the collector comes by."""
    gc.disable()
    try:
        loss, leaf = loss_and_leaf(small_batch(), **OPTIONS, **flags, backend=backend)
        if flags.get("one_pass"):
            large = weakref.ref(loss.grad_fn.dlogits)
        else:
            nodes = [loss.grad_fn]
            while not hasattr(nodes[-1], "inplace"):
                nodes.append(nodes[-1].next_functions[0][0])
            large = weakref.ref(nodes[-1])
            del nodes
        assert large() is not None
        del loss, leaf
        assert large() is None
    finally:
        gc.enable()


SECOND_ORDER = {**FLAGS, "sequence": {"importance_sampling_level": "sequence"}, "vespo": {"loss_type": "vespo", "inplace": True}}


@pytest.mark.parametrize("rest", ["alone", "with another term"])
@pytest.mark.parametrize("case", SECOND_ORDER)
def test_second_derivative_raises(backend, case, rest):
    """torch.autograd.grad visits only what leads to its inputs: it must not find a way round the refusal."""
    inputs = small_batch()
    for through in (torch.autograd.grad, lambda y, x: y.backward()):
        loss, leaf = loss_and_leaf(inputs, **OPTIONS, **SECOND_ORDER[case], backend=backend)
        total = loss if rest == "alone" else loss + leaf.pow(3).sum()
        (dlogits,) = torch.autograd.grad(total, leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            through(dlogits.pow(2).sum(), leaf)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rest", ["alone", "with another term"])
def test_second_derivative_of_logps_entropy_and_the_loss_from_them_raises(backend, rest, level):
    inputs = small_batch()
    ids, leaf, logps = inputs["completion_ids"], inputs["logits"].requires_grad_(), inputs["ref_logps"].clone().requires_grad_()
    functions = [
        (leaf, lambda: gk.token_logprobs(leaf, ids, backend=backend).sum()),
        (leaf, lambda: gk.token_logprobs_and_entropy(leaf, ids, backend=backend).entropy.sum()),
        (logps, lambda: gk.grpo_loss(logps, **without_logits(inputs), beta=0.1, importance_sampling_level=level, backend=backend).loss),
    ]
    for x, function in functions:
        y = function() if rest == "alone" else function() + x.pow(3).sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.sum(), x)
