"""A model whose head computes the loss gives the loss, gradients and other outputs of its logits, in whatever surrounds it in training."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import grpo_kernels as gk

pytest.importorskip("transformers", reason="transformers is an extra")

from causal_models import MODELS, OPTIONS, VOCAB, B, P, T, batch, by_head, by_logits, close, gradients, loss_fn, model_of


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small to be shared
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def llama() -> Any:
    return model_of("llama")


def same(got: Any, expected: gk.GRPOLossOutput) -> None:
    for name, x in expected._asdict().items():
        torch.testing.assert_close(got[name], x, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


# --- models -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_other_outputs_are_those_of_the_logits(name: str) -> None:
    model, inputs = model_of(name), batch()
    names = list(model.state_dict())
    output, expected, wanted = by_logits(model, inputs)
    assert gk.fuse_lm_head(model) is model
    for _ in range(2):  # the first call measures what the model does to logits
        fused, got = by_head(model, inputs)
        same(fused, expected)
        close(got, wanted)
        assert isinstance(fused, type(output)) and fused.logits is None
        assert set(fused) == {*output, *expected._fields} - {"logits"}
    if "aux_loss" in output:
        torch.testing.assert_close(fused.aux_loss, output.aux_loss)
        assert all(torch.equal(x, y) for x, y in zip(fused.router_logits, output.router_logits))
    head = model.get_output_embeddings()
    scale, cap = MODELS[name][2]
    assert head.logit_scale == pytest.approx(scale, rel=1e-6) and head.logit_softcap == cap
    assert list(model.state_dict()) == names
    gk.unfuse_lm_head(model)
    assert type(model.get_output_embeddings()) is nn.Linear
    torch.testing.assert_close(by_logits(model, inputs)[1].loss, expected.loss)


@pytest.mark.parametrize(
    "options",
    [
        {"importance_sampling_level": "sequence", "chunk_size": 4},
        {"importance_sampling_level": "sequence", "chunk_size": 1},  # no sequence fits: two sweeps
        {"loss_type": "vespo"},
        {"loss_type": "dapo", "num_items_in_batch": 100, "loss_scale": 0.5, "chunk_size": 2},
    ],
    ids=str,
)
def test_options_of_the_loss_reach_it(llama: Any, options: dict[str, Any]) -> None:
    inputs = batch()
    _, expected, wanted = by_logits(llama, inputs, **{name: x for name, x in options.items() if name != "chunk_size"})
    fused, got = by_head(gk.fuse_lm_head(llama), inputs, **options)
    same(fused, expected)
    close(got, wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2: soft cap"])
def test_log_probs_come_with_and_without_a_gradient(name: str) -> None:
    model, inputs = model_of(name), batch()
    ids, mask = inputs["loss"]["completion_ids"], inputs["loss"]["completion_mask"]
    scored = gk.token_logprobs_and_entropy(model(**inputs["model"]).logits[:, -(T + 1) :].contiguous(), ids, mask=mask, temperature=0.8)
    (scored.logps.sum() + 2 * scored.entropy.sum()).backward()
    wanted = gradients(model)
    fn = scoring_fn(inputs)
    gk.fuse_lm_head(model)
    for _ in range(2):
        with torch.no_grad():
            out = model(**inputs["model"], lm_head_fn=fn)
        assert not out.logps.requires_grad and out.loss is None and out.logits is None
        torch.testing.assert_close((out.logps, out.entropy), tuple(scored), rtol=1e-5, atol=2e-6)
        out = model(**inputs["model"], lm_head_fn=fn)
        (out.logps.sum() + 2 * out.entropy.sum()).backward()
        close(gradients(model), wanted)


def test_packed_rows_are_scored_at_every_position(llama: Any) -> None:
    lengths, g = [5, 3], torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (1, sum(lengths)), generator=g)
    cu_seqlens = torch.tensor([0, 5, 8])
    targets, mask = gk.packed_targets(ids, cu_seqlens)
    inputs = {
        "model": {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]},
        "loss": {"completion_ids": targets, "advantages": torch.tensor([1.0, -0.5]), "completion_mask": mask, "cu_seqlens": cu_seqlens},
    }
    expected = gk.fused_grpo_loss(llama(**inputs["model"]).logits, **inputs["loss"])
    expected.loss.backward()
    wanted = gradients(llama)
    fused, got = by_head(gk.fuse_lm_head(llama), inputs, beta=0.0, temperature=1.0, entropy_coef=0.0)
    same(fused, expected)
    close(got, wanted)


def test_logits_to_keep_may_stand_beside_or_not(llama: Any) -> None:
    inputs = batch()
    gk.fuse_lm_head(llama)
    without = by_head(llama, inputs)[1]
    inputs["model"]["logits_to_keep"] = T + 1
    close(by_head(llama, inputs)[1], without)


def test_own_functions_are_given_hidden_states_and_head(llama: Any) -> None:
    """A trainer whose masks come from this forward's entropy makes loss and masks in one function."""
    inputs, seen = batch(), {}
    loss = {name: x for name, x in inputs["loss"].items() if name != "completion_ids"}

    def high_entropy_loss(hidden_states: Tensor, lm_head_weight: Tensor, **head: Any) -> gk.GRPOLossOutput:
        seen.update(shape=hidden_states.shape, **head)
        scored = gk.fused_linear_logprobs(hidden_states, lm_head_weight, inputs["loss"]["completion_ids"], **head)
        top = gk.high_entropy_mask(scored.entropy.detach(), loss["completion_mask"], top_entropy_quantile=0.5)
        return gk.grpo_loss(scored.logps, entropy=scored.entropy, policy_weights=top, **loss)

    logits = llama(**inputs["model"], logits_to_keep=T + 1).logits
    scored = gk.token_logprobs_and_entropy(logits, inputs["loss"]["completion_ids"])
    top = gk.high_entropy_mask(scored.entropy.detach(), loss["completion_mask"], top_entropy_quantile=0.5)
    expected = gk.grpo_loss(scored.logps, policy_weights=top, **loss)
    expected.loss.backward()
    wanted = gradients(llama)
    out = gk.fuse_lm_head(llama)(**inputs["model"], logits_to_keep=T + 1, lm_head_fn=high_entropy_loss)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss)
    close(gradients(llama), wanted)
    assert seen == {"shape": (B, T + 1, 16), "bias": None, "logit_scale": 1.0, "logit_softcap": None}


def test_metrics_take_the_output(llama: Any) -> None:
    inputs = batch()
    expected = gk.grpo_metrics(by_logits(llama, inputs)[1], inputs["loss"]["completion_mask"])
    got = gk.grpo_metrics(by_head(gk.fuse_lm_head(llama), inputs)[0], inputs["loss"]["completion_mask"])
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            self.numel = max(self.numel, x.numel() if isinstance(x, Tensor) else 0)
        return result


ROWS, WIDE = 8, 999  # more positions than the head is wide, and a vocabulary that no width of the body is near


@pytest.mark.parametrize("name", ["llama", "gemma2: soft cap", "granite: divides", "mixtral"])
def test_logits_are_never_made(name: str) -> None:
    """With chunks of one row the weight is the largest tensor."""
    model, inputs = gk.fuse_lm_head(model_of(name, vocab_size=WIDE)), batch(ROWS)
    for _ in range(2):
        with Largest() as largest:
            by_head(model, inputs, chunk_size=1)
        assert largest.numel == WIDE * 16 < ROWS * T * WIDE
    with Largest() as largest:
        by_logits(model, inputs)
    assert largest.numel == ROWS * (P + T) * WIDE


# --- what stays as it was ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3, tied", "granite: divides", "gpt2: tied, another body"])
def test_a_fused_model_without_lm_head_fn_is_the_model(name: str, tmp_path: Any) -> None:
    model, inputs = model_of(name).eval(), batch()["model"]
    plain = copy.deepcopy(model)
    gk.fuse_lm_head(model)
    for _ in range(2):
        labels = inputs["input_ids"]
        expected, got = plain(**inputs, labels=labels), model(**inputs, labels=labels)
        assert type(got) is type(expected) and torch.equal(got.logits, expected.logits) and torch.equal(got.loss, expected.loss)
        assert torch.equal(model(**inputs, return_dict=False)[0], expected.logits)
        written = (x.generate(**inputs, max_new_tokens=4, do_sample=False) for x in (model, plain))
        assert torch.equal(*written)
        model(**inputs, lm_head_fn=loss_fn(batch()))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [k for k, _ in model.named_parameters()] == [k for k, _ in plain.named_parameters()]
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert torch.equal(loaded(**inputs).logits, expected.logits) and loaded.config.architectures == [type(plain).__name__]


def test_a_tied_weight_is_one_parameter_with_both_gradients() -> None:
    model, inputs = model_of("qwen3, tied"), batch()
    gk.fuse_lm_head(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    by_head(model, inputs)
    model(**inputs["model"], lm_head_fn=loss_fn(inputs)).loss.backward()
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.grad is not None


def test_fusing_twice_is_fusing_once(llama: Any) -> None:
    inputs = batch()
    gk.fuse_lm_head(llama)
    by_head(llama, inputs)
    forward = llama.forward
    assert gk.fuse_lm_head(llama).forward == forward and llama.lm_head.logit_scale == 1.0
    gk.unfuse_lm_head(llama)
    assert "forward" not in vars(llama) and "logit_scale" not in vars(llama.lm_head)
    with pytest.raises(RuntimeError, match="not fused"):
        gk.unfuse_lm_head(llama)


def test_a_copy_has_its_own_weights(llama: Any) -> None:
    """A reference model is often a deep copy; a forward bound to the first model would go unseen."""
    inputs = batch()
    gk.fuse_lm_head(llama)
    twin = copy.deepcopy(llama)
    expected = by_head(llama, inputs)[0]
    with torch.no_grad():
        llama.lm_head.weight.mul_(2)
    same_loss = by_head(twin, inputs)[0].loss
    torch.testing.assert_close(same_loss, expected.loss)
    assert not torch.allclose(by_head(llama, inputs)[0].loss, expected.loss)


def test_a_pickled_model_is_fused_again(llama: Any) -> None:
    inputs = batch()
    _, expected, wanted = by_logits(llama, inputs)
    loaded = pickle.loads(pickle.dumps(gk.fuse_lm_head(llama)))
    for _ in range(2):
        fused, got = by_head(gk.fuse_lm_head(loaded), inputs)
        same(fused, expected)
        close(got, wanted)
    assert type(gk.unfuse_lm_head(loaded).lm_head) is nn.Linear and "forward" not in vars(loaded)


def test_another_patch_of_the_forward_stays_inside(llama: Any) -> None:
    calls = []
    original = type(llama).forward

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(sorted(kwargs))
        return original(self, *args, **kwargs)

    llama.forward = before = patched.__get__(llama)
    inputs = batch()
    _, expected, wanted = by_logits(llama, inputs)
    fused, got = by_head(gk.fuse_lm_head(llama), inputs)
    same(fused, expected)
    close(got, wanted)
    assert len(calls) == 2 and not any("lm_head_fn" in names for names in calls)
    twin = copy.deepcopy(llama)
    assert twin._forward_before_fusion.__self__ is twin
    gk.unfuse_lm_head(llama)
    assert llama.forward == before and "_forward_before_fusion" not in vars(llama)


def test_a_resized_vocabulary_is_scored(llama: Any) -> None:
    inputs = batch()
    by_head(gk.fuse_lm_head(llama), inputs)
    llama.resize_token_embeddings(VOCAB + 7, mean_resizing=False)
    _, expected, wanted = by_logits(llama, inputs)
    fused, got = by_head(gk.fuse_lm_head(llama), inputs)
    same(fused, expected)
    close(got, wanted)


# --- what is refused --------------------------------------------------------------------------------------------------------------------


def clamp(logits: Tensor) -> Tensor:
    return logits.clamp(-30, 30)


def mask_a_column(logits: Tensor) -> Tensor:
    logits[..., 7] = torch.finfo(logits.dtype).min
    return logits


def scale_in_place(logits: Tensor) -> Tensor:
    return logits.mul_(0.5)


AFTER = {
    "a clamp": (clamp, "does more"),
    "a masked column": (mask_a_column, "writes over them"),
    "a scale in place": (scale_in_place, "writes over them"),
    "fewer columns": (lambda x: x[..., :-2], "changes their shape"),
    "an offset": (lambda x: x + 0.1, "does more"),
    "another offset of each column": (lambda x: x + torch.linspace(-1, 1, VOCAB), "does more"),
    "other columns": (lambda x: x.flip(-1), "does more"),
    "a softmax": (lambda x: x.log_softmax(-1), "does more"),
    "a negative scale": (lambda x: -x, "does more"),
    "a cap of another form": (lambda x: 30 * x / (30 + x.abs()), "does more"),
    "half precision": (lambda x: x.half(), "does more"),
}


@pytest.mark.parametrize("name", AFTER)
def test_logits_that_become_something_else_are_refused(llama: Any, name: str) -> None:
    act, reason = AFTER[name]
    original = type(llama).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.logits = act(output.logits)
        return output

    llama.forward = forward.__get__(llama)
    gk.fuse_lm_head(llama)
    inputs = batch()
    for _ in range(2):  # nor does a second call believe the first
        with pytest.raises(TypeError, match=f"logits.*{reason}.*fused_grpo_loss"):
            llama(**inputs["model"], lm_head_fn=loss_fn(inputs))
    assert llama(**inputs["model"]).logits.shape[:2] == (B, P + T)


def test_what_cannot_be_fused_says_why(llama: Any) -> None:
    for thing in (nn.Linear(2, 2), torch.compile(llama), nn.DataParallel(llama), object()):
        with pytest.raises(TypeError, match="expected a causal language model of transformers, got .*; fuse before"):
            gk.fuse_lm_head(thing)

    class Own(nn.Linear):
        pass

    llama.lm_head = Own(16, VOCAB)
    with pytest.raises(TypeError, match="torch.nn.Linear, got Own"):
        gk.fuse_lm_head(llama)
    llama.lm_head = None
    with pytest.raises(TypeError, match="torch.nn.Linear, got NoneType"):
        gk.fuse_lm_head(llama)


def test_calls_that_make_no_sense_say_why(llama: Any) -> None:
    inputs = batch()
    gk.fuse_lm_head(llama)
    fn = loss_fn(inputs)
    with pytest.raises(ValueError, match="labels: the loss of labels needs logits"):
        llama(**inputs["model"], labels=inputs["model"]["input_ids"], lm_head_fn=fn)
    with pytest.raises(TypeError, match="logit_scale: given by the head"):
        llama(**inputs["model"], lm_head_fn=partial(fn, logit_scale=2.0))
    with pytest.raises(TypeError, match="lm_head_fn: expected a function that returns a NamedTuple of tensors, got Tensor"):
        llama(**inputs["model"], lm_head_fn=lambda hidden, weight, **head: hidden)
    llama.lm_head.forward = partial(nn.Linear.forward, llama.lm_head)  # as a hook that replaces forwards leaves it
    with pytest.raises(RuntimeError, match="did not call its output embeddings"):
        llama(**inputs["model"], lm_head_fn=fn)
    del llama.lm_head.forward
    llama.lm_head = nn.Linear(16, VOCAB, bias=False)
    with pytest.raises(TypeError, match=r"became a Linear; call fuse_lm_head\(model\) again"):
        llama(**inputs["model"], lm_head_fn=fn)


def test_an_error_inside_leaves_no_call_behind(llama: Any) -> None:
    inputs = batch()
    gk.fuse_lm_head(llama)
    logits = llama(**inputs["model"]).logits
    for _ in range(2):
        with pytest.raises(ValueError, match="advantages"):
            llama(**inputs["model"], lm_head_fn=partial(loss_fn(inputs), advantages=torch.ones(B + 1)))
        assert torch.equal(llama(**inputs["model"]).logits, logits)
        by_head(llama, inputs)


# --- the head alone ---------------------------------------------------------------------------------------------------------------------


def test_the_head_alone_is_a_linear_layer_and_the_loss() -> None:
    torch.manual_seed(0)
    head, linear = gk.GRPOHead(16, VOCAB, logit_scale=0.5, logit_softcap=2.0), nn.Linear(16, VOCAB)
    head.load_state_dict(linear.state_dict())
    hidden, inputs = torch.randn(B, T + 1, 16), batch()
    assert torch.equal(head(hidden), linear(hidden)) and isinstance(head, nn.Linear)
    logits = 2 * torch.tanh(linear(hidden) * 0.5 / 2)
    expected = gk.fused_grpo_loss(logits, **inputs["loss"], **OPTIONS)
    expected.loss.backward()
    got = head(hidden, loss_fn(inputs))
    got.loss.backward()
    assert isinstance(got, gk.GRPOLossOutput)
    same(got._asdict(), expected)
    close(gradients(head), gradients(linear))


# --- what surrounds a model in training -------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_changes_nothing(llama: Any) -> None:
    inputs = batch()
    _, expected, wanted = by_logits(llama, inputs)
    gk.fuse_lm_head(llama).train()
    for use_reentrant in (False, True):
        llama.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        llama.enable_input_require_grads()
        fused, got = by_head(llama, inputs)
        same(fused, expected)
        close(got, wanted)
    llama.gradient_checkpointing_disable()
    checkpoint(lambda ids: llama(ids, inputs["model"]["attention_mask"], lm_head_fn=loss_fn(inputs)).loss, inputs["model"]["input_ids"],
               use_reentrant=False).backward()  # fmt: skip
    close(gradients(llama), wanted)


def test_autocast_rounds_as_it_does_the_logits(llama: Any) -> None:
    """float32 weights under autocast: bfloat16 products, a float32 loss and float32 gradients."""
    inputs = batch()
    exact = by_logits(llama, inputs)[2]

    def error(got: dict[str, Tensor]) -> float:
        return max(((got[name] - x).norm() / x.norm()).item() for name, x in exact.items())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, expected, rounded = by_logits(llama, inputs)
    gk.fuse_lm_head(llama)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fused = llama(**inputs["model"], lm_head_fn=loss_fn(inputs))
        fused.loss.backward()
        got = gradients(llama)
        assert fused.loss.dtype == torch.float32 and got.keys() == exact.keys() and all(x.dtype == torch.float32 for x in got.values())
        torch.testing.assert_close(fused.logps, expected.logps, rtol=0, atol=0.05)
        assert 1e-3 < error(got) < 2 * error(rounded)


def test_a_bfloat16_model_keeps_its_loss_in_float32(llama: Any) -> None:
    inputs = batch()
    llama.bfloat16()
    output, expected, rounded = by_logits(llama, inputs)
    fused, got = by_head(gk.fuse_lm_head(llama), inputs)
    assert fused.loss.dtype == fused.logps.dtype == torch.float32 and output.logits.dtype == torch.bfloat16
    torch.testing.assert_close(fused.logps, expected.logps, rtol=0, atol=0.05)
    close(got, rounded, rtol=0.05)


@pytest.fixture
def bfloat16_accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")

    def forget() -> None:  # its state is the process's: another test's precision would be refused, or ours stay
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()

    forget()
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    forget()


def test_accelerate_makes_no_float32_copy_of_anything_large(bfloat16_accelerator: Any) -> None:
    """It casts what a forward returns to float32: of a model that returns logits, all logits."""
    llama, inputs = gk.fuse_lm_head(model_of("llama", vocab_size=WIDE)), batch(ROWS)
    exact = by_head(llama, inputs)
    prepared = bfloat16_accelerator.prepare(llama)
    with Largest() as largest:
        fused, got = by_head(prepared, inputs, chunk_size=1)
    assert largest.numel == WIDE * 16 and fused.logits is None and fused.hidden_states is None
    assert fused.loss.dtype == torch.float32
    torch.testing.assert_close(fused.loss, exact[0].loss, rtol=0.05, atol=0.02)
    close(got, exact[1], rtol=0.1)
    hidden = prepared(**inputs["model"], output_hidden_states=True, lm_head_fn=loss_fn(inputs)).hidden_states  # asked for, so given
    assert len(hidden) == 3 and hidden[-1].dtype == torch.float32
    for act in (gk.fuse_lm_head, gk.unfuse_lm_head):
        with pytest.raises(RuntimeError, match="something wrapped or replaced its forward"):
            act(llama)
    unwrapped = bfloat16_accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    torch.testing.assert_close(by_head(unwrapped, inputs)[0].loss, exact[0].loss)
    gk.unfuse_lm_head(unwrapped)
    assert type(llama.lm_head) is nn.Linear


def test_device_hooks_of_accelerate_stay_on(llama: Any) -> None:
    """A model spread by device_map has hooks that took the place of its modules' forwards."""
    hooks = pytest.importorskip("accelerate.hooks")
    inputs, moved = batch(), []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            moved.append(module)
            return args, kwargs

    hooks.add_hook_to_module(llama.lm_head, Hook())
    _, expected, wanted = by_logits(llama, inputs)
    gk.fuse_lm_head(llama)
    by_head(llama, inputs)
    fused, got = by_head(llama, inputs)
    same(fused, expected)
    close(got, wanted)
    gk.unfuse_lm_head(llama)
    torch.testing.assert_close(by_logits(llama, inputs)[1].loss, expected.loss)
    assert moved == [llama.lm_head] * 5  # the first fused call calls the head twice


@pytest.fixture
def counter() -> Iterator[Any]:
    if not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this torch compiles no model of transformers")
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def test_a_compiled_model_is_one_graph(counter: Any) -> None:
    """Once an eager call has measured what the model does to logits; a new function with new tensors is no new graph."""
    model = adapted(model_of("llama", num_hidden_layers=1), ["q_proj", "lm_head"], True)
    by_head(model, batch())
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for seed in range(2):
        inputs = batch(seed=seed)
        _, expected, wanted = by_logits(model, inputs)
        fused, got = by_head(compiled, inputs)
        same(fused, expected)
        close(got, wanted)
        assert counter.frame_count == 1
        if seed == 1:
            with torch.no_grad():
                scored = compiled(**inputs["model"], lm_head_fn=scoring_fn(inputs))
            torch.testing.assert_close(scored.logps, expected.logps, rtol=1e-5, atol=2e-6)
    assert counter.frame_count == 2


def scoring_fn(inputs: dict[str, dict[str, Tensor]]) -> Any:
    loss = inputs["loss"]
    return partial(gk.fused_linear_logprobs, token_ids=loss["completion_ids"], mask=loss["completion_mask"], temperature=0.8)


def test_the_first_call_of_a_compiled_model_runs_uncompiled(counter: Any) -> None:
    model, inputs = model_of("mixtral", num_hidden_layers=1), batch()
    _, expected, wanted = by_logits(model, inputs)
    compiled = torch.compile(gk.fuse_lm_head(model), backend=counter)
    frames = []
    for _ in range(3):
        fused, got = by_head(compiled, inputs)
        same(fused, expected)
        close(got, wanted)
        frames.append(counter.frame_count)
    assert frames[0] <= frames[1] == frames[2] and frames[2] > 0


def test_importing_the_package_imports_neither_transformers_nor_a_compiler() -> None:
    script = "import sys, grpo_kernels; sys.exit(', '.join({'transformers', 'peft', 'torch._dynamo'} & set(sys.modules)) or 0)"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr


# --- PEFT -------------------------------------------------------------------------------------------------------------------------------


def adapted(model: Any, targets: list[str], fused_first: bool, names: tuple[str, ...] = ("default",), **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    if fused_first:
        gk.fuse_lm_head(model)
    config = peft.LoraConfig(target_modules=targets, r=2, lora_alpha=8, init_lora_weights=False, **options)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    if len(names) > 1:
        model.base_model.set_adapter(list(names))
    if not fused_first:
        gk.fuse_lm_head(model)
    return model


ADAPTERS: dict[str, dict[str, Any]] = {
    "body": {"targets": ["q_proj", "v_proj"]},
    "body and head": {"targets": ["q_proj", "lm_head"]},
    "two on the head": {"targets": ["lm_head"], "names": ("default", "other")},
    "head in modules_to_save": {"targets": ["q_proj"], "modules_to_save": ["lm_head"]},
    "head with a bias of the adapter": {"targets": ["lm_head"], "lora_bias": True},
}


@pytest.mark.parametrize("fused_first", [True, False])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["llama", "gemma2: soft cap"])
def test_adapters_learn_as_from_logits(name: str, adapter: str, fused_first: bool) -> None:
    options = ADAPTERS[adapter]
    if "lora_bias" in options:
        name = "phi: bias"
    model, inputs = adapted(model_of(name), fused_first=fused_first, **options), batch()
    _, expected, wanted = by_logits(model, inputs)
    assert len(wanted) < sum(1 for _ in model.parameters())  # what is frozen has none
    for _ in range(2):
        fused, got = by_head(model, inputs)
        same(fused, expected)
        close(got, wanted)
    # the reference policy: the same model without its adapters
    with model.disable_adapter():
        _, reference, _ = by_logits_without_grad(model, inputs)
        with torch.no_grad():
            same(model(**inputs["model"], lm_head_fn=loss_fn(inputs)), reference)
    assert not torch.allclose(reference.logps, expected.logps)
    same(by_head(model, inputs)[0], expected)
    if "modules_to_save" not in options and "names" not in options:
        model.merge_adapter()
        with torch.no_grad():
            same(model(**inputs["model"], lm_head_fn=loss_fn(inputs)), by_logits_without_grad(model, inputs)[1])
        model.unmerge_adapter()
    assert not any("next_call" in vars(module) and module.next_call is not None for module in model.modules())


def by_logits_without_grad(model: Any, inputs: Any) -> Any:
    with torch.no_grad():
        output = model(**inputs["model"])
        return output, gk.fused_grpo_loss(output.logits[:, -(T + 1) :].contiguous(), **inputs["loss"], **OPTIONS), {}


def test_dropout_of_the_heads_adapter_draws_the_same(llama: Any) -> None:
    model, inputs = adapted(llama, ["lm_head"], True, lora_dropout=0.5).train(), batch()
    inputs["model"]["logits_to_keep"] = T + 1  # as many values are drawn
    by_head(model, inputs)
    torch.manual_seed(3)
    _, expected, wanted = by_logits(model, inputs)
    torch.manual_seed(3)
    fused, got = by_head(model, inputs)
    same(fused, expected)
    close(got, wanted)


def test_a_young_adapter_of_a_bfloat16_head_is_not_rounded_away(llama: Any) -> None:
    """W + s B A in bfloat16 is W until B A passes half a step of W, 2^-9 of it."""
    model, inputs = adapted(llama.bfloat16(), ["lm_head"], True), batch()
    layer = model.get_output_embeddings()
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(2e-3 * layer.base_layer.weight.abs().min().item())
        delta = layer.get_delta_weight("default")
        assert torch.equal((layer.base_layer.weight + delta).bfloat16(), layer.base_layer.weight) and delta.abs().max() > 0
    by_head(model, inputs)
    got = by_head(model, inputs)[1]
    wanted = by_logits(model, inputs)[2]
    close(got, wanted, rtol=0.05)


def test_adapters_that_are_not_plain_lora_are_refused(llama: Any) -> None:
    model, inputs = adapted(llama, ["lm_head"], True, use_dora=True), batch()
    with pytest.raises(TypeError, match="adapter 'default' .* is not plain LoRA"):
        model(**inputs["model"], lm_head_fn=loss_fn(inputs))
    with torch.no_grad():
        model.merge_adapter()
        expected = by_logits_without_grad(model, inputs)[1]
        same(model(**inputs["model"], lm_head_fn=loss_fn(inputs)), expected)
