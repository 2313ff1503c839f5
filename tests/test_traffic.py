"""How often the logits are read and their gradient is written, row by row, and that what is skipped changes no bit.

Backend `cpu` is counted by the compiler: with -fsanitize=thread it calls a function at every load and store, and tests/native gives these
functions instead of ThreadSanitizer's library, so no kernel reports about itself. The sources are built once more for that, at -O1: every
instruction set that this machine has, behind the bindings that users have. Backend `torch` is counted where torch dispatches its operators.

A sweep is one walk over a row. The kernels look twice at each pack of columns (its maximum, then exponentials), the second time from the L1
cache, so a walk may step back by WINDOW bytes at most, and loads no byte more than twice. The token's own logit is read, and its gradient
written, once more by itself: that element is counted apart.

Prefetches are not counted: within 5 KiB behind what is read they may fetch what is beside a row, and fault nowhere (test_unread.py).
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels as gk
import oracle
from cases import DTYPES, EMULATED, MODES, batch, run, same_bits
from grpo_kernels import backends
from grpo_kernels.backends import Backend, get
from grpo_kernels.options import ObjectiveParams

# One process runs this file (pytest -n --dist loadfile), so that the counting build is made once.

CSRC, NATIVE = Path(__file__).resolve().parents[1] / "csrc", Path(__file__).resolve().parent / "native"
AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
ON_X86 = platform.machine() in ("x86_64", "AMD64")
ISAS = {"baseline": (), "avx2": AVX2, "avx512": AVX512} if ON_X86 else {"portable": ()}

WINDOW = 4096  # the largest pack (AVX-512: 1,024 floats); an eighth of an L1 cache
VOCABS = (5003, 5120)  # more than two windows even in 16 bits; with a partial pack, and without one on every instruction set
ACCESS = np.dtype([("address", "u8"), ("bytes", "u4"), ("is_write", "u4")])  # Access of native/count_traffic.cpp


class Counts(NamedTuple):
    """Walks over a row, the fewest and the most times that one of its bytes was accessed in them, and accesses to the target alone."""

    sweeps: int
    fewest: int
    most: int
    target: int


NOT_AT_ALL = Counts(0, 0, 0, 0)
ONE_LOOK = Counts(1, 1, 1, 0)


class Traffic:
    """The memory accesses of the kernels, in order."""

    def __init__(self, accesses: np.ndarray) -> None:
        self.accesses = accesses

    def within(self, tensor: Tensor) -> np.ndarray:
        """Those to the bytes that a tensor spans, gaps between its rows included; addresses count from its start."""
        span = (sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()
        start, accesses = np.uint64(tensor.data_ptr()), self.accesses
        inside = accesses[(accesses["address"] < start + np.uint64(span)) & (accesses["address"] + accesses["bytes"] > start)].copy()
        assert (inside["address"] >= start).all() and (inside["address"] + inside["bytes"] <= start + np.uint64(span)).all(), "past an edge"
        inside["address"] -= start
        return inside

    def reads(self, row: Tensor, target: int) -> Counts:
        return self._counts(row, target, is_write=False)

    def writes(self, row: Tensor, target: int) -> Counts:
        return self._counts(row, target, is_write=True)

    def _counts(self, row: Tensor, target: int, is_write: bool) -> Counts:
        accesses, size = self.within(row), row.element_size()
        accesses = accesses[accesses["is_write"] == is_write]
        by_itself = (accesses["bytes"] == size) & (accesses["address"] == target * size)
        walk = accesses[~by_itself]
        begin, end = walk["address"].astype(np.int64), (walk["address"] + walk["bytes"]).astype(np.int64)
        touched = np.zeros(len(row) * size + 1, dtype=np.int64)
        np.add.at(touched, begin, 1)
        np.add.at(touched, end, -1)
        touched = touched.cumsum()[:-1]
        return Counts(_sweeps(begin.tolist(), end.tolist()), int(touched.min()), int(touched.max()), int(by_itself.sum()))


def _sweeps(begin: list[int], end: list[int]) -> int:
    sweeps, farthest = 0, None
    for first, last in zip(begin, end):
        if farthest is None or first < farthest - WINDOW:
            sweeps, farthest = sweeps + 1, last
        farthest = max(farthest, last)
    return sweeps


class CountingBuild:
    """The native module of one instruction set whose row kernels are counted."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.library = ctypes.CDLL(module.__file__)
        self.library.traffic_stop.restype = ctypes.c_int64
        self.log = np.zeros(1 << 19, dtype=ACCESS)

    def during(self, call: Callable[[], object]) -> Traffic:
        self.library.traffic_start(ctypes.c_void_p(self.log.ctypes.data), ctypes.c_int64(len(self.log)))
        call()
        count = self.library.traffic_stop()
        assert 0 < count <= len(self.log), "nothing was counted, or more than there is room for"
        return Traffic(self.log[:count].copy())


@pytest.fixture(scope="session")
def counting_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native module from this checkout's sources, every access of its row kernels counted: 15 s, half a minute on a busy machine."""
    if "cpu" not in os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "cpu"):
        pytest.skip("GRPO_KERNELS_TEST_BACKENDS leaves out cpu")
    import pybind11

    compiler, folder = shutil.which("g++"), tmp_path_factory.mktemp("counting")
    assert compiler, "g++ is needed: clang leaves out what a later access of the same block implies, and would not count it"
    common = (compiler, "-c", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", f"-I{CSRC}")
    counted = ("-O1", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-fsanitize=thread", "-include", NATIVE / "plain_stores.h")
    include = (f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}")
    objects: dict[str, tuple] = {
        "bindings": (*include, CSRC / "bindings.cpp"),
        **{f"rows_{isa}": (*counted, *flags, f"-DGRPO_ISA={isa}", CSRC / "cpu/rows.cpp") for isa, flags in ISAS.items()},
        "dispatch": (CSRC / "cpu/dispatch.cpp",),
        "advantages": (CSRC / "cpu/advantages.cpp",),
        "count": ("-O1", NATIVE / "count_traffic.cpp"),
        "planted": (*counted, NATIVE / "planted.cpp"),
    }

    def execute(*command: str | Path) -> None:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: execute(*common, *objects[name], "-o", folder / f"{name}.o"), objects))
    wrapped = [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")]
    # Without -fsanitize here, ThreadSanitizer's library stays out; what count_traffic.cpp lacks of it would fail the import.
    execute(compiler, "-shared", "-fopenmp", *wrapped, *folder.glob("*.o"), "-o", folder / "_C.so")
    return folder / "_C.so"


@pytest.fixture(scope="session", params=ISAS)
def counting(request: pytest.FixtureRequest, counting_module: Path) -> CountingBuild:
    copy = counting_module.with_name(f"{request.param}.so")  # a module chooses its instruction set once
    shutil.copy(counting_module, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_KERNELS_ISA", request.param)
        spec = importlib.util.spec_from_file_location(f"counting_{request.param}._C", copy)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if request.param not in module.isas():
            pytest.skip(f"this machine has no {request.param}")
        assert module.isa() == request.param
    return CountingBuild(module)


@pytest.fixture
def counted_cpu(counting: CountingBuild, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Backend `cpu`, from here to the end of the test over the counting module, and on one thread."""
    from grpo_kernels.backends import native

    cpu = native.over_cpu(counting.module)
    monkeypatch.setattr(backends, "_load", {"cpu": cpu}.get)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield cpu
    torch.set_num_threads(threads)


KINDS = [
    ["active", "masked", "no advantage", "active", "masked"],
    ["clipped", "active", "masked", "no weight", "active"],
]
TERMS = ("no penalty", "kl", "entropy")


def has_gradient(kind: str, term: str) -> bool:
    """Whether dloss / dlogp or dloss / dentropy of such a row is not 0."""
    by_term = {"no penalty": (), "kl": ("no advantage", "clipped"), "entropy": ("no advantage", "clipped", "no weight")}
    return kind == "active" or kind in by_term[term]


def may_keep(kind: str, term: str) -> bool:
    """Whether such a row's gradient may turn out not to be 0, as far as is known before its log-probability."""
    return has_gradient(kind, term) or kind == "clipped"


class Case:
    """Rows of every kind at the waist, strided and unaligned; masked ones hold what must not be read."""

    def __init__(self, dtype: torch.dtype, vocab: int, term: str) -> None:
        g = torch.Generator().manual_seed(vocab)
        B, T = len(KINDS), len(KINDS[0])

        def where(kind: str, value: float, otherwise: float) -> Tensor:
            return torch.tensor([[value if k == kind else otherwise for k in row] for row in KINDS])

        masked = where("masked", 1, 0).bool()
        self.kinds = list(itertools.chain(*KINDS))
        self.buffer = torch.full((B, T + 1, vocab + 5), torch.nan, dtype=dtype)
        self.logits = self.buffer[:, :T, 3 : vocab + 3]
        self.logits.copy_(torch.randn(B, T, vocab, generator=g) * 3)
        self.logits[masked] = torch.nan
        ids = torch.randint(vocab // 3, vocab // 2, (B, T), generator=g)
        self.targets = ids.flatten().tolist()
        logps = self.logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        unread = torch.where(masked, torch.nan, 0)
        self.ids = torch.where(masked, 1 << 40, ids)
        self.active = (~masked).byte()
        self.temperature = 1 + unread
        self.per_token = {
            "advantages": where("no advantage", 0, 1) + unread,
            "old_logps": logps - where("clipped", 1, 0.05) + unread,
            "ref_logps": logps + 0.3 + unread if term == "kl" else None,
            "policy_weights": 0.5 + unread,
            "weights": where("no weight", 0, 0.1) + unread,
            "entropy_weights": 0.01 + unread if term == "entropy" else None,
        }
        self.params = ObjectiveParams(beta=0.1 if term == "kl" else 0.0).for_kernels().tolist()
        self.dentropy = None if self.per_token["entropy_weights"] is None else -self.per_token["entropy_weights"]
        self.logps, self.row_max, self.log_sum, self.entropy, self.loss, self.policy_loss, self.dlogps, self.kl = torch.empty(8, B, T)
        self.clipped = torch.empty(B, T, dtype=torch.int8)

    def forward(self, backend: Backend) -> None:
        outputs = (self.logps, self.row_max, self.log_sum, self.entropy)
        backend.logprobs_forward(self.logits, self.ids, self.active, self.temperature, *outputs)

    def objective(self, backend: Backend) -> None:
        outputs = (self.loss, self.policy_loss, self.dlogps, self.kl, self.clipped)
        entropy = None if self.dentropy is None else self.entropy
        backend.objective(self.logps, entropy, *self.per_token.values(), self.active, self.params, *outputs)

    def backward(self, backend: Backend, dlogits: Tensor) -> None:
        saved = (self.row_max, self.log_sum, self.entropy)
        upstream = (self.dlogps, self.dentropy, dlogits)
        backend.logprobs_backward(self.logits, self.ids, self.active, self.temperature, *saved, *upstream)

    def one_pass(self, backend: Backend, dlogits: Tensor) -> None:
        inputs = (self.logits, self.ids, self.active, self.temperature, *self.per_token.values(), self.params)
        outputs = (self.logps, self.entropy, self.loss, self.policy_loss, self.kl, self.clipped, dlogits)
        backend.loss_and_grad(*inputs, *outputs)

    def rows(self, tensor: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        return zip(self.kinds, tensor.flatten(0, 1) if tensor.is_contiguous() else itertools.chain(*tensor), self.targets)

    def gradient(self, inplace: bool) -> Tensor:
        return self.logits if inplace else torch.empty(self.logits.shape, dtype=self.logits.dtype)


def assert_read_once(reads: Counts, kind: str) -> None:
    assert reads.sweeps == reads.target == 1, kind
    assert (reads.fewest, reads.most) in ((1, 1), (1, 2), (2, 2)), kind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_forward_reads_active_rows_once_and_masked_ones_nowhere(
    counting: CountingBuild, counted_cpu: Backend, vocab: int, dtype: torch.dtype
) -> None:
    case = Case(dtype, vocab, "kl")
    traffic = counting.during(lambda: case.forward(counted_cpu))
    for kind, row, target in case.rows(case.logits):
        reads = traffic.reads(row, target)
        assert traffic.writes(row, target) == NOT_AT_ALL
        if kind == "masked":
            assert reads == NOT_AT_ALL
        else:
            assert_read_once(reads, kind)
    assert_nothing_outside_the_rows(traffic, case)
    for tensor in (case.ids, case.temperature):
        assert_read_where_active(traffic, case, tensor)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_backward_reads_only_rows_with_a_gradient_and_writes_each_row_once(
    counting: CountingBuild, counted_cpu: Backend, vocab: int, dtype: torch.dtype, term: str, inplace: bool
) -> None:
    case = Case(dtype, vocab, term)
    case.forward(counted_cpu)
    between = counting.during(lambda: case.objective(counted_cpu))
    assert len(between.within(case.buffer)) == 0, "the objective has no business with logits"
    for tensor in case.per_token.values():
        assert_read_where_active(between, case, tensor)
    dlogits = case.gradient(inplace)
    traffic = counting.during(lambda: case.backward(counted_cpu, dlogits))
    for kind, row, target in case.rows(case.logits):
        assert traffic.reads(row, target) == (ONE_LOOK._replace(target=1) if has_gradient(kind, term) else NOT_AT_ALL), kind
    for kind, row, target in case.rows(dlogits):
        assert traffic.writes(row, target) == ONE_LOOK._replace(target=int(has_gradient(kind, term))), kind
        assert inplace or traffic.reads(row, target) == NOT_AT_ALL
    assert_nothing_outside_the_rows(traffic, case)
    assert_zeros_where_no_gradient(case, dlogits, term)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_one_pass_comes_back_only_to_rows_with_a_gradient(
    counting: CountingBuild, counted_cpu: Backend, vocab: int, dtype: torch.dtype, term: str, inplace: bool
) -> None:
    """Between its sweeps it may keep a float32 row's exponentials where the gradient will be: these are written, and read in the logits'
    stead by the second sweep."""
    case = Case(dtype, vocab, term)
    dlogits = case.gradient(inplace)
    traffic = counting.during(lambda: case.one_pass(counted_cpu, dlogits))
    for (kind, z, target), (_, dz, _) in zip(case.rows(case.logits), case.rows(dlogits)):
        reads, writes = traffic.reads(z, target), traffic.writes(dz, target)
        second = NOT_AT_ALL if inplace else traffic.reads(dz, target)
        if kind == "masked":
            assert (reads, second, writes) == (NOT_AT_ALL, NOT_AT_ALL, ONE_LOOK)
            continue
        sweeps = reads.sweeps + second.sweeps
        most_stores = 2 if dtype == torch.float32 and term != "entropy" and may_keep(kind, term) else 1
        assert writes.sweeps <= most_stores and writes.fewest >= 1 and writes.most <= most_stores, (kind, writes)
        if has_gradient(kind, term):
            assert 1 <= sweeps <= 2 and reads.fewest >= 1 and reads.most + second.most <= 3 and writes.target == 1, (kind, reads, second)
        else:
            assert_read_once(reads, kind)
            assert second == NOT_AT_ALL and writes.target == 0, (kind, second)
    assert_nothing_outside_the_rows(traffic, case)
    for tensor in (case.ids, case.temperature, *case.per_token.values()):
        assert_read_where_active(traffic, case, tensor)
    assert_zeros_where_no_gradient(case, dlogits, term)


def assert_nothing_outside_the_rows(traffic: Traffic, case: Case) -> None:
    in_rows = sum(len(traffic.within(row)) for _, row, _ in case.rows(case.logits))
    assert len(traffic.within(case.buffer)) == in_rows, "read or written between rows, or at the spare position"


def assert_read_where_active(traffic: Traffic, case: Case, tensor: Tensor | None) -> None:
    if tensor is None:
        return
    size = tensor.element_size()
    read = {int(access["address"]) // size for access in traffic.within(tensor)}
    assert read == {row for row, kind in enumerate(case.kinds) if kind != "masked"}


def assert_zeros_where_no_gradient(case: Case, dlogits: Tensor, term: str) -> None:
    for kind, row, _ in case.rows(dlogits):
        zeros = torch.zeros_like(row)
        assert same_bits(row, zeros) != has_gradient(kind, term), kind


@pytest.mark.parametrize("flags", [{}, {"inplace": True}, {"one_pass": True}, {"one_pass": True, "inplace": True}], ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_public_call_adds_no_traffic(counting: CountingBuild, counted_cpu: Backend, dtype: torch.dtype, flags: dict[str, bool]) -> None:
    """From the call to the end of backward(): one sweep for the loss and at most one for the gradient, whose upstream factor is 1."""
    case = Case(dtype, VOCABS[0], "no penalty")
    leaf = case.buffer.clone().requires_grad_()
    storage = leaf.clone()
    logits = storage[:, :, 3 : VOCABS[0] + 3]  # the spare position is the call's to leave out
    ids, mask = case.ids, case.active
    names = ("advantages", "old_logps", "policy_weights")
    inputs = {name: case.per_token[name] for name in names} | {"token_weights": case.per_token["weights"]}
    gradients = []
    logits.register_hook(gradients.append)

    def step() -> None:
        gk.fused_grpo_loss(logits, ids, completion_mask=mask, **inputs, **flags, backend="cpu").loss.backward()

    traffic = counting.during(step)
    (dlogits,) = gradients
    for (kind, z, target), (_, dz, _) in zip(case.rows(logits[:, :-1].detach()), case.rows(dlogits[:, :-1])):
        reads, writes = traffic.reads(z, target), traffic.writes(dz, target)
        second = 0 if "inplace" in flags else traffic.reads(dz, target).sweeps
        most_stores = 2 if dtype == torch.float32 and "one_pass" in flags and may_keep(kind, "no penalty") else 1
        if kind == "masked":
            assert (reads, second, writes) == (NOT_AT_ALL, 0, ONE_LOOK)
        elif not has_gradient(kind, "no penalty"):
            assert_read_once(reads, kind)
            assert second == 0 and writes.target == 0 and 1 <= writes.fewest <= writes.most <= most_stores
        else:
            assert 1 <= reads.sweeps + second <= 2 and reads.most <= 3 and 1 <= writes.fewest <= writes.most <= most_stores
    for spare in (*logits[:, -1].detach(), *dlogits[:, -1]):
        assert traffic.reads(spare, 0) == NOT_AT_ALL


def test_scaling_the_gradient_by_one_touches_nothing(counting: CountingBuild, counted_cpu: Backend) -> None:
    case = Case(torch.bfloat16, VOCABS[0], "no penalty")

    def scale_by(factor: float) -> Traffic:
        # A forward beside it: a count of nothing at all would be a broken counter.
        def call() -> None:
            case.forward(counted_cpu)
            counted_cpu.scale(dlogits, torch.tensor(factor))

        return counting.during(call)

    dlogits = torch.ones(1, 1, VOCABS[0], dtype=torch.bfloat16)
    assert len(scale_by(1.0).within(dlogits)) == 0
    traffic = scale_by(2.0)
    assert traffic.reads(dlogits[0, 0], 7) == traffic.writes(dlogits[0, 0], 7) == ONE_LOOK


def test_planted_traffic_is_seen(counting: CountingBuild, counted_cpu: Backend) -> None:
    case = Case(torch.float32, VOCABS[0], "no penalty")
    rows = {kind: (row, target) for kind, row, target in case.rows(case.logits)}
    (active, target), (masked, masked_target) = rows["active"], rows["masked"]
    copy, filled = torch.empty(2, VOCABS[1])
    vocab = ctypes.c_int64(VOCABS[0])

    def address(row: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(row.data_ptr())

    def forward_and_more() -> None:
        case.forward(counted_cpu)
        counting.library.planted_sweep(address(active), vocab)
        counting.library.planted_copy(address(copy), address(masked), vocab)
        counting.library.planted_fill(address(filled), ctypes.c_int64(len(filled)))
        counting.library.planted_fill(address(filled), ctypes.c_int64(len(filled)))

    traffic = counting.during(forward_and_more)
    reads = traffic.reads(active, target)
    assert (reads.sweeps, reads.most, reads.target) == (2, 3, 2)
    assert traffic.reads(masked, masked_target) == ONE_LOOK
    assert traffic.writes(copy[: VOCABS[0]], 7) == ONE_LOOK
    assert traffic.writes(filled, 7) == Counts(sweeps=2, fewest=2, most=2, target=0)


def test_no_access_escapes_the_compiler() -> None:
    """It reports what is C++ and not what an intrinsic does: the only ones that touch memory are those that plain_stores.h replaces."""
    sources = "\n".join(path.read_text() for path in (CSRC / "cpu").iterdir())
    touching = set(re.findall(r"\b_mm\d*_\w*(?:load|store|stream_|gather|scatter|maskmov|lddqu)\w*", sources))
    replaced = set(re.findall(r"#define (\w+)\(", (NATIVE / "plain_stores.h").read_text()))
    assert touching <= replaced
    assert not re.search(r"\basm\b|__builtin_ia32|no_sanitize", sources)


class RowReads(TorchDispatchMode):
    """How often each row of two tensors is read or written by torch's operators. What is not known to take some rows takes all."""

    def __init__(self, rows: Tensor, dlogits: Tensor) -> None:
        super().__init__()
        self.index = torch.arange(rows.shape[0] * rows.shape[1]).view(rows.shape[:2])
        self.storages = {name: x.untyped_storage().data_ptr() for name, x in (("logits", rows), ("dlogits", dlogits))}
        self.counts = {name: torch.zeros(self.index.numel(), dtype=torch.int64) for name in ("logits", "dlogits")}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for position, x in enumerate(args):
            for name, storage in self.storages.items():
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage and not func.is_view:
                    self.counts[name] += self._rows(func, position, args).bincount(minlength=self.index.numel())
        return func(*args, **(kwargs or {}))

    def _rows(self, func: Any, position: int, args: Any) -> Tensor:
        by_index = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
        return self.index[tuple(args[1])].flatten() if by_index and position == 0 else self.index.flatten()


def counted_rows(case: Case, dlogits: Tensor, call: Callable[[], object]) -> tuple[list[int], list[int]]:
    with RowReads(case.logits, dlogits) as reads:
        call()
    return reads.counts["logits"].tolist(), reads.counts["dlogits"].tolist()


@pytest.mark.parametrize("term", TERMS)
def test_torch_gathers_only_the_rows_it_needs(term: str) -> None:
    case, backend = Case(torch.bfloat16, 37, term), get("torch", torch.device("cpu"), torch.bfloat16)
    needed = [int(kind != "masked") for kind in case.kinds]
    used = [int(has_gradient(kind, term)) for kind in case.kinds]
    dlogits = case.gradient(inplace=False)
    assert counted_rows(case, dlogits, lambda: case.forward(backend))[0] == needed
    assert counted_rows(case, dlogits, lambda: case.objective(backend))[0] == [0] * len(needed)
    assert counted_rows(case, dlogits, lambda: case.backward(backend, dlogits)) == (used, [1] * len(needed))
    assert_zeros_where_no_gradient(case, dlogits, term)
    both = [n + u for n, u in zip(needed, used)]
    assert counted_rows(case, dlogits, lambda: case.one_pass(backend, dlogits)) == (both, [1] * len(needed))


def test_planted_traffic_is_seen_in_torch() -> None:
    case, backend = Case(torch.float32, 37, "kl"), get("torch", torch.device("cpu"), torch.float32)

    def forward_and_more() -> None:
        case.forward(backend)
        case.logits.isnan()
        _ = case.logits[0, 0] + 1  # of a view, so a whole tensor for all that is known
        _ = case.logits[torch.tensor([0]), torch.tensor([1])]

    planted = [int(kind != "masked") + 2 + (row == 1) for row, kind in enumerate(case.kinds)]
    assert counted_rows(case, case.gradient(inplace=False), forward_and_more)[0] == planted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_change_no_bit_of_the_others(backend: str, dtype: torch.dtype, mode: str) -> None:
    """The long way round is the batch that never had them."""
    inputs = batch(5, (3, 8, 1025), dtype, temperature=0.8)
    mask = inputs.pop("completion_mask")
    inputs["advantages"] = inputs["advantages"][:, None].expand(3, 8).contiguous()
    inputs["token_weights"] = torch.rand(3, 8, generator=torch.Generator().manual_seed(5))
    alone = {name: x[mask][None] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    options = {"beta": 0.04, "entropy_coef": 0.01}
    for x in inputs.values():
        if isinstance(x, Tensor) and x.is_floating_point():
            x[~mask] = torch.nan
    inputs["completion_ids"][~mask] = -100
    among = run(inputs | {"completion_mask": mask} | options, backend, mode)
    want = run(alone | options, backend, mode)
    for name in ("logps", "entropy", "kl", "clipped"):
        assert same_bits(getattr(among.output, name)[mask], getattr(want.output, name)[0]), name
    assert same_bits(among.dlogits[mask], want.dlogits[0])
    assert same_bits(among.dlogits[~mask], torch.zeros_like(among.dlogits[~mask]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_coefficients_get_what_the_long_way_gives(backend: str, dtype: torch.dtype, mode: str) -> None:
    """The long way round is float64 autograd through the whole loss: exactly 0 for these rows. The others and the log-probs keep the bits
    that they have where every row has an advantage."""
    inputs = batch(6, (4, 6, 1025), dtype)
    del inputs["ref_logps"]
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].repeat(1, 6)
    full = run(inputs | {"advantages": advantages}, backend, mode)
    some = advantages.clone()
    some[:, ::2] = 0
    result = run(inputs | {"advantages": some}, backend, mode)

    long_way = oracle.grpo(**inputs | {"advantages": some}).dlogits
    without = (long_way == 0).all(-1)
    clipped = without & inputs["completion_mask"] & (some != 0)
    assert clipped.any() and (result.output.clipped != 0)[clipped].all(), "strictly clipped rows are among them"
    assert same_bits(result.dlogits[without], torch.zeros_like(result.dlogits[without]))
    assert same_bits(result.dlogits[~without], full.dlogits[~without])
    for name in ("logps", "entropy"):
        assert same_bits(getattr(result.output, name), getattr(full.output, name))


ON_POLICY = [
    *({"loss_type": name} for name in ("grpo", "sapo", "reinforce", "vespo", "bnpo", "dapo", "luspo")),
    {"loss_type": "dr_grpo", "max_completion_length": 8},
    {"loss_type": "cispo", "epsilon_high": 3.0},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence_token"},
    {"kl_bias_correction": True},
    {"kl_bias_correction": True, "importance_sampling_level": "sequence"},
    {"epsilon": 0.0, "dual_clip": 1.5, "delta": 1.0},
]


@pytest.mark.parametrize("options", ON_POLICY, ids=lambda options: "-".join(map(str, options.values())))
def test_on_policy_is_the_same_to_the_last_bit_as_old_logps_of_its_own(backend: str, options: dict[str, Any]) -> None:
    inputs = batch(7, (2, 3, 1025) if backend in EMULATED else (3, 8, 1025), torch.bfloat16, temperature=0.7)
    ids, mask = inputs["completion_ids"], inputs["completion_mask"]
    old = gk.token_logprobs(inputs["logits"], ids, mask=mask, temperature=0.7, backend=backend)
    token_level = "importance_sampling_level" not in options and options.get("loss_type") != "vespo"
    options = options | {"beta": 0.04, "entropy_coef": 0.01}
    for mode in MODES if token_level else [mode for mode in MODES if "one_pass" not in mode]:
        given = run(inputs | options | {"old_logps": old}, backend, mode)
        none = run(inputs | options | {"old_logps": None}, backend, mode)
        for name, ours, theirs in zip(none.output._fields, none.output, given.output):
            assert same_bits(ours.detach(), theirs.detach()), (mode, name)
        assert same_bits(none.dlogits, given.dlogits), mode
