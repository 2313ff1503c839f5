"""What is particular to the Triton backend: tiles of a row, absent inputs, alignment classes, what makes a compile. In Triton's
interpreter; what the compiler makes of the kernels is in test_triton_compiled.py."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
import oracle
from cases import DTYPES, MODES, assert_matches, batch, generator, pairwise, run, same_bits
from grpo_kernels.backends.triton.configs import TABLE, forced_block, tile_for
from grpo_kernels.options import ObjectiveParams

pytestmark = pytest.mark.emulated("triton")

BLOCK = 64  # columns of a forced tile
TILES = (0, 1, 2, 3)  # of rows of 3 whole tiles and a partial one: 208 columns where they are aligned, 203 where not
LENGTHS = {"contiguous": 208, "unaligned": 203}


@pytest.fixture(autouse=True)
def triton_works() -> None:
    assert gk.available_backends()["triton"] == "available", gk.available_backends()["triton"]


@pytest.fixture
def small_tiles() -> Iterator[None]:
    with forced_block(BLOCK):
        yield


def with_maximum_in(tile: int, inputs: dict[str, Any], chosen: bool) -> dict[str, Any]:
    """Every row's maximum in one column of that tile; the chosen token there too, or elsewhere. Log-probs of others as close as before."""
    logits, before, ids = inputs["logits"].clone(), inputs["completion_ids"], inputs["completion_ids"].clone()
    column = min(tile * BLOCK + 5, logits.shape[-1] - 1)
    logits[..., column] = logits.amax(-1) + 2.0
    ids.fill_(column) if chosen else ids.copy_(torch.where(ids == column, (column + 1) % logits.shape[-1], ids))
    taus = torch.full(ids.shape, inputs["temperature"], dtype=torch.float64)
    moved = oracle.logps_and_entropy(logits.double(), ids, taus)[0] - oracle.logps_and_entropy(inputs["logits"].double(), before, taus)[0]
    others = {name: (inputs[name] + moved).float() for name in ("old_logps", "ref_logps")}
    return inputs | others | {"logits": logits, "completion_ids": ids}


def test_rows_of_these_tests_have_three_tiles_and_a_partial_one(small_tiles: None) -> None:
    for dtype in DTYPES:
        for layout, length in LENGTHS.items():
            tile = tile_for("interpreter", dtype, length, layout == "contiguous")
            assert tile.repeat * tile.lanes * tile.pack == BLOCK and tile.lanes > 1
            assert tile.pack == (16 // dtype.itemsize if layout == "contiguous" else 1)
            assert 3 * BLOCK < length < 4 * BLOCK


ROWS = {"tile": TILES, "dtype": DTYPES, "mode": MODES, "layout": tuple(LENGTHS), "entropy_coef": (0.0, 0.3), "chosen": (True, False)}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("row", pairwise(ROWS, seed=1), ids=lambda row: "-".join(map(str, row.values())))
def test_the_maximum_may_be_in_any_tile(row: dict[str, Any]) -> None:
    inputs = batch(row["tile"], (2, 2, LENGTHS[row["layout"]]), row["dtype"], temperature=0.7)
    inputs = with_maximum_in(row["tile"], inputs, row["chosen"]) | {"beta": 0.1, "entropy_coef": row["entropy_coef"]}
    result = run(inputs, "triton", row["mode"], row["layout"], upstream=0.5)
    assert_matches(result, inputs, row["mode"], upstream=0.5)


BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mode", ["default", "one_pass"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("tile", TILES)
def test_what_is_not_finite_may_be_in_any_tile(tile: int, value: str, mode: str) -> None:
    """NaN and +inf spoil their row and no other; -inf leaves all else exact, whole tiles of it too."""
    dtype = DTYPES[tile % 3]
    inputs = batch(7, (1, 3, LENGTHS["contiguous"]), dtype) | {"completion_mask": None, "beta": 0.1, "entropy_coef": 0.1}
    clean = run(inputs, "triton", mode)
    spoilt = inputs["logits"].clone()
    columns = slice(tile * BLOCK, tile * BLOCK + (BLOCK if value == "-inf" else 1))
    spoilt[0, 1, columns] = BAD[value]
    inputs["completion_ids"][0, 1] = 1 if tile else LENGTHS["contiguous"] - 1
    result = run(inputs | {"logits": spoilt}, "triton", mode)
    for got, before in zip(
        (result.output.logps, result.output.entropy, result.dlogits), (clean.output.logps, clean.output.entropy, clean.dlogits)
    ):
        assert same_bits(got[0, [0, 2]], before[0, [0, 2]])
        assert got[0, 1].isnan().all() == (value != "-inf")
    if value == "-inf":
        assert (result.dlogits[0, 1, columns] == 0).all()
        finite = inputs | {"logits": torch.where(spoilt == -math.inf, -300.0, spoilt.float()).to(dtype)}  # exp(-300) is 0 too
        same = run(finite, "triton", mode)
        assert same_bits(result.output.logps, same.output.logps) and torch.equal(result.dlogits, same.dlogits)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_minus_infinity_alone_is_nan_and_its_neighbours_are_not(dtype: torch.dtype) -> None:
    inputs = batch(3, (1, 3, LENGTHS["unaligned"]), dtype) | {"completion_mask": None}
    inputs["logits"][0, 1] = -math.inf
    for mode in ("default", "one_pass+inplace"):
        result = run(inputs, "triton", mode)
        assert result.output.logps[0].isnan().tolist() == [False, True, False]
        assert result.dlogits[0].isnan().all(-1).tolist() == [False, True, False]
        assert result.dlogits[0].isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_large_vocabulary_in_the_tiles_of_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """151,936 columns are 9.3 tiles of 16,384, or 18.5 of 8,192."""
    monkeypatch.setitem(TABLE, "interpreter", TABLE[90])
    inputs = batch(5, (1, 3, 151936), dtype, temperature=1.3) | {"completion_mask": None, "beta": 0.05, "entropy_coef": 0.01}
    mode = {torch.float32: "default", torch.bfloat16: "one_pass+inplace", torch.float16: "one_pass"}[dtype]
    assert_matches(run(inputs, "triton", mode), inputs, mode)


def test_a_confident_row_keeps_the_digits_of_one_minus_p() -> None:
    """Beside the 1 of the maximum, 151,935 exponentials of 3e-8 each are half an ulp: a plain float32 sum would lose every one."""
    logits = torch.full((1, 1, 151936), math.log(2.9e-8))
    logits[..., 70000] = 0.0
    ids = torch.tensor([[70000]])
    z = logits.requires_grad_()
    logps = gk.token_logprobs(z, ids, backend="triton")
    want = z.detach().double().log_softmax(-1)[0, 0, 70000]
    assert abs(logps.item() - want.item()) < 2e-7
    logps.sum().backward()
    assert abs(z.grad[0, 0, 70000].item() + math.expm1(want)) < 2e-7


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_a_common_constant_cancels(shift: float) -> None:
    z = torch.tensor([[[0.0, 0.25, -1.5, 3.0] * 60]])
    ids = torch.tensor([[3]])
    with forced_block(BLOCK):
        got = gk.token_logprobs_and_entropy(z + shift, ids, temperature=0.5, backend="triton")
    want = (z.double() / 0.5).log_softmax(-1)
    assert abs(got.logps.item() - want[0, 0, 3].item()) < 1e-6
    assert abs(got.entropy.item() + (want.exp() * want).sum().item()) < 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("layouts", "vocab"), [(("contiguous", "later_time"), 208), (("unaligned", "longer_rows"), 208)])
def test_a_row_has_the_same_bits_within_an_alignment_class(layouts: tuple[str, ...], vocab: int, dtype: torch.dtype) -> None:
    inputs = batch(11, (2, 2, vocab), dtype) | {"completion_mask": None, "beta": 0.1}
    alone = {name: x[1:2] if isinstance(x, Tensor) else x for name, x in inputs.items()}
    with forced_block(BLOCK):
        results = [run(inputs, "triton", mode, layouts[i % 2]) for i, mode in enumerate((*MODES, MODES[0]))]
        first = results[0]
        for result in results[1:]:
            assert same_bits(result.output.logps, first.output.logps) and same_bits(result.output.entropy, first.output.entropy)
        assert same_bits(run(alone, "triton", "one_pass", layouts[0]).output.logps, first.output.logps[1:2])


def test_a_token_id_outside_the_row_is_nan_and_never_the_neighbours_logit() -> None:
    """On a GPU, where nobody looks at ids first; below the operators, which do on a CPU."""
    from grpo_kernels import backends

    backend = backends.get("triton", torch.device("cpu"), torch.float32)
    logits = torch.tensor([[[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]])
    ids, taus = torch.tensor([[4, -1, 2]]), torch.ones(1, 3)
    logps, row_max, log_sum, entropy = (torch.empty(1, 3) for _ in range(4))
    backend.logprobs_forward(logits, ids, None, taus, logps, row_max, log_sum, entropy)
    want = logits.log_softmax(-1)[0, 2, 2]
    assert logps[0, :2].isnan().all() and torch.allclose(logps[0, 2], want)
    dlogits = torch.full_like(logits, 7.0)
    backend.logprobs_backward(logits, ids, None, taus, row_max, log_sum, entropy, torch.ones(1, 3), None, dlogits)
    assert dlogits[0, :2].isnan().all() and dlogits[0, 2].isfinite().all()

    one, outputs = torch.ones(1, 3), [torch.empty(1, 3) for _ in range(5)]
    params = ObjectiveParams().for_kernels().tolist()
    again = torch.full_like(logits, 7.0)
    clipped = torch.empty(1, 3, dtype=torch.int8)
    backend.loss_and_grad(logits, ids, None, taus, one, None, None, None, one, None, params, *outputs, clipped, again)
    assert same_bits(outputs[0], logps) and again[0, :2].isnan().all() and again[0, 2].isfinite().all()


def test_the_second_call_gives_what_the_first_gave() -> None:  # F20
    inputs = batch(17, (2, 3, 208), torch.bfloat16) | {"beta": 0.1}
    for mode in MODES:
        first, second = run(inputs, "triton", mode), run(inputs, "triton", mode)
        assert same_bits(first.dlogits, second.dlogits) and same_bits(first.output.loss.detach(), second.output.loss.detach())
        assert all(same_bits(x.detach(), y.detach()) for x, y in zip(first.output[2:], second.output[2:]))


def test_the_table_names_every_architecture_and_dtype_and_shapes_that_triton_takes() -> None:
    for architecture, dtypes in TABLE.items():
        assert set(dtypes) == set(DTYPES)
        for dtype in dtypes:
            for vocab in (1, 1024, 1025, 151936, 1 << 30):
                for aligned in (True, False):
                    tile = tile_for(architecture, dtype, vocab, aligned)
                    assert all(n & (n - 1) == 0 for n in tile), "tl.arange takes powers of two"
                    assert tile.pack * dtype.itemsize <= 16
                    assert architecture == "interpreter" or tile.lanes == 32 * tile.warps <= 1024
    assert tile_for(103, torch.bfloat16, 4096, True) == tile_for(100, torch.bfloat16, 4096, True)
    assert tile_for(75, torch.bfloat16, 4096, True) == tile_for(80, torch.bfloat16, 4096, True)


COMPILES = """
import json, math, sys
import torch
import triton_launches

inf, found = math.inf, {}
lengths = (1, 2, 16, 17, 70000)  # 70,000 rows of 151,936 pass 2^31
settings = ((0, .2, .2, inf, inf, 1, 1.05, 0, 80, 0), (1, 0, 5, 1, 1, 1, 1, 1, 1, 1.0), (2, .1, .3, 2.5, 3, 16, 2, 2, 20, .04),
            (3, 1, 1, 1, 1, 1, 1, 3, 1, 16), (0, .5, 0, 1e30, 2, 2, 2, 4, 80, 1e-3))
for dtype in triton_launches.DTYPES:
    for aligned in (True, False):
        for i, length in enumerate(lengths):
            for params, optional in ((settings[i], True), (settings[(i + 1) % 5], False)):
                for launch in triton_launches.row_launches(90, dtype, shape=(1, length, 151936), aligned=aligned, params=params,
                                                           optional=optional, device="meta"):
                    found.setdefault(f"{launch.name} {dtype} {aligned}", set()).add(launch)
for groups, generations, steps, time in ((1, 1, 1, 1), (2, 3, 2, 5), (16, 16, 16, 16), (3, 64, 1, 1000), (1, 2, 40, 17)):
    for optional in (True, False):
        for launch in triton_launches.advantage_launches(90, groups=groups, generations=generations, steps=steps, time=time,
                                                         optional=optional):
            found.setdefault(f"{launch.name} {launch.types[-1]}", set()).add(launch)
print(json.dumps({name: [len(launches), sorted({s for x in launches for s in x.specialisations})] for name, launches in found.items()}))
"""


def compiled(code: str) -> Any:
    """What a process prints that has no interpreter."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")}
    environment["PYTHONPATH"] = str(Path(__file__).parent) + os.pathsep + environment.get("PYTHONPATH", "")
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_one_compile_a_kernel_dtype_and_alignment_class_whatever_lengths_and_options() -> None:  # F22
    found = compiled(COMPILES)
    assert len(found) == 5 * 3 * 2 + 4
    assert {name: counts for name, counts in found.items() if counts != [1, []]} == {}


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [("triton", "ImportError: Triton is not installed"), (None, "RuntimeError: no CUDA GPU")],
)
def test_the_package_works_without_triton_and_without_a_gpu(hidden: str | None, reason: str) -> None:  # F26
    """And tells why its backend does not; importing the package imports nothing that needs Triton (torch 2.13 itself looks for it)."""
    code = f"""
import json, sys
sys.modules[{hidden!r}] = None
import grpo_kernels, torch
torch.cuda.is_available = lambda: False
imported = "grpo_kernels.backends.triton" in sys.modules
print(json.dumps([grpo_kernels.available_backends(), imported]))
"""
    backends, imported = compiled(code)
    assert backends["triton"].startswith(reason) and backends["torch"] == "available" and not imported


def test_group_advantages_of_groups_longer_than_a_block() -> None:
    g = generator(19)
    rewards = torch.randn(700, generator=g, dtype=torch.float64) + 1e4
    rewards[::50] = math.nan
    ids = torch.randint(2, (700,), generator=g)
    for options in ({"scale_rewards": "batch"}, {"baseline": "leave_one_out", "ddof": 0}, {"scale_rewards": "none"}):
        got, want = (gk.group_advantages(rewards, group_ids=ids, **options, backend=name) for name in ("triton", "torch"))
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-9) and (got != 0).any()


def test_process_advantages_of_answers_longer_than_a_block() -> None:
    g = generator(23)
    ends = torch.randint(600, (4, 5), generator=g)
    arguments = (torch.randn(4, 5, generator=g), ends, 600, 2)
    mask = torch.rand(4, 5, generator=g) < 0.8
    got, want = (gk.process_advantages(*arguments, step_mask=mask, backend=name) for name in ("triton", "torch"))
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-7) and (got != 0).any()
