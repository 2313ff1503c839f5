"""The CUDA kernels on a CPU, in every split of a row over blocks: parts of a row, bits, which kernels run and how often, barriers.

`make test-emulated` builds the module and sets everything up. What it cannot show is said in csrc/host/cuda_on_host.h; what nvcc makes of
the kernels is in test_cuda_compiled.py; faults that it has to see are planted in test_cuda_sanitized.py.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
import oracle
from cases import DTYPES, LAYOUTS, MODES, assert_matches, batch, generator, pairwise, run, same_bits
from grpo_kernels import backends
from grpo_kernels.options import ObjectiveParams

pytestmark = pytest.mark.emulated("cuda_on_host")

ON = {"backend": "cuda_on_host"}
SPLITS = (1, 2, 4, 8)
KERNELS = ("logprobs_forward", "logprobs_backward", "loss_and_grad", "scale", "objective", "group_advantages", "process_advantages")
SPLIT_H = Path(__file__).resolve().parents[1] / "csrc/cuda/split.h"
VECTORS = 2  # of 16 bytes, a thread's step


@pytest.fixture(autouse=True)
def module() -> Iterator[ModuleType]:
    """The kernels' module as it begins: the table chooses the split, on sm_90, and nothing has run. At the end nothing was wrong, unless
    the test asked for it and forgot."""
    assert gk.available_backends()["cuda_on_host"] == "available", gk.available_backends()["cuda_on_host"]
    module = sys.modules["_cuda_on_host"]
    module.host.forget()
    yield module
    reports = module.host.reports()
    module.cuda.force_split(0)
    module.host.drop_barrier("")
    module.host.set_arch(90)
    module.host.forget()
    assert reports == []


def launched(module: ModuleType) -> dict[str, dict[int, int]]:
    """kernel -> split -> how often, since the last question."""
    found: dict[str, dict[int, int]] = {}
    for kernel, split, count in module.host.launches():
        found.setdefault(kernel, {})[split] = count
    reports = module.host.reports()
    module.host.forget()
    assert reports == []
    return found


def threads_for(columns: int) -> int:
    """As csrc/cuda/split.h says."""
    text = re.search(r"threads_for\(int64_t columns\) \{ return (.*?); \}", SPLIT_H.read_text())
    assert text is not None
    limits = re.findall(r"columns <= (\d+) \? (\d+)", text[1])
    assert len(limits) == 3
    return next((int(threads) for limit, threads in limits if columns <= int(limit)), 384)


def step_of(dtype: torch.dtype) -> int:
    """Columns that a block of 128 threads takes at once."""
    return 128 * VECTORS * 16 // dtype.itemsize


def vocab_of(split: int, dtype: torch.dtype) -> int:
    """Parts of two whole steps and one that leaves some threads a vector, some two and some none; the row's last vector partial."""
    return split * (2 * step_of(dtype) + step_of(dtype) * 5 // 8) + 3


def part_of(split: int, dtype: torch.dtype, rank: int) -> range:
    """The columns that a block holds."""
    vocab, vector = vocab_of(split, dtype), 16 // dtype.itemsize
    vectors = -(-vocab // vector)
    size = -(-vectors // split) * vector
    return range(rank * size, min((rank + 1) * size, vocab))


PARTS = [(split, rank) for split in SPLITS for rank in range(split)]


def test_rows_of_these_tests_have_several_steps_and_a_partial_one() -> None:
    for dtype in DTYPES:
        for split in SPLITS:
            assert threads_for(vocab_of(split, dtype) // split) == 128
            for rank in range(split):
                columns = len(part_of(split, dtype, rank))
                assert 2 * step_of(dtype) < columns < 3 * step_of(dtype) - 128 * 16 // dtype.itemsize / 2
            assert vocab_of(split, dtype) % (16 // dtype.itemsize) != 0


MASKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "all": lambda mask: None,
    "some": lambda mask: mask,
    "one": lambda mask: (torch.arange(mask.numel()) == 1).view(mask.shape),
}
ROWS = {"split": SPLITS, "dtype": DTYPES, "mode": MODES, "layout": LAYOUTS, "entropy_coef": (0.0, 0.3), "mask": tuple(MASKS)}


@pytest.mark.parametrize("row", pairwise(ROWS, seed=2), ids=lambda row: "-".join(map(str, row.values())))
def test_every_split_is_right_in_every_dtype_mode_and_layout(row: dict[str, Any], module: ModuleType) -> None:
    split, dtype, mode = row["split"], row["dtype"], row["mode"]
    inputs = batch(split, (2, 2, vocab_of(split, dtype)), dtype, temperature=0.7) | {"beta": 0.1, "entropy_coef": row["entropy_coef"]}
    inputs["completion_mask"] = MASKS[row["mask"]](inputs["completion_mask"])
    module.cuda.force_split(split)
    result = run(inputs, **ON, mode=mode, layout=row["layout"], upstream=0.5)
    assert_matches(result, inputs, mode, upstream=0.5)
    ran = launched(module)
    if "one_pass" in mode and ("inplace" not in mode or row["layout"] == "contiguous"):
        assert ran == {"loss_and_grad": {split: 1}, "scale": {1: 1}}
    else:  # a view cannot become its gradient in the forward
        assert ran == {"logprobs_forward": {split: 1}, "objective": {1: 1}, "logprobs_backward": {1: 1}}


@pytest.mark.parametrize(("split", "rank"), PARTS)
def test_the_maximum_may_be_in_any_part(split: int, rank: int, module: ModuleType) -> None:
    """Chosen by one token, not by the other; in the first, the middle and the last step of the part, by turns."""
    dtype = DTYPES[(split + rank) % 3]
    columns = part_of(split, dtype, rank)
    column = columns[(5, len(columns) // 2, -1)[rank % 3]]
    inputs = batch(split, (1, 2, vocab_of(split, dtype)), dtype) | {"completion_mask": None, "beta": 0.1, "entropy_coef": 0.1}
    logits, ids = inputs["logits"], inputs["completion_ids"]
    logits[..., column] = logits.amax(-1) + 2.0
    ids[0] = torch.tensor([column, (column + 1) % logits.shape[-1]])
    logps, _ = oracle.logps_and_entropy(logits.double(), ids, torch.ones(1, 2, dtype=torch.float64))
    inputs |= {"old_logps": (logps + 0.1).float(), "ref_logps": (logps - 0.5).float()}
    module.cuda.force_split(split)
    for mode in ("default", "one_pass"):
        assert_matches(run(inputs, **ON, mode=mode), inputs, mode)
    ran = launched(module)
    assert set(ran["logprobs_forward"]) == set(ran["loss_and_grad"]) == {split}


BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize(("split", "rank"), PARTS)
def test_what_is_not_finite_may_be_in_any_part(split: int, rank: int, module: ModuleType) -> None:
    """NaN and +inf spoil their row and no other; -inf leaves all else exact, a whole part of it too."""
    dtype = DTYPES[(split + rank + 1) % 3]
    vocab, columns = vocab_of(split, dtype), part_of(split, dtype, rank)
    inputs = batch(7, (1, 3, vocab), dtype) | {"completion_mask": None, "beta": 0.1, "entropy_coef": 0.1}
    inputs["completion_ids"][0, 1] = vocab - 1 if rank == 0 else 1
    module.cuda.force_split(split)
    for mode in ("default", "one_pass"):
        clean = run(inputs, **ON, mode=mode)
        for name, value in BAD.items():
            spoilt = inputs["logits"].clone()
            where = slice(columns[0], columns[-1] + 1) if name == "-inf" and split > 1 else slice(columns[-1] - 1, columns[-1])
            spoilt[0, 1, where] = value
            result = run(inputs | {"logits": spoilt}, **ON, mode=mode)
            for got, before in zip((*result.output[2:4], result.dlogits), (*clean.output[2:4], clean.dlogits)):
                assert same_bits(got[0, [0, 2]], before[0, [0, 2]])
                assert got[0, 1].isnan().all() == (name != "-inf") and got[0, 1].isnan().any() == (name != "-inf")
            if name == "-inf":
                assert (result.dlogits[0, 1, where] == 0).all()
                harmless = spoilt.clone()
                harmless[0, 1, where] = spoilt[0, 1][spoilt[0, 1] > -math.inf].amax() - 300.0  # its exponential is 0 as well
                assert same_bits(run(inputs | {"logits": harmless}, **ON, mode=mode).output.logps, result.output.logps)
    assert set(launched(module)["loss_and_grad"]) == {split}


@pytest.mark.parametrize("split", SPLITS)
def test_a_row_of_minus_infinity_alone_is_nan_and_its_neighbours_are_not(split: int, module: ModuleType) -> None:
    inputs = batch(3, (1, 3, vocab_of(split, torch.bfloat16)), torch.bfloat16) | {"completion_mask": None}
    inputs["logits"][0, 1] = -math.inf
    module.cuda.force_split(split)
    for mode in ("default", "one_pass+inplace"):
        result = run(inputs, **ON, mode=mode)
        assert result.output.logps[0].isnan().tolist() == [False, True, False]
        assert result.dlogits[0].isnan().all(-1).tolist() == result.dlogits[0].isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_forward_and_one_pass_of_a_split_have_the_same_bits(split: int, dtype: torch.dtype, module: ModuleType) -> None:
    """Alone and in a batch, at an address that takes 16-byte loads and at one that takes narrow ones."""
    inputs = batch(11, (2, 2, vocab_of(split, dtype)), dtype) | {"completion_mask": None, "beta": 0.1, "num_sequences": 2}
    alone = {name: x[1:] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    module.cuda.force_split(split)
    first = run(inputs, **ON)
    gradients = {"default": first.dlogits, "one_pass": run(inputs, **ON, mode="one_pass").dlogits}
    for mode, layout in (("default", "unaligned"), ("one_pass", "contiguous"), ("one_pass", "unaligned")):
        for given, rows in ((inputs, slice(0, 2)), (alone, slice(1, 2))):
            result = run(given, **ON, mode=mode, layout=layout)
            for got, want in zip(result.output[2:], first.output[2:]):
                assert same_bits(got.detach(), want[rows].detach())
            assert same_bits(result.dlogits, gradients[mode][rows])
    scored = gk.token_logprobs_and_entropy(alone["logits"], alone["completion_ids"], **ON)
    assert same_bits(scored.logps, first.output.logps[1:].detach()) and same_bits(scored.entropy, first.output.entropy[1:])
    ran = launched(module)
    assert set(ran["logprobs_forward"]) == set(ran["loss_and_grad"]) == {split}


# --- The table ----------------------------------------------------------------------------------------------------------------------

WIDE = [
    (torch.bfloat16, "one_pass+inplace", 4),
    (torch.float16, "one_pass", 4),
    (torch.float32, "one_pass", 8),
    (torch.float32, "default", 8),
]


@pytest.mark.parametrize(("dtype", "mode", "split"), WIDE, ids=str)
def test_rows_of_qwen_in_the_split_of_the_table(dtype: torch.dtype, mode: str, split: int, module: ModuleType) -> None:
    inputs = batch(5, (1, 2, 151936), dtype, temperature=1.3) | {"completion_mask": None, "beta": 0.05, "entropy_coef": 0.01}
    assert_matches(run(inputs, **ON, mode=mode), inputs, mode)
    ran = launched(module)
    assert ran["loss_and_grad" if "one_pass" in mode else "logprobs_forward"] == {split: 1}


@pytest.mark.parametrize(
    "rule",
    [
        (90, torch.bfloat16, 16384, 1),  # 32 KB: read twice
        (90, torch.bfloat16, 16385, 2),
        (90, torch.float32, 50257, 4),
        (90, torch.float32, 262145, 8),
        (90, torch.float32, 460000, 1),  # a part of 230 KB, more than a block may have
        (100, torch.bfloat16, 50257, 2),
        (80, torch.bfloat16, 50257, 1),  # no clusters
        (80, torch.float32, 151936, 1),
    ],
    ids=str,
)
def test_the_table_knows_architecture_dtype_and_vocabulary(rule: tuple[int, torch.dtype, int, int], module: ModuleType) -> None:
    arch, dtype, vocab, split = rule
    module.host.set_arch(arch)
    inputs = batch(3, (1, 1, vocab), dtype)
    scored = gk.token_logprobs(inputs["logits"], inputs["completion_ids"], **ON)
    result = run(inputs, **ON, mode="one_pass")
    assert same_bits(result.output.logps.detach(), scored)
    ran = launched(module)
    assert ran["logprobs_forward"] == ran["loss_and_grad"] == {split: 1}


def test_no_cluster_is_forced_on_an_architecture_that_has_none(module: ModuleType) -> None:
    module.host.set_arch(80)
    module.cuda.force_split(8)
    inputs = batch(2, (1, 2, 5003), torch.bfloat16)
    assert_matches(run(inputs, **ON, mode="one_pass"), inputs, "one_pass")
    assert launched(module)["loss_and_grad"] == {1: 1}


# --- Ids, launches ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_a_token_id_outside_the_row_is_nan_and_never_the_neighbours_logit(split: int, module: ModuleType) -> None:
    """On a GPU, where nobody looks at ids first; below the operators, which do on a CPU."""
    module.cuda.force_split(split)
    backend = backends.get("cuda_on_host", torch.device("cpu"), torch.float32)
    vocab = vocab_of(split, torch.float32)
    logits = torch.randn(1, 4, vocab, generator=generator(split))
    ids, taus = torch.tensor([[vocab, -1, 2, 1 << 40]]), torch.ones(1, 4)
    logps, row_max, log_sum, entropy = (torch.empty(1, 4) for _ in range(4))
    backend.logprobs_forward(logits, ids, None, taus, logps, row_max, log_sum, entropy)
    assert logps[0].isnan().tolist() == [True, True, False, True]
    assert torch.allclose(logps[0, 2], logits[0, 2].log_softmax(-1)[2])
    two_sweeps, one_pass = torch.full_like(logits, 7.0), torch.full_like(logits, 7.0)
    backend.logprobs_backward(logits, ids, None, taus, row_max, log_sum, entropy, torch.ones(1, 4), None, two_sweeps)

    one, outputs, clipped = torch.ones(1, 4), [torch.empty(1, 4) for _ in range(5)], torch.empty(1, 4, dtype=torch.int8)
    params = ObjectiveParams().for_kernels().tolist()
    backend.loss_and_grad(logits, ids, None, taus, one, None, None, None, one, None, params, *outputs, clipped, one_pass)
    assert same_bits(outputs[0], logps)
    for dlogits in (two_sweeps, one_pass):
        assert dlogits[0].isnan().all(-1).tolist() == dlogits[0].isnan().any(-1).tolist() == [True, True, False, True]


COUNTS = {
    "default": {"logprobs_forward": 1, "objective": 1, "logprobs_backward": 1},
    "inplace": {"logprobs_forward": 1, "objective": 1, "logprobs_backward": 1},
    "from_logps": {"logprobs_forward": 1, "objective": 1, "logprobs_backward": 1},
    "one_pass": {"loss_and_grad": 1, "scale": 1},
    "one_pass+inplace": {"loss_and_grad": 1, "scale": 1},
}


@pytest.mark.parametrize("mode", MODES)
def test_launches_of_a_loss(mode: str, module: ModuleType) -> None:
    """Whatever the batch and the options: one launch an entry point. `scale` is launched and leaves at once where nothing is to be done."""
    for options in ({}, {"beta": 0.1, "entropy_coef": 0.1, "loss_type": "dapo", "delta": 2.0}):
        run(batch(1, (3, 4, 37)) | options, **ON, mode=mode)
        assert {kernel: sum(of_splits.values()) for kernel, of_splits in launched(module).items()} == COUNTS[mode]
    with torch.no_grad():
        inputs = batch(1, (3, 4, 37))
        gk.fused_grpo_loss(inputs.pop("logits"), **inputs, **ON)
    assert launched(module) == {"logprobs_forward": {1: 1}, "objective": {1: 1}}


def test_launches_of_advantages_and_of_nothing(module: ModuleType) -> None:
    gk.group_advantages(torch.randn(8), 4, **ON)
    assert launched(module) == {"group_advantages": {1: 1}}
    gk.process_advantages(torch.randn(4, 3), torch.randint(9, (4, 3)), 9, 2, **ON)
    assert launched(module) == {"process_advantages": {1: 1}, "steps_ahead": {1: 1}}
    gk.token_logprobs(torch.randn(0, 3, 5), torch.zeros(0, 3, dtype=torch.long), **ON)
    assert launched(module) == {"logprobs_forward": {}} or launched(module) == {}


# --- Barriers ---------------------------------------------------------------------------------------------------------------------------


def forward(dtype: torch.dtype = torch.bfloat16, vocab: int = 5003) -> None:
    inputs = batch(1, (1, 3, vocab), dtype)
    gk.token_logprobs(inputs["logits"], inputs["completion_ids"], **ON)


def one_pass(dtype: torch.dtype = torch.bfloat16, vocab: int = 5003) -> None:
    run(batch(1, (1, 3, vocab), dtype) | {"beta": 0.1, "completion_mask": None}, **ON, mode="one_pass")


def two_sweeps(dtype: torch.dtype = torch.bfloat16, vocab: int = 5003) -> None:
    run(batch(1, (1, 3, vocab), dtype) | {"beta": 0.1, "entropy_coef": 0.1}, **ON)


def outcomes(scale: str) -> None:
    gk.group_advantages(torch.randn(300, generator=generator(4)), 150, scale_rewards=scale, **ON)


def processes() -> None:
    g = generator(5)
    gk.process_advantages(torch.randn(8, 40, generator=g), torch.randint(50, (8, 40), generator=g), 50, 4, **ON)


# Every barrier of every kernel: which kernel, in which splits, and what runs it.
BARRIERS: list[tuple[str, str, tuple[int, ...], Callable[[], None]]] = [
    ("row_begun", "logprobs_forward", (2, 4, 8), forward),
    ("row_begun", "loss_and_grad", (2, 4, 8), one_pass),
    ("row_statistics", "logprobs_forward", SPLITS, forward),
    ("row_statistics", "loss_and_grad", SPLITS, one_pass),
    ("row_gradient", "loss_and_grad", SPLITS, one_pass),
    ("batch_moments", "group_advantages", (1,), lambda: outcomes("batch")),
    ("batch_squares", "group_advantages", (1,), lambda: outcomes("batch")),
    ("group_moments", "group_advantages", (1,), lambda: outcomes("group")),
    ("group_squares", "group_advantages", (1,), lambda: outcomes("group")),
    ("group_moments", "process_advantages", (1,), processes),
    ("group_squares", "process_advantages", (1,), processes),
]
FAULT = "race in shared memory|reads shared memory that nobody wrote|block that need not have begun|other blocks may still use"


def test_every_barrier_is_among_those_that_are_dropped(module: ModuleType) -> None:
    assert {barrier for barrier, *_ in BARRIERS} == set(module.host.barriers())
    sources = [path.read_text() for path in sorted(SPLIT_H.parent.glob("*.cu*")) if path.name != "device.cuh"]
    assert not re.search(r"__sync\w+\(|__cluster_barrier|barrier\.sync|bar\.sync", "".join(sources))  # no barrier without a name


@pytest.mark.parametrize(
    "dropped",
    [(barrier, kernel, split, runs) for barrier, kernel, splits, runs in BARRIERS for split in splits],
    ids=lambda dropped: "-".join(map(str, dropped[:3])),
)
def test_the_race_check_misses_no_barrier(dropped: tuple[str, str, int, Callable[[], None]], module: ModuleType) -> None:
    barrier, kernel, split, runs = dropped
    module.cuda.force_split(split)
    runs()
    assert split in launched(module)[kernel]  # and nothing was reported
    module.host.drop_barrier(barrier)
    with pytest.raises(RuntimeError, match=f"{kernel}: .*({FAULT})"):
        runs()
    (report,) = module.host.reports()
    assert re.search(FAULT, report), report
    module.host.drop_barrier("")
    module.host.forget()
    runs()  # as if nothing had been


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_the_race_check_finds_nothing_in_the_kernels_as_they_are(split: int, dtype: torch.dtype, module: ModuleType) -> None:
    """One warp to a block, several, and rows shorter than a vector or with blocks that have no column at all."""
    module.cuda.force_split(split)
    for vocab in (3, 8 * split - 5, 500 * split, vocab_of(split, dtype)):
        for runs in (forward, one_pass, two_sweeps):
            runs(dtype, vocab)
    for runs in (lambda: outcomes("batch"), lambda: outcomes("group"), lambda: outcomes("none"), processes):
        runs()
    assert module.host.reports() == []
    assert set(launched(module)) == {*KERNELS, "steps_ahead"}


def test_a_barrier_that_is_not_there_cannot_be_dropped(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="no barrier is called row"):
        module.host.drop_barrier("row")
