"""What only a GPU shows: no host synchronisation, streams, graphs, more than one device, more than 2^31 logits, memory, launches, compiles.

The numbers themselves are the other files' part: GRPO_KERNELS_TEST_BACKENDS=triton,cuda runs them there. All tensors here are put on
their device by name, whatever the device of the run is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from cases import same_bits
from device import device_of
from grpo_kernels import backends
from modes import FLAGS, OPTIONS, small_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MB = 1 << 20
VOCAB = 151936


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No default device, and no check of values, which would synchronise."""
    monkeypatch.delenv("GRPO_KERNELS_DEBUG", raising=False)
    with torch.device("cpu"):
        yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture(params=["triton", "cuda"])
def gpu_backend(request: pytest.FixtureRequest) -> str:
    reason = gk.available_backends()[request.param]
    if reason == "available" and device_of([request.param]) != "cuda":
        reason = "runs in Triton's interpreter"
    if reason != "available":
        pytest.skip(f"backend {request.param!r}: {reason}")
    return request.param


@pytest.fixture(params=FLAGS)
def flags(request: pytest.FixtureRequest) -> dict[str, bool]:
    return FLAGS[request.param]


def on(device: str | torch.device, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(device) for name, x in inputs.items()}


def wide_batch(rows: int = 64, vocab: int = VOCAB, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> dict[str, Any]:
    """Random rows in one sequence; every other token is masked."""
    logits = torch.empty(1, rows, vocab, dtype=dtype, device=device).normal_(0, 3)
    ids = torch.randint(vocab, (1, rows), device=device)
    mask = (torch.arange(rows, device=device) % 2 == 0)[None]
    near = torch.full((1, rows), -12.0, device=device)
    return {
        "logits": logits, "completion_ids": ids, "advantages": torch.ones(1, device=device), "old_logps": near, "ref_logps": near + 0.3,
        "completion_mask": mask,
    }  # fmt: skip


def outputs_and_gradient(inputs: dict[str, Any], **options: Any) -> list[Tensor]:
    leaf = inputs["logits"].detach().requires_grad_()
    out = gk.fused_grpo_loss(**{**inputs, "logits": leaf * 1}, **OPTIONS, **options)
    out.loss.backward()
    return [*(x.detach() for x in out), leaf.grad]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(got, want):
        torch.testing.assert_close(x.cpu(), y.cpu(), rtol=2e-5, atol=2e-6)


# --- what a user gets without asking ----------------------------------------------------------------------------------------------------


def test_the_default_on_a_gpu_is_one_of_its_own_backends(recwarn: pytest.WarningsRecorder) -> None:
    chosen = backends.get("", torch.device("cuda"), torch.bfloat16)
    usable = [name for name in ("triton", "cuda") if gk.available_backends()[name] == "available"]
    assert usable and chosen in [backends.get(name, torch.device("cuda"), torch.bfloat16) for name in usable]
    outputs_and_gradient(on("cuda", small_batch()))
    assert not [warning for warning in recwarn if "grpo_kernels" in str(warning.message)]
    assert_close(outputs_and_gradient(on("cuda", small_batch())), outputs_and_gradient(small_batch(), backend="torch"))


def test_a_tensor_on_another_device_is_named() -> None:
    inputs = on("cuda", small_batch())
    with pytest.raises(ValueError, match="completion_ids: expected a tensor on cuda"):
        gk.fused_grpo_loss(**{**inputs, "completion_ids": inputs["completion_ids"].cpu()})


@pytest.mark.parametrize("token_id", [-1, -100, 11, 2**31, 2**40])
def test_an_id_outside_the_vocabulary_is_nan_and_reads_nothing(gpu_backend: str, token_id: int) -> None:
    inputs = on("cuda", small_batch())
    inputs["completion_ids"][1, 0] = token_id
    logps = gk.token_logprobs(inputs["logits"], inputs["completion_ids"], backend=gpu_backend)
    assert logps[1, 0].isnan() and logps.isnan().sum() == 1
    inputs["completion_mask"][1, 0] = 0
    assert outputs_and_gradient(inputs, backend=gpu_backend)[0].isfinite()


# --- order and synchronisation ----------------------------------------------------------------------------------------------------------


def test_nothing_waits_for_the_gpu(gpu_backend: str, flags: dict[str, bool]) -> None:
    inputs = on("cuda", small_batch())
    rewards = torch.randn(8, device="cuda")

    def step() -> None:
        leaf = inputs["logits"].clone().requires_grad_()
        out = gk.fused_grpo_loss(**{**inputs, "logits": leaf * 1}, **OPTIONS, **flags, loss_type="dapo", backend=gpu_backend)
        (out.loss * 0.5).backward()
        gk.grpo_metrics(out, inputs["completion_mask"])
        gk.group_advantages(rewards, 4, backend=gpu_backend)
        gk.token_logprobs(inputs["logits"], inputs["completion_ids"], temperature=0.7, backend=gpu_backend)
        if "one_pass" not in flags:
            z = inputs["logits"].clone().requires_grad_() * 1
            sequence = {"importance_sampling_level": "sequence", **flags}
            gk.fused_grpo_loss(**{**inputs, "logits": z}, **OPTIONS, **sequence, backend=gpu_backend).loss.backward()

    step()  # compiles, loads modules
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_stream_of_its_own_sees_what_was_queued_before(gpu_backend: str, flags: dict[str, bool]) -> None:  # F19
    inputs, expected = on("cuda", small_batch()), outputs_and_gradient(small_batch(), backend="torch")
    outputs_and_gradient(inputs, **flags, backend=gpu_backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(stream):
            late = {**inputs, "logits": torch.full_like(inputs["logits"], torch.nan)}
            torch.cuda._sleep(10**7)  # whoever runs on another stream reads what is not there yet
            late["logits"].copy_(inputs["logits"])
            got = outputs_and_gradient(late, **flags, backend=gpu_backend)
        stream.synchronize()
        assert_close(got, expected)


def test_a_captured_step_replays_with_other_data(gpu_backend: str, flags: dict[str, bool]) -> None:
    def step(static: dict[str, Tensor], leaf: Tensor) -> tuple[Tensor, Tensor]:
        loss = gk.fused_grpo_loss(**{**static, "logits": leaf * 1}, **OPTIONS, **flags, backend=gpu_backend).loss
        (dlogits,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), dlogits

    static = on("cuda", small_batch())
    leaf = static["logits"].clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(static, leaf)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, dlogits = step(static, leaf)
    for factor in (1.0, -0.5, 3.0):
        with torch.no_grad():
            leaf.copy_(small_batch()["logits"] * factor)
            static["advantages"].copy_(small_batch()["advantages"] * factor)
        graph.replay()
        torch.cuda.synchronize()
        want = outputs_and_gradient({**static, "logits": leaf}, **flags, backend=gpu_backend)
        assert_close([loss, dlogits], [want[0], want[-1]])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_device_that_is_not_the_current_one(gpu_backend: str, flags: dict[str, bool]) -> None:
    assert torch.cuda.current_device() == 0
    got = outputs_and_gradient(on("cuda:1", small_batch()), **flags, backend=gpu_backend)
    assert all(x.device.index == 1 for x in got) and torch.cuda.current_device() == 0
    assert_close(got, outputs_and_gradient(small_batch(), backend="torch"))


def test_deterministic_algorithms_are_enough(gpu_backend: str, flags: dict[str, bool]) -> None:
    inputs = on("cuda", small_batch())
    want = outputs_and_gradient(inputs, **flags, backend=gpu_backend)
    torch.use_deterministic_algorithms(True)
    try:
        got = outputs_and_gradient(inputs, **flags, backend=gpu_backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same_bits(x, y) for x, y in zip(got, want))


# --- sizes ------------------------------------------------------------------------------------------------------------------------------


def exact_row(inputs: dict[str, Any], row: int, weight: float) -> tuple[Tensor, Tensor]:
    """logp and dlogits of one row in float64; policy term and k3 of a token with ratio below or above the clip range at A = 1."""
    z = inputs["logits"][0, row].double()
    p, token_id = z.softmax(-1), inputs["completion_ids"][0, row]
    logp = z.log_softmax(-1)[token_id]
    ratio = (logp - inputs["old_logps"][0, row]).exp()
    slope = -ratio if ratio <= 1.2 else torch.zeros_like(ratio)
    slope = weight * (slope + 0.1 * (1 - (inputs["ref_logps"][0, row] - logp).exp()))
    dlogits = -slope * p
    dlogits[token_id] += slope
    return logp, dlogits


@pytest.mark.parametrize("rows, vocab", [(2**31 // VOCAB + 3, VOCAB), (70_000, 1000)], ids=["N V > 2^31", "T = 70,000"])
def test_large_numbers_of_rows_and_logits(gpu_backend: str, rows: int, vocab: int) -> None:
    """Rows at both ends and on both sides of 2^31 elements; every second one is masked and its gradient is 0."""
    size = rows * vocab * 2
    if torch.cuda.mem_get_info()[0] < 3 * size:
        pytest.skip(f"needs {3 * size / 2**30:.0f} GiB of free memory")
    inputs = wide_batch(rows, vocab)
    active = int(inputs["completion_mask"].sum())
    logps = gk.token_logprobs(inputs["logits"], inputs["completion_ids"], mask=inputs["completion_mask"], backend=gpu_backend)
    edge = min(2**31 // vocab, rows - 1)
    chosen = [row for row in (0, 2, rows // 2 // 2 * 2, edge - edge % 2, edge + edge % 2, (rows - 1) // 2 * 2) if row < rows]
    expected = [exact_row(inputs, row, 1 / active) for row in chosen]
    z = _Storage.apply(torch.zeros((), requires_grad=True), inputs["logits"])
    options = {"beta": 0.1, "loss_type": "bnpo", "one_pass": True, "inplace": True, "backend": gpu_backend}
    gk.fused_grpo_loss(**{**inputs, "logits": z}, **options).loss.backward()
    dlogits = inputs["logits"]
    for row, (logp, want) in zip(chosen, expected):
        torch.testing.assert_close(logps[0, row].double(), logp, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(dlogits[0, row].double(), want, rtol=2**-8, atol=1e-9)
    for masked in range(1, rows, max(rows // 40 * 2, 2)):
        assert not dlogits[0, masked].any() and logps[0, masked] == 0


class _Storage(torch.autograd.Function):
    """Logits that are an intermediate result and not a view, without a copy of them."""

    @staticmethod
    def forward(ctx, anchor, storage):  # type: ignore[no-untyped-def]
        return torch.empty(0, dtype=storage.dtype, device=storage.device).set_(storage)

    @staticmethod
    def backward(ctx, dlogits):  # type: ignore[no-untyped-def]
        return None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_the_gradient_and_in_place_nothing(gpu_backend: str, flags: dict[str, bool], dtype: torch.dtype) -> None:
    inputs = wide_batch(1024, VOCAB, dtype)

    def extra() -> int:
        z = _Storage.apply(torch.zeros((), requires_grad=True), inputs["logits"])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gk.fused_grpo_loss(**{**inputs, "logits": z}, **OPTIONS, **flags, backend=gpu_backend).loss.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    extra()  # what is allocated once
    got, rest = extra(), 2 * MB + 64 * 1024
    assert got <= rest + (0 if "inplace" in flags else inputs["logits"].nbytes), got
    assert "inplace" in flags or got >= inputs["logits"].nbytes, "the probe does not even see the gradient"


# --- launches and compiles --------------------------------------------------------------------------------------------------------------


def kernels_launched(step: Any) -> tuple[list[str], int]:
    """Names of the kernels that are not torch's own, and how many there were in all."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    others = ("at::", "at_cuda", "cub::", "Memcpy", "Memset")
    return [name for name in names if not any(part in name for part in others)], len(names)


def test_a_step_is_at_most_three_launches_beside_torchs_own(gpu_backend: str, flags: dict[str, bool]) -> None:
    inputs = wide_batch(64, 32000)
    storage = inputs.pop("logits")

    def step() -> None:
        z = _Storage.apply(torch.zeros((), requires_grad=True), storage)
        gk.fused_grpo_loss(z, **inputs, **OPTIONS, **flags, backend=gpu_backend).loss.backward()

    ours, every = kernels_launched(step)
    print(f"{gpu_backend} {'+'.join(flags) or 'default'}: {len(ours)} of {every} kernels are ours: {ours}")
    assert 1 <= len(ours) <= 3, ours


def test_triton_compiles_once_for_all_lengths_and_options(tmp_path: Path) -> None:
    """Counted in a fresh cache folder; 1 and multiples of 16 are the numbers on which Triton would specialise."""
    if gk.available_backends()["triton"] != "available" or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("no backend 'triton' on the GPU")
    program = """
        import os, pathlib, sys, torch, grpo_kernels as gk

        def compiled():
            return sum(1 for _ in pathlib.Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))

        def step(length, vocab=1024, **options):
            z = torch.randn(2, length, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 1
            tokens = {name: torch.randn(2, length, device="cuda") - 7 for name in ("old_logps", "ref_logps")}
            ids = torch.randint(vocab, (2, length), device="cuda")
            gk.fused_grpo_loss(z, ids, torch.ones(2, device="cuda"), **tokens, **options, backend="triton").loss.backward()

        modes = ({}, {"inplace": True}, {"one_pass": True}, {"one_pass": True, "inplace": True})
        counts = []
        for number, length in enumerate((2, 1, 16, 17, 31, 48, 1000)):
            for mode in modes:
                step(length, temperature=1 + number / 8, beta=number / 4, epsilon=0.1 + number / 50, entropy_coef=number % 2 / 10, **mode)
            counts.append(compiled())
        print(*counts)
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    counts = list(map(int, child.stdout.split()))
    assert counts[0] > 0 and counts[-1] == counts[0], counts


@pytest.mark.parametrize("mode", ["default", "one_pass+inplace"])
def test_torch_compile_takes_the_whole_step(gpu_backend: str, mode: str) -> None:
    inputs = on("cuda", small_batch())
    logits = inputs.pop("logits")
    head = torch.eye(11, device="cuda")

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        return gk.fused_grpo_loss(hidden @ head, **inputs, **OPTIONS, **FLAGS[mode], backend=gpu_backend).loss

    torch._dynamo.reset()
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        leaves = [logits.clone().requires_grad_(), head.clone().requires_grad_()]
        value = function(*leaves)
        value.backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves)])
    assert_close(results[1], results[0])
