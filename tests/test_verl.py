"""verl's own functions, losses and engine, from the installed package, with ours in their place and without.

verl asks for versions of its dependencies that do not fit those of the other tests, but works beside newer ones: tests/verl.txt says how to
install it, and `make test` does.
"""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import oracle
import verl_folder
from sweeps import Sweeps

pytest.importorskip("verl", reason=f"verl is not in {verl_folder.FOLDER or 'this installation'}: tests/verl.txt says how it comes there")

import verl
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

from grpo_kernels.integrations import verl as ours

PAGE = (Path(__file__).resolve().parents[1] / "docs/trainers.md").read_text()
NAMES = ("logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking")
THEIRS = {name: getattr(torch_functional, name) for name in NAMES}
SHAPES = [(11, 1025), (2, 5, 300), (2, 2, 3, 40), (7,)]
BOTH_ORDERS = pytest.mark.parametrize("entropy_first", [True, False], ids=["entropy first", "log-probs first"])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def patched() -> Iterator[None]:
    ours.patch_verl()
    yield
    ours.unpatch_verl()


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(shape, generator=g)).to(dtype).requires_grad_(), torch.randint(shape[-1], shape[:-1], generator=g)


def ask(logits: Tensor, labels: Tensor, entropy_first: bool, inplace_backward: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy as an engine asks for them."""
    if entropy_first:
        entropy = torch_functional.entropy_from_logits(logits)
        return torch_functional.logprobs_from_logits(logits, labels, inplace_backward=inplace_backward), entropy
    logps = torch_functional.logprobs_from_logits(logits=logits, labels=labels, inplace_backward=inplace_backward)
    return logps, torch_functional.entropy_from_logits(logits)


def total(logps: Tensor, entropy: Tensor) -> Tensor:
    return (logps.flatten() * torch.linspace(-1, 2, logps.numel())).sum() - 0.3 * entropy.sum()


# --- the functions


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_verls(name: str) -> None:
    mine, theirs = (inspect.signature(f).parameters.values() for f in (getattr(ours, name), THEIRS[name]))
    assert [(p.name, p.default, p.kind) for p in mine] == [(p.name, p.default, p.kind) for p in theirs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_verls_within_its_error(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits, labels = made(shape, dtype)
    exact = logits.detach().double().requires_grad_()
    wanted = dict(zip(NAMES, oracle.logps_and_entropy(exact, labels, torch.ones(shape[:-1], dtype=torch.float64))))
    wanted[NAMES[2]] = wanted[NAMES[1]]
    for name in NAMES:
        if (name == NAMES[0] and len(shape) == 1) or (name == NAMES[2] and len(shape) != 2):
            continue  # verl's loop over rows needs some, its chunks are of (N, V)
        theirs, mine = ((f(logits, labels) if name == NAMES[0] else f(logits)) for f in (THEIRS[name], getattr(ours, name)))
        assert mine.shape == theirs.shape == shape[:-1] and mine.dtype == torch.float32
        their_error = (theirs.double() - wanted[name]).abs().max()
        assert (mine.double() - wanted[name]).abs().max() <= max(3e-6 + 2e-7 * wanted[name].abs().max(), 2 * their_error), name
        gradients = [torch.autograd.grad(x.double().sum(), z, retain_graph=True)[0] for x, z in ((wanted[name], exact), (mine, logits))]
        assert gradients[1].dtype == dtype
        torch.testing.assert_close(gradients[1].double(), gradients[0], rtol=2e-5 if dtype == torch.float32 else 4e-3, atol=1e-6)


def test_an_unusual_layout_gives_the_same() -> None:
    logits, labels = made((6, 40))
    wanted = ask(logits, labels, True)
    strided = torch.stack([logits.detach(), logits.detach()], -1)[..., 0]
    assert strided.stride(-1) == 2
    for entropy_first in (True, False):
        for got, value in zip(ask(strided, labels, entropy_first), wanted):
            torch.testing.assert_close(got, value)


def test_what_does_not_fit_raises(patched: None) -> None:
    logits, labels = made((2, 5, 30))
    with pytest.raises(ValueError, match=r"labels: expected shape \(2, 5\)"):
        torch_functional.logprobs_from_logits(logits, labels[:, :4])
    with pytest.raises(IndexError, match="-100"):
        torch_functional.logprobs_from_logits(logits, torch.full((2, 5), -100))


# --- one sweep for both


@BOTH_ORDERS
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_both_calls_share_one_sweep_and_one_gradient(shape: tuple[int, ...], grad: bool, entropy_first: bool, patched: None) -> None:
    leaf, labels = made(shape)
    with Sweeps() as sweeps, torch.set_grad_enabled(grad):
        logits = leaf * 1
        logps, entropy = ask(logits, labels, entropy_first)
        if grad:
            total(logps, entropy).backward()
    assert sweeps.counts == {"logprobs_forward": 1, **({"logprobs_backward": 1} if grad else {})}
    theirs = THEIRS["logprobs_from_logits"](leaf, labels), THEIRS["entropy_from_logits"](leaf)
    for mine, value in zip((logps, entropy), theirs):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=2e-5)
    if grad:
        torch.testing.assert_close(leaf.grad, torch.autograd.grad(total(*theirs), leaf)[0], rtol=1e-4, atol=1e-6)


def test_log_probs_have_the_same_bits_with_the_entropy_and_without(patched: None) -> None:
    """verl asks for the entropy with the old log-probs and mostly not with the new ones: the first ratio is 1."""
    logits, labels = made((300, 500))
    alone = torch_functional.logprobs_from_logits(logits, labels)
    for entropy_first in (True, False):
        assert torch.equal(ask(logits, labels, entropy_first)[0], alone)


@BOTH_ORDERS
def test_one_alone_is_not_bound_to_the_other(entropy_first: bool, patched: None) -> None:
    """verl reports the entropy and mostly puts no coefficient on it."""
    leaf, labels = made((5, 50))
    for answer in (0, 1):
        (got,) = torch.autograd.grad(ask(leaf * 1, labels, entropy_first)[answer].sum(), leaf)
        (wanted,) = torch.autograd.grad((THEIRS[NAMES[answer]](leaf, labels) if answer == 0 else THEIRS[NAMES[1]](leaf)).sum(), leaf)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def change_values(logits: Tensor) -> Tensor:
    with torch.no_grad():
        logits.mul_(0.5)
    return logits


# between the two calls -> whether a second sweep answers
BETWEEN: dict[str, Any] = {
    "written to": change_values,
    "a copy": lambda logits: logits.clone(),
    "an alias": lambda logits: logits.view_as(logits),  # as good as a copy: nobody says that it stays one
    "detached": lambda logits: logits.detach(),
}


@BOTH_ORDERS
@pytest.mark.parametrize("between", BETWEEN)
def test_an_answer_is_never_stale(between: str, entropy_first: bool, patched: None) -> None:
    leaf, labels = made((5, 50))
    logits = leaf * 1
    names = NAMES[:2] if not entropy_first else NAMES[1::-1]
    calls = {
        NAMES[0]: lambda z: torch_functional.logprobs_from_logits(z, labels, inplace_backward=False),
        NAMES[1]: torch_functional.entropy_from_logits,
    }
    first = calls[names[0]](logits)
    changed = BETWEEN[between](logits)
    with Sweeps() as sweeps:
        second = calls[names[1]](changed)
    assert sweeps.counts == {"logprobs_forward": 1} and first.shape == second.shape
    theirs = THEIRS[names[1]](changed, labels) if names[1] == NAMES[0] else THEIRS[names[1]](changed)
    torch.testing.assert_close(second, theirs, rtol=1e-5, atol=2e-5)
    assert second.requires_grad == changed.requires_grad


@BOTH_ORDERS
def test_an_answer_without_a_graph_serves_no_training(entropy_first: bool, patched: None) -> None:
    logits, labels = made((5, 50))
    with torch.no_grad():
        first = ask(logits, labels, entropy_first)[1 if entropy_first else 0]
        kept = torch_functional.entropy_from_logits(logits)
    logps = torch_functional.logprobs_from_logits(logits, labels)
    assert logps.requires_grad and not first.requires_grad and not kept.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(logps.sum(), logits)[0],
        torch.autograd.grad(THEIRS["logprobs_from_logits"](logits, labels).sum(), logits)[0],
        rtol=1e-4,
        atol=1e-6,
    )


def test_other_labels_of_the_same_logits_are_scored_anew(patched: None) -> None:
    leaf, labels = made((5, 50))
    logits, others = leaf * 1, (labels + 1) % 50
    entropy = torch_functional.entropy_from_logits(logits)
    first = torch_functional.logprobs_from_logits(logits, labels, inplace_backward=False)
    second = torch_functional.logprobs_from_logits(logits, others, inplace_backward=False)
    for got, ids in ((first, labels), (second, others)):
        torch.testing.assert_close(got, THEIRS["logprobs_from_logits"](leaf, ids), rtol=1e-5, atol=2e-5)
    loss = THEIRS["logprobs_from_logits"](leaf, labels).sum() - 2 * THEIRS["logprobs_from_logits"](leaf, others).sum()
    (wanted,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(
        torch.autograd.grad(first.sum() - 2 * second.sum() + 0 * entropy.sum(), leaf)[0], wanted, rtol=1e-4, atol=1e-6
    )


def test_the_same_question_twice_has_two_answers(patched: None) -> None:
    logits, labels = made((5, 50))
    for ids in (labels, (labels + 1) % 50):
        got = torch_functional.logprobs_from_logits(logits, ids)
        torch.testing.assert_close(got, THEIRS["logprobs_from_logits"](logits, ids), rtol=1e-5, atol=2e-5)
    for _ in range(3):  # the first is answered by the sweep of the log-probs
        torch.testing.assert_close(
            torch_functional.entropy_from_logits(logits), THEIRS["entropy_from_logits"](logits), rtol=1e-5, atol=2e-5
        )


@BOTH_ORDERS
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("second", [True, False], ids=["both asked", "one asked"])
def test_nothing_of_the_logits_outlives_them(second: bool, grad: bool, entropy_first: bool, patched: None) -> None:
    """Without the garbage collector: a cycle would hold gigabytes until it comes."""
    leaf, labels = made((5, 50))
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(grad):
            logits = leaf * 1
            storage = weakref.ref(logits.untyped_storage())
            if second:
                answers = list(ask(logits, labels, entropy_first))
            elif entropy_first:
                answers = [torch_functional.entropy_from_logits(logits)]
            else:
                answers = [torch_functional.logprobs_from_logits(logits, labels)]
        alive = weakref.ref(logits)
        del logits
        if not grad:  # answers alone hold a graph alone
            assert alive() is None and storage() is None
        del answers[:]
        assert alive() is None and storage() is None
        assert len(ours._asked) == len(ours._scores) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_in_the_logits_own_memory(dtype: torch.dtype, patched: None) -> None:
    leaf, labels = made((1, 6, 200), dtype)
    logits = leaf * 1
    flat = logits.squeeze(0)  # as the engine does it: a view
    torch_functional.logprobs_from_logits(flat, labels[0]).sum().backward()
    exact = leaf.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(THEIRS["logprobs_from_logits"](exact, labels).sum(), exact)
    torch.testing.assert_close(leaf.grad.double(), wanted, rtol=2e-5 if dtype == torch.float32 else 4e-3, atol=1e-6)
    assert torch.equal(flat, leaf.grad[0]), "the gradient is where the logits were"


def test_a_later_reader_raises_and_a_leaf_is_left_alone(patched: None) -> None:
    leaf, labels = made((6, 20))
    logits = leaf * 1
    other = (logits**2).sum()
    torch_functional.logprobs_from_logits(logits, labels).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    before = leaf.detach().clone()
    torch_functional.logprobs_from_logits(leaf, labels).sum().backward()
    torch_functional.logprobs_from_logits(leaf.view(6, 20), labels).sum().backward()
    assert torch.equal(leaf, before)


def test_compiled_as_the_engine_does_it_the_sweep_is_shared_still(patched: None) -> None:
    leaf, labels = made((5, 50))
    compiled = torch.compile(torch_functional.entropy_from_logits, dynamic=True)
    with Sweeps() as sweeps:
        logits = leaf * 1
        entropy = compiled(logits)
        logps = torch_functional.logprobs_from_logits(logits, labels, inplace_backward=False)
        total(logps, entropy).backward()
    assert sweeps.counts == {"logprobs_forward": 1, "logprobs_backward": 1}


@pytest.mark.parametrize("use_reentrant", [True, False])
@BOTH_ORDERS
def test_a_checkpointed_entropy_has_the_right_gradient(entropy_first: bool, use_reentrant: bool, patched: None) -> None:
    leaf, labels = made((5, 50))
    logits = leaf * 1

    def entropy_of(logits: Tensor) -> Tensor:
        return checkpoint(torch_functional.entropy_from_logits, logits, use_reentrant=use_reentrant)

    if entropy_first:
        entropy = entropy_of(logits)
        logps = torch_functional.logprobs_from_logits(logits, labels, inplace_backward=False)
    else:
        logps = torch_functional.logprobs_from_logits(logits, labels, inplace_backward=False)
        entropy = entropy_of(logits)
    (got,) = torch.autograd.grad(total(logps, entropy), logits) if not use_reentrant else (backward(total(logps, entropy), leaf),)
    theirs = THEIRS["logprobs_from_logits"](leaf, labels), THEIRS["entropy_from_logits"](leaf)
    torch.testing.assert_close(got, torch.autograd.grad(total(*theirs), leaf)[0], rtol=1e-4, atol=1e-6)


def backward(loss: Tensor, leaf: Tensor) -> Tensor:
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad


# --- putting them in verl's place


def test_names_are_rebound_wherever_they_were_imported_and_given_back() -> None:
    importer, later = types.ModuleType("importer"), types.ModuleType("later")
    importer.lp = THEIRS["logprobs_from_logits"]
    sys.modules["importer"] = importer
    try:
        ours.patch_verl()
        ours.patch_verl()
        for name in NAMES:
            assert getattr(torch_functional, name) is getattr(ours, name)
        assert transformer_impl.logprobs_from_logits is ours.logprobs_from_logits is importer.lp
        sys.modules["later"] = later
        exec("from verl.utils.torch_functional import logprobs_from_logits", vars(later))
        ours.unpatch_verl()
        ours.unpatch_verl()
        for name in NAMES:
            assert getattr(torch_functional, name) is THEIRS[name]
        assert transformer_impl.logprobs_from_logits is THEIRS["logprobs_from_logits"] is importer.lp is later.logprobs_from_logits
        assert ours.logprobs_from_logits is not THEIRS["logprobs_from_logits"]
    finally:
        ours.unpatch_verl()
        for name in ("importer", "later"):
            sys.modules.pop(name, None)


def test_another_version_is_refused_with_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "__version__", "0.8.0")
    with pytest.raises(RuntimeError, match=r"supported are verl 0\.9\.1, installed is 0\.8\.0"):
        ours.patch_verl()
    assert torch_functional.logprobs_from_logits is THEIRS["logprobs_from_logits"]
    assert importlib.metadata.version("verl") in ours.SUPPORTED_VERSIONS


def in_a_new_process(code: str, **environment: str) -> str:
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_the_hook_of_the_environment_patches_a_worker() -> None:
    """It runs while `import verl` is still under way."""
    code = "import verl; from verl.utils.torch_functional import logprobs_from_logits as f; print(f.__module__)"
    printed = in_a_new_process(code, VERL_USE_EXTERNAL_MODULES="grpo_kernels.integrations.verl_external")
    assert printed.split()[-1] == "grpo_kernels.integrations.verl"


def test_the_hook_of_the_configuration_patches_a_worker() -> None:
    """It runs when a model's configuration is read, after the engine's module was imported and before an engine is built."""
    from verl.utils.import_utils import import_external_libs

    try:
        import_external_libs("grpo_kernels.integrations.verl_external")
        assert transformer_impl.logprobs_from_logits is ours.logprobs_from_logits
        assert core_algos.get_policy_loss_fn("grpo_kernels") is ours._default_policy_loss
    finally:
        ours.unpatch_verl()
        sys.modules.pop("grpo_kernels.integrations.verl_external")


@pytest.mark.serial
@pytest.mark.slow
def test_a_real_ray_worker_is_patched() -> None:
    code = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
@ray.remote
class Worker:
    def where(self):
        import verl.workers.engine.fsdp.transformer_impl as t
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        return t.logprobs_from_logits.__module__, get_policy_loss_fn("grpo_kernels").__module__
print(ray.get(Worker.remote().where.remote()))
ray.shutdown()
"""
    printed = in_a_new_process(code, VERL_USE_EXTERNAL_MODULES="grpo_kernels.integrations.verl_external")  # workers inherit it
    assert printed.count("grpo_kernels.integrations.verl") == 2


# --- the policy loss


B, T = 4, 6
LENGTHS = torch.tensor([6, 2, 0, 3])
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
COUNTS: dict[str, dict[str, Any]] = {
    "this micro-batch alone": {},
    "global counts of two ranks": {"dp_size": 2, "batch_num_tokens": 37, "global_batch_size": 9, "loss_scale_factor": 20},
}
# verl's mode -> the options that make it of ours
MODES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gspo": {"importance_sampling_level": "sequence_token", "dual_clip": None, "max_log_ratio": 10.0},
    "sapo": {"loss_type": "sapo"},
    "gpg": {"loss_type": "reinforce"},
    "cispo": {"loss_type": "cispo"},
}


def actor(**changed: Any) -> FSDPActorConfig:
    return FSDPActorConfig(rollout_n=2, ppo_micro_batch_size_per_gpu=2, **changed)


def rollout(seed: int = 0, spread: float = 0.6) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand(B, T, generator=g)
    return {
        "log_prob": logps.requires_grad_(),
        "old_log_prob": logps.detach() + spread * torch.randn(B, T, generator=g),
        "advantages": torch.randn(B, T, generator=g),
        "response_mask": torch.arange(T) < LENGTHS[:, None],
    }


def both_losses(mode: str, config: FSDPActorConfig, inputs: dict[str, Tensor], agg: str, **options: Any) -> list[tuple[Any, Any, Tensor]]:
    """(loss, metrics, gradient) of verl's mode and of ours."""
    results = []
    for function in (core_algos.get_policy_loss_fn(mode), ours.policy_loss(**MODES[mode], **options)):
        loss, metrics = function(**inputs, loss_agg_mode=agg, config=config)
        results.append((loss, metrics, torch.autograd.grad(loss, inputs["log_prob"])[0]))
    return results


def agree(theirs: tuple[Any, Any, Tensor], mine: tuple[Any, Any, Tensor], metrics: tuple[str, ...] | None = None) -> None:
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine[2], theirs[2], rtol=1e-5, atol=1e-7)
    for name in theirs[1] if metrics is None else metrics:
        assert mine[1][name] == pytest.approx(theirs[1][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("mode", "agg"),
    # verl's sapo is the mean of the sequences' means whatever the configuration says
    [*((mode, agg) for mode in ("vanilla", "gspo", "gpg") for agg in AGGREGATIONS), ("sapo", "seq-mean-token-mean")],
)
def test_the_policy_loss_is_verls(mode: str, agg: str, counts: str) -> None:
    config = actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5, tau_pos=1.2, tau_neg=1.7)
    config.global_batch_info.update(COUNTS[counts])
    for seed, weights in ((0, None), (1, torch.rand(B, T, generator=torch.Generator().manual_seed(9)) * 2)):
        inputs = rollout(seed) | ({} if weights is None else {"rollout_is_weights": weights})
        theirs, mine = both_losses(mode, config, inputs, agg)
        assert theirs[2].abs().max() > 1e-4
        agree(theirs, mine)


def test_what_its_metrics_count_occurs() -> None:
    config = actor(clip_ratio_c=1.5)
    ((_, theirs, _), (_, mine, _)) = both_losses("vanilla", config, rollout(2), "token-mean")
    assert all(0 < theirs[name] < 1 for name in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")) and theirs.keys() == mine.keys()


def test_log_ratios_are_held_where_verl_holds_them() -> None:
    inputs = rollout(3, spread=15.0)
    inputs["advantages"] = -inputs["advantages"].abs()  # whose ratio is bounded by the dual clip alone
    inputs["old_log_prob"][0, :2] = torch.tensor([-25.0, 25.0])
    theirs, mine = both_losses("vanilla", actor(clip_ratio_c=1e12), inputs, "seq-mean-token-mean")
    assert theirs[0] > 1e6
    agree(theirs, mine)
    agree(*both_losses("sapo", actor(), inputs, "seq-mean-token-mean"))


def test_cispo_is_verls_where_no_ratio_is_below_its_lower_bound() -> None:
    inputs = rollout(4)
    inputs["old_log_prob"] = torch.minimum(inputs["old_log_prob"], inputs["log_prob"].detach() + 0.2)
    theirs, mine = both_losses("cispo", actor(clip_ratio_high=0.5), inputs, "token-mean")
    agree(theirs, mine, ("actor/ppo_kl",))


def test_options_of_ours_that_verl_lacks() -> None:
    inputs = rollout(5)
    loss = ours.policy_loss(delta=1.1, dual_clip=None)(**inputs, config=actor())[0]
    plain = ours.policy_loss(dual_clip=None)(**inputs, config=actor())[0]
    assert loss < plain
    assert ours.policy_loss(loss_type="vespo")(**inputs, config=actor())[0].isfinite()
    with pytest.raises(TypeError, match="epsilon_high"):
        ours.policy_loss(epsilon_hi=0.3)(**inputs, config=actor())
    with pytest.raises(ValueError, match="batch_num_tokens"):
        config = actor()
        config.global_batch_info["dp_size"] = 2
        ours.policy_loss()(**inputs, config=config)
    with pytest.raises(ValueError, match="no 'token-median'"):
        ours.policy_loss()(**inputs, loss_agg_mode="token-median", config=actor())


def test_the_losses_of_the_page_register_and_run() -> None:
    (block,) = re.findall(r"```py\n(.*?)```", PAGE.partition("\n## verl")[2], flags=re.DOTALL)
    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    try:
        exec(compile(block, "docs/trainers.md, verl", "exec"), {"__name__": "recipe"})
        registered = core_algos.POLICY_LOSS_REGISTRY.keys() - before
        assert registered == {"vespo", "two_sided"}
        values = {name: core_algos.get_policy_loss_fn(name)(**rollout(5), config=actor())[0].item() for name in (*registered, "vanilla")}
        assert len(set(values.values())) == 3
    finally:
        core_algos.POLICY_LOSS_REGISTRY.clear()
        core_algos.POLICY_LOSS_REGISTRY.update(before)


def test_a_micro_batch_without_a_token() -> None:
    inputs = rollout() | {"response_mask": torch.zeros(B, T, dtype=torch.bool)}
    for agg in AGGREGATIONS:
        loss, metrics = ours.policy_loss()(**inputs, loss_agg_mode=agg, config=actor())
        assert loss == 0 and not torch.autograd.grad(loss, inputs["log_prob"])[0].any() and not any(metrics.values())


# --- where verl's numbers differ


def test_the_documented_differences() -> None:
    import numpy as np

    import grpo_kernels as gk

    inf = float("inf")
    logits, labels = torch.tensor([[0.0, -inf, 1.0]]), torch.tensor([0])
    assert THEIRS["entropy_from_logits"](logits).isnan() and ours.entropy_from_logits(logits).isfinite()
    half, labels = made((4, 100), torch.bfloat16)
    assert THEIRS["logprobs_from_logits"](half, labels).dtype == torch.bfloat16
    assert ours.logprobs_from_logits(half, labels).dtype == torch.float32

    d = torch.tensor([[2.5, 2.7]])  # ref - new: 10 is passed at 2.61
    logps = torch.zeros(1, 2, requires_grad=True)
    (theirs,) = torch.autograd.grad(core_algos.kl_penalty(logps, d, "low_var_kl").sum(), logps)
    mine = gk.grpo_loss(logps, torch.zeros(1), ref_logps=d, beta=1.0, loss_type="luspo")
    (gradient,) = torch.autograd.grad(mine.loss, logps)
    assert theirs[0, 1] == 0 and theirs[0, 0] == pytest.approx(float(gradient[0, 0]), rel=1e-5) and gradient[0, 1] < gradient[0, 0]

    rewards = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 2.0]])
    mask, groups = torch.ones(3, 2), np.array(["a", "b", "b"])
    theirs = core_algos.compute_grpo_outcome_advantage(rewards, mask, groups)[0][:, 0]
    mine = gk.group_advantages(rewards.sum(1), group_ids=torch.tensor([0, 1, 1]), eps=1e-6)
    assert theirs[0] == pytest.approx(3, rel=1e-5) and mine[0] == 0
    torch.testing.assert_close(mine[1:], theirs[1:])
    assert actor().clip_ratio_c == 3.0


def test_a_ratio_below_cispos_lower_bound_differs() -> None:
    inputs = {
        "log_prob": torch.tensor([[-2.0]], requires_grad=True), "old_log_prob": torch.tensor([[-1.0]]), "advantages": torch.ones(1, 1),
        "response_mask": torch.ones(1, 1, dtype=torch.bool),
    }  # fmt: skip
    theirs, mine = both_losses("cispo", actor(), inputs, "token-mean")
    assert theirs[2].item() == pytest.approx(-0.8) and mine[2].item() == pytest.approx(-0.36788, rel=1e-4)


# --- a step of verl's engine


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """verl's FSDP engine around a tiny model. It is for GPUs: that it is asked for a device is all that is replaced, and sharding."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gloo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=90, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, initializer_range=0.5, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)

    def engine(**options: Any) -> Any:
        made = transformer_impl.FSDPEngineWithLMHead(
            SimpleNamespace(use_remove_padding=True, lora_rank=0, hf_config=config), FSDPEngineConfig(**options), None, None
        )
        made.module, made._autocast_dtype = model, torch.float32
        return made

    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_device_id", "get_device_name"):
            patch.setattr(transformer_impl, name, lambda: "cpu")
        yield engine
    dist.destroy_process_group()


def nested(*rows: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def engine_batch(**settings: Any) -> Any:
    """Four sequences, prompts and responses of several lengths, as verl's trainer hands them to a worker."""
    from verl.utils import tensordict_utils as tu

    g = torch.Generator().manual_seed(0)
    prompts, responses = [2, 3, 1, 4], [5, 2, 6, 3]

    def per_response(draw: Any) -> Tensor:
        return nested(*[draw(n) for n in responses])

    ids = [torch.randint(90, (p + n,), generator=g) for p, n in zip(prompts, responses)]
    data = {
        "input_ids": nested(*ids),
        "position_ids": nested(*[torch.arange(len(x)) for x in ids]),
        "prompts": nested(*[x[:p] for x, p in zip(ids, prompts)]),
        "responses": nested(*[x[p:] for x, p in zip(ids, prompts)]),
        "response_mask": per_response(lambda n: torch.ones(n, dtype=torch.int64)),
        "loss_mask": per_response(lambda n: torch.ones(n, dtype=torch.int64)),
        "old_log_probs": per_response(lambda n: -4.5 + 0.5 * torch.randn(n, generator=g)),
        "ref_log_prob": per_response(lambda n: -4.5 + 0.5 * torch.randn(n, generator=g)),
        "advantages": per_response(lambda n: torch.randn(n, generator=g)),
    }
    scalars = {
        "temperature": 0.8, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "global_batch_size": 4, "use_fused_kernels": False,
        **settings,
    }  # fmt: skip
    return tu.get_tensordict(tensor_dict=data, non_tensor_dict=scalars)


def engine_step(engine: Any, config: FSDPActorConfig, **settings: Any) -> tuple[dict[str, Any], Tensor, Sweeps]:
    """verl's own metrics, the gradient of all parameters, and what of ours ran, of two micro-batches."""
    engine.module.zero_grad()
    with Sweeps() as sweeps:
        output = engine.forward_backward_batch(
            engine_batch(**settings), loss_function=lambda **kw: ppo_loss(config, **kw), forward_only=False
        )
    metrics = {name: value.aggregate() if hasattr(value, "aggregate") else value for name, value in output["metrics"].items()}
    gradient = torch.cat([p.grad.flatten() for p in engine.module.parameters()])
    return metrics | {"loss": sum(output["loss"])}, gradient, sweeps


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # engine, actor, batch
    "log-probs alone": ({}, {}, {"calculate_entropy": False}),
    "entropy reported": ({}, {}, {"calculate_entropy": True}),
    "entropy bonus and penalty": ({}, {"entropy_coeff": 0.05, "use_kl_loss": True}, {"calculate_entropy": True}),
    "entropy in chunks": ({"entropy_from_logits_with_chunking": True}, {"entropy_coeff": 0.05}, {"calculate_entropy": True}),
    "entropy checkpointed": ({"entropy_checkpointing": True}, {"entropy_coeff": 0.05}, {"calculate_entropy": True}),
    "padded": ({}, {"entropy_coeff": 0.05}, {"calculate_entropy": True, "use_remove_padding": False}),
    "temperature 1": ({}, {"entropy_coeff": 0.05}, {"calculate_entropy": True, "temperature": 1.0}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_of_the_engine_is_the_same(case: str, engine_of: Any) -> None:
    engine_options, actor_options, settings = CASES[case]
    theirs = engine_step(engine_of(use_torch_compile=False, **engine_options), actor(**actor_options), **settings)
    assert not theirs[2].counts and theirs[1].norm() > 1e-3
    ours.patch_verl()
    try:
        # compiled, as an engine is by default: there is nothing left to compile
        engine = engine_of(use_torch_compile=True, **engine_options)
        config = actor(policy_loss={**vars(actor().policy_loss), "loss_mode": "grpo_kernels"}, **actor_options)
        mine = engine_step(engine, config, **settings)
    finally:
        ours.unpatch_verl()
    assert theirs[0].keys() == mine[0].keys()
    for name, value in theirs[0].items():
        assert mine[0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert (mine[1] - theirs[1]).norm() < 1e-5 * theirs[1].norm()
    shared = case not in ("padded", "entropy checkpointed")  # there the entropy is of another tensor, or runs without a graph
    assert mine[2].counts["logprobs_forward"] == 2 if shared else mine[2].counts["logprobs_forward"] >= 4
    backward = mine[2].counts["logprobs_backward"] + mine[2].counts["logprobs_backward_"]
    assert backward == 2 if shared else backward == 4
    assert mine[2].counts["objective"] == 2
