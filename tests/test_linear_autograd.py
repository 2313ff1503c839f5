"""What autograd, torch.compile and callers are promised by the loss from hidden states: right gradients for any upstream gradient, zeros
where there is nothing to learn, one graph, and an error that names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import grpo_kernels as gk
from cases import batch, same_bits
from linear_cases import Problem, problem, run
from modes import OPTIONS

LEVELS = ("token", "sequence")


def small(dtype: torch.dtype = torch.float32, chunk_size: int | None = 5, **options: Any) -> Problem:
    return problem(batch(0, (3, 4, 11)) | OPTIONS | options, dtype, 0, bias=True, chunk_size=chunk_size)


def leaves_of(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.where(p.hidden.isnan(), 0, p.hidden)
    return hidden.requires_grad_(), p.weight.clone().requires_grad_(), p.bias.clone().requires_grad_()


def loss_of(p: Problem, leaves: tuple[Tensor, ...], backend: str | None = None, **changed: Any) -> gk.GRPOLossOutput:
    return gk.fused_linear_grpo_loss(leaves[0], leaves[1], bias=leaves[2], **p.arguments | changed, backend=backend)


def scored(p: Problem, leaves: tuple[Tensor, ...], backend: str | None = None, **changed: Any) -> gk.LogprobsOutput:
    arguments = {"chunk_size": 5, "mask": p.arguments["completion_mask"], **changed}
    return gk.fused_linear_logprobs(leaves[0], leaves[1], p.arguments["completion_ids"], bias=leaves[2], **arguments, backend=backend)


# --- derivatives ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_float64_gradients_of_log_probs_and_entropy_are_the_derivatives(softcap: float | None) -> None:
    p = small(torch.float64)
    arguments = {"temperature": torch.linspace(0.5, 2, 12).view(3, 4), "logit_softcap": softcap, "logit_scale": 0.7}
    for pick in ((lambda out: tuple(out)), (lambda out: out.logps), (lambda out: out.entropy)):
        assert torch.autograd.gradcheck(lambda *leaves, pick=pick: pick(scored(p, leaves, **arguments)), leaves_of(p))


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("upstream", [-3.0, 0.0, 0.37, torch.tensor(2.0, dtype=torch.float64)], ids=str)
def test_an_upstream_gradient_multiplies_what_is_stored(backend: str, dtype: torch.dtype, level: str, upstream: Any) -> None:
    for chunk_size in (5, 12):
        p = small(dtype, chunk_size, importance_sampling_level=level)
        one, got = run(p, backend), run(p, backend, upstream=upstream)
        factor = torch.tensor(float(upstream), dtype=torch.float32)
        assert torch.equal(got.dhidden, (one.dhidden.float() * factor).to(dtype))
        if dtype == torch.float32 or chunk_size == 12:
            assert torch.equal(got.dweight, (one.dweight.float() * factor).to(dtype))
        else:  # multiplied while it is float32: rounded once, not twice
            torch.testing.assert_close(got.dweight.float(), one.dweight.float() * factor, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(got.dbias.float(), one.dbias.float() * factor, rtol=2**-7, atol=1e-6)
        assert (got.dweight != 0).any() == (float(upstream) != 0)


def test_a_float32_sum_is_scaled_before_it_is_rounded(backend: str) -> None:
    """Twice rounded, a third of the elements would be another number."""
    p = small(torch.bfloat16, 2)
    scaled = run(p, backend, upstream=0.37).dweight
    wide = run(p._replace(weight=p.weight.float(), hidden=p.hidden.float(), bias=p.bias.float()), backend, logits_dtype=torch.float32)
    with torch.autocast(p.hidden.device.type, torch.bfloat16):  # float32 parameters keep the sum as it is
        sums = run(p._replace(weight=p.weight.float(), bias=p.bias.float()), backend).dweight
    assert sums.dtype == torch.float32 and not torch.equal(sums, wide.dweight)
    assert torch.equal(scaled, (sums * torch.tensor(0.37)).to(torch.bfloat16))
    assert not torch.equal(scaled, (sums.to(torch.bfloat16).float() * torch.tensor(0.37)).to(torch.bfloat16))


def test_losses_on_the_same_hidden_states_add(backend: str) -> None:
    p = small()
    leaves = leaves_of(p)
    (loss_of(p, leaves, backend).loss + 2 * loss_of(p, leaves, backend, beta=0.5).loss + scored(p, leaves, backend).logps.sum()).backward()
    parts = []
    for call in (lambda x: loss_of(p, x, backend).loss, lambda x: 2 * loss_of(p, x, backend, beta=0.5).loss):
        parts.append(torch.autograd.grad(call(own := leaves_of(p)), own))
    parts.append(torch.autograd.grad(scored(p, own := leaves_of(p), backend).logps.sum(), own))
    for leaf, *each in zip(leaves, *parts):
        torch.testing.assert_close(leaf.grad, sum(each), rtol=1e-5, atol=1e-6)


def test_a_tied_embedding_gets_both_gradients(backend: str) -> None:
    p = small(completion_mask=None)
    table = p.weight.clone().requires_grad_()
    inputs = torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(1))
    gk.fused_linear_grpo_loss(torch.nn.functional.embedding(inputs, table), table, **p.arguments, backend=backend).loss.backward()
    apart = [p.weight.clone().requires_grad_() for _ in range(2)]
    gk.fused_linear_grpo_loss(torch.nn.functional.embedding(inputs, apart[0]), apart[1], **p.arguments, backend=backend).loss.backward()
    torch.testing.assert_close(table.grad, apart[0].grad + apart[1].grad)
    assert apart[0].grad.any() and apart[1].grad.any()


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_may_be_checkpointed(backend: str, level: str) -> None:
    from torch.utils.checkpoint import checkpoint

    p = small(importance_sampling_level=level)
    want = loss_of(p, own := leaves_of(p), backend).loss
    want.backward()
    for reentrant in (False, True):
        leaves = leaves_of(p)
        doubled = lambda h, w, b: loss_of(p, (h * 1.0, w, b), backend).loss  # noqa: E731
        checkpoint(doubled, *leaves, use_reentrant=reentrant).backward()
        assert all(same_bits(x.grad, y.grad) for x, y in zip(leaves, own))


# --- once -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_second_backward_or_derivative_raises(backend: str, level: str) -> None:
    p = small(importance_sampling_level=level)
    for i in range(3):
        leaves = leaves_of(p)
        loss = loss_of(p, leaves, backend).loss
        (gradient,) = torch.autograd.grad(loss, leaves[i], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(gradient.sum(), leaves[i])
        with pytest.raises(RuntimeError, match="fused_linear_grpo_loss hands its gradients over in the first backward"):
            loss.backward()


def test_log_probs_take_several_backwards_and_no_second_derivative(backend: str) -> None:
    p, leaves = small(), leaves_of(small())
    logps = scored(p, leaves, backend).logps
    first, again = (torch.autograd.grad(logps.sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(same_bits(x, y) for x, y in zip(first, again))
    (gradient,) = torch.autograd.grad(logps.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), leaves[0])


# --- nothing to learn -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", ["masked", "no advantage", "no time", "no sequences"])
def test_nothing_to_learn_from_is_zero(backend: str, case: str, level: str) -> None:
    p = small(importance_sampling_level=level, entropy_coef=0.0, beta=0.0)
    arguments, hidden = dict(p.arguments), p.hidden
    if case == "masked":
        arguments["completion_mask"], hidden = torch.zeros(3, 4), torch.full_like(hidden, torch.nan)
    elif case == "no advantage":
        arguments["advantages"] = torch.zeros(3)
    else:
        cut = (lambda x: x[:, :0] if x.dim() > 1 else x) if case == "no time" else (lambda x: x[:0])
        arguments = {name: cut(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        hidden = cut(hidden)
    got = run(p._replace(hidden=hidden, arguments=arguments), backend)
    assert got.output.loss == 0 and got.output.loss.requires_grad
    for x, like in zip(got[1:], (hidden, p.weight, p.bias)):
        assert x.shape == like.shape and (x == 0).all()


def test_masked_positions_change_no_bit(backend: str) -> None:
    for level in LEVELS:
        p = small(importance_sampling_level=level)
        hidden = ~p.arguments["completion_mask"]
        poisoned = {name: torch.where(hidden, torch.tensor(torch.nan), p.arguments[name]) for name in ("old_logps", "ref_logps")}
        poisoned["completion_ids"] = torch.where(hidden, 2**40, p.arguments["completion_ids"])
        want, got = run(p._replace(hidden=p.hidden.nan_to_num(7.0)), backend), run(p, backend, **poisoned)
        assert all(same_bits(x, y) for x, y in zip(want[1:], got[1:]))
        assert all(same_bits(x.detach(), y.detach()) for x, y in zip(want.output, got.output))


def test_a_degenerate_row_is_nan_and_leaves_the_others_alone(backend: str) -> None:
    p = small(completion_mask=None)
    hidden = p.hidden.clone()
    hidden[1, 2] = torch.inf
    bad, good = run(p._replace(hidden=hidden), backend), run(p, backend)
    row = torch.zeros(3, 4, dtype=torch.bool)
    row[1, 2] = True
    assert bad.output.logps[row].isnan().all() and bad.dhidden[row].isnan().all() and bad.output.loss.isnan()
    assert same_bits(bad.output.logps[~row], good.output.logps[~row]) and bad.dweight.isnan().any()
    torch.testing.assert_close(bad.dhidden[~row], good.dhidden[~row])


def test_without_grad_nothing_is_made(backend: str) -> None:
    p, leaves = small(), leaves_of(small())
    want = loss_of(p, leaves, backend)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = loss_of(p, leaves, backend)
        assert not got.loss.requires_grad
        for x, y in zip(got[1:], want[1:]):
            torch.testing.assert_close(x, y)
    log_probs = scored(p, leaves, backend)
    assert same_bits(log_probs.logps.detach(), want.logps) and same_bits(log_probs.entropy.detach(), want.entropy)


def test_log_probs_of_flat_rows_are_those_of_the_batch(backend: str) -> None:
    p, leaves = small(), leaves_of(small())
    want = scored(p, leaves, backend)
    flat = gk.fused_linear_logprobs(
        leaves[0].flatten(0, 1), leaves[1], p.arguments["completion_ids"].flatten().int(), bias=leaves[2],
        mask=p.arguments["completion_mask"].flatten(), backend=backend,
    )  # fmt: skip
    assert all(torch.equal(x.detach(), y.detach().flatten()) for x, y in zip(flat, want))


# --- torch.compile ----------------------------------------------------------------------------------------------------------------------

COMPILED: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"importance_sampling_level": "sequence"},
    "vespo, capped": {"loss_type": "vespo", "logit_softcap": 4.0, "logit_scale": 0.5},
    "float32 logits": {"logits_dtype": torch.float32},
}


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case, dtype", [(case, torch.float32) for case in COMPILED] + [("token", torch.bfloat16)], ids=str)
def test_a_model_with_the_loss_compiles_whole(fresh_compiler, case: str, dtype: torch.dtype) -> None:
    def step(x: Tensor, body: Tensor, weight: Tensor, bias: Tensor, arguments: dict[str, Any]) -> gk.GRPOLossOutput:
        return gk.fused_linear_grpo_loss(torch.tanh(x @ body), weight, bias=bias, **arguments, **COMPILED[case], chunk_size=8)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed, length in enumerate((4, 8)):
        p = problem(batch(seed, (3, length, 11)) | OPTIONS, dtype, seed, bias=True)
        inputs = {name: x for name, x in p.arguments.items() if not name.startswith(("logit", "chunk"))}
        x = torch.randn(3, length, 12).to(dtype)
        results = []
        for call in (step, compiled):
            leaves = [torch.eye(12).to(dtype).requires_grad_(), p.weight.clone().requires_grad_(), p.bias.clone().requires_grad_()]
            output = call(x, *leaves, inputs)
            (2 * output.loss).backward()
            results.append([*output, *(leaf.grad for leaf in leaves)])
        for eager, got in zip(*results):
            close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 1e-2}
            torch.testing.assert_close(got, eager, **close)


def test_compiled_log_probs_are_the_eager_ones(fresh_compiler) -> None:
    p = small()
    compiled = torch.compile(lambda *leaves: scored(p, leaves), fullgraph=True, backend="aot_eager")
    gradients = []
    for call in (lambda *leaves: scored(p, leaves), compiled):
        out = call(*(leaves := leaves_of(p)))
        (out.logps.sum() + out.entropy.sum()).backward()
        gradients.append([*(x.detach() for x in out), *(leaf.grad for leaf in leaves)])
    for eager, got in zip(*gradients):
        torch.testing.assert_close(got, eager)


@pytest.mark.parametrize("level", LEVELS)
def test_meta_and_fake_tensors_give_shapes(level: str) -> None:
    p = small(importance_sampling_level=level)
    leaves = [x.detach().to("meta").requires_grad_() for x in (p.hidden, p.weight, p.bias)]
    moved = p._replace(arguments={name: x.to("meta") if isinstance(x, Tensor) else x for name, x in p.arguments.items()})
    out = loss_of(moved, leaves)
    out.loss.backward()
    assert out.logps.shape == (3, 4) and all(x.grad.shape == x.shape for x in leaves)
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in (p.hidden, p.weight, p.bias)]
        faked = p._replace(arguments={name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in p.arguments.items()})
        loss_of(faked, leaves).loss.backward()
    assert leaves[1].grad.shape == p.weight.shape


# --- wrong arguments --------------------------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


H, W, IDS = torch.randn(2, 3, 8), torch.randn(11, 8), torch.arange(6).view(2, 3)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden_states": H.tolist()}, TypeError, "hidden_states: expected a torch.Tensor, got list"),
    ({"hidden_states": H.long()}, TypeError, "hidden_states: expected float32.*int64"),
    ({"hidden_states": H[:, :2]}, ValueError, r"completion_ids: expected hidden_states \(B, T, D\).*\(2, 2, 8\) beside \(2, 3\)"),
    ({"hidden_states": H[0]}, ValueError, r"completion_ids: expected .*\(3, 8\) beside \(2, 3\)"),
    ({"hidden_states": H.as_subclass(Subclass)}, TypeError, "hidden_states: .*Subclass.*full_tensor"),
    (
        {"hidden_states": H.bfloat16()},
        TypeError,
        "lm_head_weight: expected torch.bfloat16 .*, got torch.float32.*autocast",
    ),
    ({"lm_head_weight": W.tolist()}, TypeError, "lm_head_weight: expected a torch.Tensor, got list"),
    ({"lm_head_weight": W.t()}, ValueError, r"lm_head_weight: expected \(V, D\) beside hidden states of 8 columns, got shape \(8, 11\)"),
    ({"lm_head_weight": W[0]}, ValueError, r"lm_head_weight: expected \(V, D\).*\(8,\)"),
    ({"lm_head_weight": W[:0]}, ValueError, r"lm_head_weight: expected \(V, D\).*\(0, 8\)"),
    ({"lm_head_weight": W.long()}, TypeError, "lm_head_weight: expected float32.*int64"),
    ({"lm_head_weight": W.half()}, TypeError, "lm_head_weight: expected torch.float32.*float16"),
    ({"lm_head_weight": W.to("meta")}, ValueError, "lm_head_weight: expected a tensor on cpu .*meta"),
    ({"lm_head_weight": W.as_subclass(Subclass)}, TypeError, "lm_head_weight: .*Subclass.*GRPOHead"),
    ({"bias": torch.zeros(8)}, ValueError, r"bias: expected \(V,\) beside a weight of 11 rows, got shape \(8,\)"),
    ({"bias": torch.zeros(11, 1)}, ValueError, r"bias: expected \(V,\).*\(11, 1\)"),
    ({"bias": torch.zeros(11).half()}, TypeError, "bias: expected torch.float32.*float16"),
    ({"bias": 1.0}, TypeError, "bias: expected a torch.Tensor, got float"),
    ({"logit_scale": 0.0}, ValueError, "logit_scale: expected a finite number > 0, got 0.0"),
    ({"logit_scale": torch.ones(())}, TypeError, "logit_scale: expected a number, got Tensor"),
    ({"logit_softcap": -1.0}, ValueError, "logit_softcap: expected a finite number > 0, got -1.0"),
    ({"chunk_size": 0}, ValueError, "chunk_size: expected an integer >= 1 or None, got 0"),
    ({"chunk_size": 2.0}, ValueError, "chunk_size: expected an integer >= 1 or None, got 2.0"),
    ({"logits_dtype": torch.int32}, TypeError, "logits_dtype: expected None or torch.float32.*got torch.int32"),
    ({"logits_dtype": torch.float64}, TypeError, "logits_dtype: expected None or torch.float32.*got torch.float64"),
    ({"completion_ids": IDS.float()}, TypeError, "completion_ids: expected int64 or int32"),
    ({"completion_ids": IDS + 11}, IndexError, r"token id at position \(0, 0\): expected in \[0, 11\), got 11"),
    ({"temperature": torch.tensor([1.0, 0.0])}, ValueError, r"temperature at position \(1, 0\): .*got 0"),
    ({"advantages": torch.ones(3)}, ValueError, r"advantages: expected shape \(2, 3\) or \(2,\), got \(3,\)"),
    ({"beta": 0.1}, ValueError, "ref_logps: beta is 0.1"),
    ({"one_pass": True}, TypeError, "unknown option 'one_pass'"),
    ({"logit_softcaps": 1.0}, TypeError, "unknown option 'logit_softcaps'; did you mean 'logit_softcap'"),
    ({"backend": "gpu"}, ValueError, "backend: expected one of torch"),
]


@pytest.mark.parametrize("changed, error, message", WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_wrong_arguments_are_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    right = {"hidden_states": H, "lm_head_weight": W, "completion_ids": IDS, "advantages": torch.ones(2)}
    gk.fused_linear_grpo_loss(**right)
    with pytest.raises(error, match=message):
        gk.fused_linear_grpo_loss(**right | changed)


def test_log_probs_name_their_own_arguments() -> None:
    with pytest.raises(ValueError, match=r"token_ids: expected hidden_states \(N, D\) .*\(2, 3, 8\) beside \(6,\)"):
        gk.fused_linear_logprobs(H, W, IDS.flatten())
    with pytest.raises(ValueError, match=r"mask: expected shape \(2, 3\), got \(3,\)"):
        gk.fused_linear_logprobs(H, W, IDS, mask=torch.ones(3))
    with pytest.raises(TypeError, match="chunk|unexpected keyword"):
        gk.fused_linear_logprobs(H, W, IDS, chunks=3)


@pytest.mark.parametrize("name", ["logit_scale", "logit_softcap", "bias", "logits_dtype", "temperature"])
def test_no_argument_is_taken_and_ignored(backend: str, name: str) -> None:  # F32
    p = small(torch.bfloat16, None)
    values = {"logit_scale": 2.0, "logit_softcap": 2.0, "logits_dtype": torch.float32, "temperature": 0.5}
    before = run(p, backend, logit_scale=1.1).dhidden
    other = p._replace(bias=None) if name == "bias" else p._replace(arguments=p.arguments | {"logit_scale": 1.1, name: values[name]})
    after = run(other, backend, **({"logit_scale": 1.1} if name == "bias" else {})).dhidden
    assert not torch.allclose(before, after)


def test_a_dtensor_is_refused_with_the_recipe() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        weight = distribute_tensor(W, init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="lm_head_weight: .*DTensor.*GRPOHead"):
            gk.fused_linear_grpo_loss(H, weight, IDS, torch.ones(2))
    finally:
        distributed.destroy_process_group()
