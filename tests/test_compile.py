"""torch.compile sees one graph, whatever the mode and the options, for every length and every value of a hyper-parameter; the operators
hold what they promise to torch.library; and shapes can be had without data. A graph holds a backend by name alone, so where the graph is
what varies one backend is enough: the best."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import grpo_kernels as gk
from cases import same_bits
from grpo_kernels.options import ObjectiveParams
from modes import FLAGS, OPTIONS, gradient, loss_and_leaf, small_batch, without_logits


@pytest.fixture(params=FLAGS)
def flags(request: pytest.FixtureRequest) -> dict[str, bool]:
    return FLAGS[request.param]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend: str = "aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def head_and_loss(hidden: torch.Tensor, head: torch.Tensor, inputs: dict, options: dict) -> gk.GRPOLossOutput:
    return gk.fused_grpo_loss(hidden @ head, **inputs, **options)


def assert_as_eager(inputs: dict, options: dict, function=None) -> None:
    """All outputs and the gradients of hidden states and head, compiled and not."""
    function = function or compiled(head_and_loss)
    rows = inputs["completion_ids"].shape
    hidden, head = torch.randn(*rows, 8), torch.randn(8, 11)
    results = []
    for call in (head_and_loss, function):
        leaves = [x.clone().requires_grad_() for x in (hidden, head)]
        out = call(*leaves, inputs, options)
        (3 * out.loss).backward()
        results.append([*out, *(x.grad for x in leaves)])
        assert out.loss.requires_grad and not any(x.requires_grad for x in out[1:])
    for eager, compiled_ in zip(*results):
        # relative to the largest: a one pass that is compiled in place takes two sweeps, and a sum of large terms rounds otherwise
        torch.testing.assert_close(compiled_, eager, rtol=1e-5, atol=1e-6 * float(eager.detach().abs().max()) if eager.numel() else 0.0)


def without(name: str, inputs: dict) -> dict:
    return {key: x for key, x in inputs.items() if key != name}


BATCH = without("logits", small_batch())


def longer(length: int) -> dict:
    """The same batch, repeated in time."""
    return {name: x if x.dim() == 1 else x.repeat(1, length // 3) for name, x in BATCH.items()}


# --- one graph --------------------------------------------------------------------------------------------------------------------------


def test_compiled_loss_is_the_eager_one_at_every_length(backend, flags):
    function = compiled(head_and_loss)
    for length in (3, 6):
        assert_as_eager(longer(length), {**OPTIONS, **flags, "backend": backend}, function)


CASES: dict[str, tuple[dict, dict]] = {
    "on-policy": (without("old_logps", without("ref_logps", BATCH)), {}),
    "no mask": (without("completion_mask", BATCH), OPTIONS),
    "caps": (BATCH, {"delta": 1.3, "dual_clip": 1.2, "epsilon_high": 0.4, "max_log_ratio": 20.0}),
    "tensor temperature": (BATCH, {"temperature": torch.tensor([0.5, 2.0])}),
    "weights": (BATCH, {"importance_weights": torch.rand(2, 1), "policy_weights": torch.rand(2, 3), **OPTIONS}),
    "token_weights": (BATCH, {"token_weights": torch.rand(2, 3), **OPTIONS}),
    "entropy by tokens": (BATCH, {"entropy_coef": 0.1, "entropy_aggregation": "token_mean"}),
    "counts": (BATCH, {"loss_type": "dapo", "num_items_in_batch": torch.tensor(40), "num_processes": 2, "loss_scale": 0.5}),
    "dr_grpo": (BATCH, {"loss_type": "dr_grpo", "max_completion_length": 9, "num_sequences": 8}),
    "luspo": (BATCH, {"loss_type": "luspo", "importance_sampling_level": "sequence", **OPTIONS}),
    "cispo": (BATCH, {"loss_type": "cispo", "epsilon_high": 2.0, **OPTIONS}),
    "sapo": (BATCH, {"loss_type": "sapo", **OPTIONS}),
    "vespo": (BATCH, {"loss_type": "vespo", "importance_weights": torch.rand(2), **OPTIONS}),
    "reinforce": (BATCH, {"loss_type": "reinforce", "kl_estimator": "k2", **OPTIONS}),
    "sequence": (BATCH, {"importance_sampling_level": "sequence", "kl_bias_correction": True, **OPTIONS}),
    "sequence_token": (BATCH, {"importance_sampling_level": "sequence_token", "kl_estimator": "abs", **OPTIONS}),
}


@pytest.mark.parametrize("case", CASES)
def test_options_that_change_the_graph_compile_whole(case):
    assert_as_eager(*CASES[case])


def test_packed_rows_compile_whole():
    def loss(z: torch.Tensor, ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        ids, mask = gk.packed_targets(ids, cu_seqlens)
        advantages = torch.tensor([1.0, -2.0])
        return gk.fused_grpo_loss(z, ids, advantages, completion_mask=mask, cu_seqlens=cu_seqlens).loss

    function = compiled(loss)
    for lengths in ([0, 4, 7], [0, 3, 10]):
        leaf, ids = torch.randn(lengths[-1] + 1, 11, requires_grad=True), torch.randint(11, (lengths[-1] + 1,))
        gradients = []
        for call in (loss, function):
            leaf.grad = None
            call(leaf, ids, torch.tensor(lengths, dtype=torch.int32)).backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)


def test_the_other_functions_compile_whole(backend):
    def everything(z: torch.Tensor, rewards: torch.Tensor, inputs: dict) -> dict:
        scored = gk.token_logprobs_and_entropy(z, inputs["completion_ids"], mask=inputs["completion_mask"], backend=backend)
        advantages = gk.group_advantages(rewards, 2, backend=backend)
        out = gk.grpo_loss(
            scored.logps, advantages, entropy=scored.entropy, **without("advantages", without_logits(inputs)), **OPTIONS, backend=backend
        )
        return {"loss": out.loss, **gk.grpo_metrics(out, inputs["completion_mask"])}

    leaf, rewards = small_batch()["logits"].requires_grad_(), torch.tensor([1.0, 0.0])
    results = []
    for call in (everything, compiled(everything)):
        leaf.grad = None
        values = call(leaf, rewards, BATCH)
        values["loss"].backward()
        results.append([*values.values(), leaf.grad])
    for eager, compiled_ in zip(*results):
        # relative to the largest: a one pass that is compiled in place takes two sweeps, and a sum of large terms rounds otherwise
        torch.testing.assert_close(compiled_, eager, rtol=1e-5, atol=1e-6 * float(eager.detach().abs().max()) if eager.numel() else 0.0)


def test_no_new_graph_for_a_new_length_or_value(flags):
    """The compiler specialises on the first call and generalises on the second; a trainer that anneals options must not wait each step."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(head_and_loss, fullgraph=True, backend=counter)
    graphs = []
    for step, length in enumerate((3, 6, 15, 33, 48, 99)):
        options = {
            "temperature": 1 + step / 7,
            "epsilon": 0.2 + step / 100,
            "epsilon_high": 0.3 + step / 100,
            "beta": 0.1 + step / 50,
            "entropy_coef": 0.01 + step / 1000,
            "loss_scale": 1 / (1 + step),
            "loss_type": "dapo",
            "num_items_in_batch": 100 + step,
        }
        assert_as_eager(longer(length), {**options, **flags}, function)
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[1] <= 3, graphs


@pytest.mark.serial
def test_the_default_compiler_gives_the_same(flags):
    assert_as_eager(BATCH, {**OPTIONS, **flags, "backend": "cpu"}, compiled(head_and_loss, "inductor"))


# --- what an eager call promises holds compiled -----------------------------------------------------------------------------------------


def test_logits_from_outside_the_graph(backend, flags):
    """The model is not compiled, the loss is: the logits keep every bit by default, and hold their gradient in place."""
    inputs = small_batch()
    leaf = inputs["logits"].clone().requires_grad_()
    z = leaf.clone()
    compiled(lambda z, inputs: gk.fused_grpo_loss(z, **inputs, **OPTIONS, **flags, backend=backend).loss)(z, BATCH).backward()
    torch.testing.assert_close(leaf.grad, gradient(inputs, **OPTIONS, backend=backend))
    if "inplace" in flags:
        assert same_bits(z.detach(), leaf.grad)  # the compiler may keep a copy beside
    else:
        assert same_bits(z.detach(), inputs["logits"])


def test_compiled_in_place_refuses_leaves_and_their_views(backend):
    leaf = small_batch()["logits"].requires_grad_()
    before = leaf.detach().clone()
    for view in (lambda x: x, lambda x: x[:, :3], lambda x: x.view(2, 3, 11)):
        with pytest.raises(RuntimeError):
            compiled(lambda z, view=view: gk.fused_grpo_loss(view(z), **BATCH, inplace=True, backend=backend).loss)(leaf).backward()
        torch._dynamo.reset()
    assert same_bits(leaf.detach(), before)


def test_a_second_compiled_backward_is_right_or_raises(backend, flags):
    function = compiled(head_and_loss)
    hidden, head = torch.randn(2, 3, 8), torch.randn(8, 11, requires_grad=True)
    loss = 3 * function(hidden, head, BATCH, {**flags, "backend": backend}).loss
    loss.backward(retain_graph=True)
    first, head.grad = head.grad, None
    try:
        loss.backward()
    except RuntimeError:
        assert flags
    else:
        torch.testing.assert_close(head.grad, first)


def test_values_are_checked_when_the_graph_runs(backend):
    function = compiled(lambda z, inputs, options: gk.fused_grpo_loss(z, **inputs, **options, backend=backend).loss)
    with pytest.raises(IndexError, match="token id"):
        function(small_batch()["logits"], {**BATCH, "completion_ids": BATCH["completion_ids"] + 50}, {})
    with pytest.raises(ValueError, match="temperature"):
        function(small_batch()["logits"], BATCH, {"temperature": torch.tensor([1.0, -1.0])})
    with pytest.raises(Exception, match="epsilon: expected a finite number >= 0, got -1"):
        function(small_batch()["logits"], BATCH, {"epsilon": -1.0})


# --- operators --------------------------------------------------------------------------------------------------------------------------


def operator_arguments(dtype: torch.dtype = torch.float32) -> dict[str, tuple]:
    """Arguments of every operator but the backend; `x?` stands for the optional x."""
    inputs = small_batch(dtype)
    z, ids = inputs["logits"], inputs["completion_ids"]
    active, ones = inputs["completion_mask"].to(torch.uint8), torch.ones(2, 3)
    params = ObjectiveParams(beta=0.1, entropy_coef=0.05).for_kernels()
    rows = (ids, active, ones)
    tokens = (torch.randn(2, 3), inputs["old_logps"], inputs["ref_logps"], ones, ones, ones)

    def out(count: int) -> list[torch.Tensor]:
        return [torch.zeros(2, 3) for _ in range(count)]

    metrics = (*out(1), torch.zeros(2, 3, dtype=torch.int8))
    stats = (z.float().amax(-1), ones, ones, torch.randn(2, 3), torch.randn(2, 3))
    head = (torch.randn(2, 3, 8).to(dtype), torch.randn(11, 8).to(dtype), torch.randn(11).to(dtype), *rows)
    head_options = (0.5, 4.0, 4, dtype, dtype)
    gradients = (torch.zeros(2, 3, 8, dtype=dtype), [torch.zeros(7, 8), torch.zeros(4, 8)], torch.zeros(11))
    return {
        "logprobs_forward": (z, *rows, *out(4)),
        "objective": (inputs["old_logps"], ones, *tokens, active, params, *out(3), *metrics),
        "logprobs_backward": (z, *rows, *stats, torch.zeros_like(z)),
        "logprobs_backward_": (z, *rows, *stats),
        "loss_and_grad": (z, *rows, *tokens, params, *out(4), *metrics, torch.zeros_like(z)),
        "loss_and_grad_": (z, *rows, *tokens, params, *out(4), *metrics),
        "linear_logprobs": (*head, *head_options, *out(2)),
        "linear_logprobs_backward": (*head, *head_options, *stats[-2:], ones, *gradients),
        "linear_loss_and_grad": (*head, *tokens, params, *head_options, *out(4), *metrics, *gradients),
        "scale_": (z, torch.tensor(3.0)),
        "group_advantages": (torch.randn(6).double(), None, torch.tensor([0, 3, 6]), "group", "mean", 1, 1e-4, None, torch.zeros(6)),
    }


def argument_names(name: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.grpo_kernels, name).default._schema.arguments][1:]


@pytest.mark.parametrize("name", operator_arguments())
@pytest.mark.parametrize("optional", ["given", "None"])
def test_operators_hold_what_they_promise(backend, name, optional):
    """Schema (what is mutated, what aliases), fake, autograd registration, ahead-of-time dispatch with dynamic shapes."""
    op = getattr(torch.ops.grpo_kernels, name).default
    arguments = list(copy.deepcopy(operator_arguments()[name]))
    if optional == "None":
        kinds = [argument.type.kind() for argument in op._schema.arguments][1:]
        arguments = [None if kind == "OptionalType" else x for x, kind in zip(arguments, kinds)]
        if name == "objective":
            assert arguments[argument_names(name).index("entropy")] is None
    opcheck(op, (backend, *arguments))


def test_every_operator_is_checked():
    defined = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("grpo_kernels::")}
    assert defined == {*operator_arguments(), "sequence_index"}
    opcheck(torch.ops.grpo_kernels.sequence_index.default, (torch.tensor([0, 2, 5]), 6))


# --- shapes without data ----------------------------------------------------------------------------------------------------------------


def test_meta_tensors_give_shapes(flags):
    inputs = {name: x.to("meta") for name, x in small_batch().items()}
    loss, leaf = loss_and_leaf(inputs, **OPTIONS, **flags)
    loss.backward()
    assert loss.device.type == "meta" and leaf.grad.shape == (2, 3, 11)
    out = gk.fused_grpo_loss(**inputs)
    assert all(x.shape == (2, 3) for x in out[2:]) and out.clipped.dtype == torch.int8


def test_fake_tensors_give_shapes(flags):
    with FakeTensorMode() as mode:
        inputs = {name: mode.from_tensor(x) for name, x in small_batch(torch.bfloat16).items()}
        loss, leaf = loss_and_leaf(inputs, **OPTIONS, **flags)
        loss.backward()
    assert loss.dtype == torch.float32 and leaf.grad.shape == (2, 3, 11) and leaf.grad.dtype == torch.bfloat16
