"""The loss inside what surrounds it in training: autocast, no_grad, inference mode, activation checkpointing, deterministic algorithms,
forked workers, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import grpo_kernels as gk
from cases import EMULATED, same_bits
from modes import FLAGS, OPTIONS, gradient, loss_and_leaf, small_batch, without_logits


@pytest.fixture(params=FLAGS)
def flags(request: pytest.FixtureRequest) -> dict[str, bool]:
    return FLAGS[request.param]


def outputs_and_gradient(inputs: dict, **options) -> list[torch.Tensor]:
    leaf = inputs["logits"].clone().requires_grad_()
    out = gk.fused_grpo_loss(**{**inputs, "logits": leaf.clone()}, **options)
    out.loss.backward()
    return [*(x.detach() for x in out), leaf.grad]


# --- autocast ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit(backend, flags, dtype):
    inputs = small_batch(dtype)
    options = {**OPTIONS, "importance_weights": torch.tensor([0.5, 2.0]), "policy_weights": torch.rand(2, 3)}
    plain = outputs_and_gradient(inputs, **options, **flags, backend=backend)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        inside = outputs_and_gradient(inputs, **options, **flags, backend=backend)
        loss, leaf = loss_and_leaf(inputs, **options, **flags, backend=backend)
    loss.backward()  # the usual place: outside
    assert all(same_bits(x, y) for x, y in zip(plain, inside)) and same_bits(leaf.grad, plain[-1])
    assert inside[0].dtype == torch.float32 and leaf.grad.dtype == dtype


@pytest.mark.parametrize("constants", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [torch.bool, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_constants_of_any_dtype_are_taken(backend, constants, mask):
    """float64 rewards, half-precision log-probs and masks of every kind meet one dtype of logits."""
    inputs = small_batch()
    rounded = {name: inputs[name].to(constants) for name in ("advantages", "old_logps", "ref_logps")}
    inputs = {**inputs, **rounded, "completion_mask": inputs["completion_mask"].to(mask), "completion_ids": inputs["completion_ids"].int()}
    widened = {name: x.float() for name, x in rounded.items()}
    got = outputs_and_gradient(inputs, **OPTIONS, backend=backend)
    assert all(same_bits(x, y) for x, y in zip(got, outputs_and_gradient({**inputs, **widened}, **OPTIONS, backend=backend)))


# --- defaults of the process ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("loss_type", ["grpo", "cispo", "sapo", "vespo"])
def test_the_default_dtype_changes_no_bit(backend, default_dtype, loss_type, level, dtype):
    """Model loaders set it; the numbers below are no bfloat16 numbers."""
    inputs = {**small_batch(), "importance_weights": torch.tensor([0.3, 2.1])}
    options = {**OPTIONS, "loss_type": loss_type, "importance_sampling_level": level, "epsilon_high": 1.0137, "backend": backend}
    options |= {"vespo_k_pos": 1.313, "vespo_k_neg": 1.717, "vespo_lambda_pos": 1.919, "vespo_lambda_neg": 2.121, "temperature": 0.731}
    options |= {"sapo_temperature_pos": 1.013}
    plain = outputs_and_gradient(inputs, **options)
    default_dtype(dtype)
    inside = outputs_and_gradient(inputs, **options)
    assert all(x.dtype == y.dtype and same_bits(x, y) for x, y in zip(plain, inside))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_changes_no_metric(backend, default_dtype, dtype):
    logps = torch.log(torch.linspace(0.5, 1.5, 2 * 301).view(2, 301))
    output = gk.grpo_loss(logps, torch.tensor([1.0, -1.0]), old_logps=torch.zeros(2, 301), backend=backend)
    for mask in (None, torch.ones(2, 301)):
        torch.set_default_dtype(torch.float32)
        plain = gk.grpo_metrics(output, mask)
        default_dtype(dtype)
        inside = gk.grpo_metrics(output, mask)
        assert all(inside[name].dtype == torch.float32 and same_bits(inside[name], plain[name]) for name in plain)


def test_the_default_device_changes_no_bit(backend, flags):
    """Hyper-parameters made on "meta" would leave every output unwritten, on "cuda" the kernels would wait for them."""
    inputs = small_batch()
    plain = outputs_and_gradient(inputs, **OPTIONS, **flags, backend=backend)
    with torch.device("meta"):
        inside = outputs_and_gradient(inputs, **OPTIONS, **flags, backend=backend)
    assert all(same_bits(x, y) for x, y in zip(plain, inside))


# --- no_grad and inference mode ---------------------------------------------------------------------------------------------------------


def test_values_are_the_same_with_and_without_grad(backend, flags):
    inputs = small_batch()
    expected = outputs_and_gradient(inputs, **OPTIONS, **flags, backend=backend)[:-1]
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            out = gk.fused_grpo_loss(**inputs, **OPTIONS, **flags, backend=backend)
            scored = gk.token_logprobs_and_entropy(
                inputs["logits"], inputs["completion_ids"], mask=inputs["completion_mask"], backend=backend
            )
            from_logps = gk.grpo_loss(scored.logps, entropy=scored.entropy, **without_logits(inputs), **OPTIONS, backend=backend)
            metrics = gk.grpo_metrics(out, inputs["completion_mask"])
        assert not out.loss.requires_grad and all(value.isfinite() for value in metrics.values())
        # one pass and two passes: the same bits of everything per token
        assert all(same_bits(x, y) for x, y in zip(out[2:], expected[2:])) and same_bits(out.logps, scored.logps)
        torch.testing.assert_close(out.loss, expected[0])
        torch.testing.assert_close(from_logps.loss, expected[0])


def test_inference_tensors_are_taken_as_constants_of_a_loss_with_grad(backend, flags):
    """A rollout under inference_mode makes ids, mask and old log-probs that autograd refuses to save."""
    inputs = small_batch()
    expected = gradient(inputs, **OPTIONS, temperature=torch.ones(2, 3), backend=backend)
    with torch.inference_mode():
        rollout = {name: x.clone() for name, x in inputs.items()}
        temperature = torch.ones(2, 3)
        logits = inputs["logits"] * 1
    mixed = {**rollout, "logits": inputs["logits"]}
    torch.testing.assert_close(gradient(mixed, **OPTIONS, temperature=temperature, **flags, backend=backend), expected)
    # and logits made there have a loss outside, without a gradient
    out = gk.fused_grpo_loss(**{**rollout, "logits": logits}, **flags, backend=backend)
    assert not out.loss.requires_grad and same_bits(logits, inputs["logits"])
    logps = inputs["old_logps"].clone().requires_grad_()
    gk.grpo_loss(logps, **without_logits(rollout), backend=backend).loss.backward()
    assert logps.grad.isfinite().all()


# --- activation checkpointing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_around_head_and_loss(backend, flags, use_reentrant):
    """The logits live inside, so the second forward has its own: every mode works."""
    hidden, head = torch.randn(2, 3, 8), torch.randn(8, 11)
    calls = []

    def loss(x: torch.Tensor, w: torch.Tensor, **flags) -> torch.Tensor:
        calls.append(0)
        return gk.fused_grpo_loss(**{**small_batch(), "logits": x @ w}, **OPTIONS, **flags, backend=backend).loss

    leaves, expected = ([x.clone().requires_grad_() for x in (hidden, head)] for _ in range(2))
    loss(*expected).backward()
    calls.clear()
    checked = checkpoint(lambda x, w: loss(x, w, **flags), *leaves, use_reentrant=use_reentrant)
    assert len(calls) == 1
    checked.backward()
    assert len(calls) == 2
    for x, y in zip(leaves, expected):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_around_the_loss_alone_is_right_or_raises(backend, flags, use_reentrant):
    """The logits stand outside: reentrant checkpointing makes them a leaf, which inplace refuses."""
    leaf = small_batch()["logits"].requires_grad_()

    def loss(z: torch.Tensor) -> torch.Tensor:
        return gk.fused_grpo_loss(**{**small_batch(), "logits": z}, **OPTIONS, **flags, backend=backend).loss

    checked = checkpoint(loss, leaf.clone(), use_reentrant=use_reentrant)
    if use_reentrant and "inplace" in flags:
        with pytest.raises(RuntimeError, match="leaf"):
            checked.backward()
    else:
        checked.backward()
        torch.testing.assert_close(leaf.grad, gradient(small_batch(), **OPTIONS, backend=backend))


# --- determinism, threads, processes ----------------------------------------------------------------------------------------------------


def test_deterministic_algorithms_change_no_bit(backend, flags, poisoned_memory):
    assert torch.are_deterministic_algorithms_enabled()
    strict = outputs_and_gradient(small_batch(), **OPTIONS, **flags, backend=backend)
    torch.use_deterministic_algorithms(False)
    assert all(same_bits(x, y) for x, y in zip(strict, outputs_and_gradient(small_batch(), **OPTIONS, **flags, backend=backend)))


def wide_batch(rows: int = 67, vocab: int = 5000) -> dict[str, torch.Tensor]:
    """Enough rows for two threads, a number that does not divide."""
    ids = torch.randint(vocab, (rows, 3))
    return {
        "logits": torch.randn(rows, 3, vocab),
        "completion_ids": ids,
        "advantages": torch.randn(rows),
        "old_logps": torch.randn(rows, 3) - 9,
    }


def test_bits_do_not_depend_on_the_number_of_threads(backend, flags):
    inputs, threads = wide_batch(rows=2 if backend in EMULATED else 67), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(outputs_and_gradient(inputs, entropy_coef=0.1, **flags, backend=backend))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(same_bits(x, y) for x, y in zip(results[0], other))


def test_python_threads_may_call_at_once(backend, flags):
    batches = [wide_batch(rows=1 if backend in EMULATED else 16) for _ in range(4)]
    expected = [outputs_and_gradient(inputs, **flags, backend=backend) for inputs in batches]
    results: list = [None] * len(batches)

    def work(i: int) -> None:
        for _ in range(3):
            results[i] = outputs_and_gradient(batches[i], **flags, backend=backend)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    for got, want in zip(results, expected):
        assert all(same_bits(x, y) for x, y in zip(got, want))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.parametrize("how, used_before", [("DataLoader worker", True), ("bare fork", True), ("bare fork", False)])
def test_forked_children_get_the_same_bits_and_do_not_hang(how, used_before):
    """A child has none of its parent's OpenMP threads; whoever waits for them waits for ever."""
    script = f"""
        import multiprocessing, torch, grpo_kernels as gk
        torch.set_num_threads(2)
        torch.manual_seed(0)
        z, ids = torch.randn(64, 4, 1000), torch.randint(1000, (64, 4))
        (z @ torch.randn(1000, 500)).exp().sum()  # torch's OpenMP threads exist from here on
        if {used_before}:
            gk.token_logprobs(z, ids, backend="cpu")

        class Scored(torch.utils.data.Dataset):
            def __len__(self):
                return 2
            def __getitem__(self, i):
                return gk.token_logprobs(z, ids, backend="cpu")

        if {how!r} == "bare fork":
            context = multiprocessing.get_context("fork")
            queue = context.SimpleQueue()
            child = context.Process(target=lambda: queue.put(Scored()[0].tolist()), daemon=True)
            child.start()
            child.join(30)
            if child.is_alive():
                child.kill()
                raise SystemExit("the child hangs")
            got = torch.tensor(queue.get())
        else:
            loader = torch.utils.data.DataLoader(Scored(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=30)
            got = next(iter(loader))
        assert torch.equal(got, gk.token_logprobs(z, ids, backend="cpu"))
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert child.returncode == 0, child.stderr
