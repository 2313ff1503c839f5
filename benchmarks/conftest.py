"""Cases, and the way from a contest to pytest-benchmark's statistics and to the table at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import grpo_kernels
from benchmarks import table
from benchmarks.arena import Arena, figures
from benchmarks.implementations import Missing
from benchmarks.inputs import Case

# (sequences, length, vocabulary, width of hidden states); a test file may have SHAPES of its own. Qwen's vocabulary, the largest in common
# use, with 256 and 1,024 rows; tiny is for the tests of these benchmarks, odd for the row tails.
SHAPES = {"tiny": (4, 6, 1003, None), "smoke": (8, 32, 151936, None), "full": (8, 128, 151936, None)}
RESULTS: pytest.StashKey[list[dict[str, Any]]] = pytest.StashKey()
ABSENT: pytest.StashKey[dict[str, str]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tiny", action="store_true", help="toy shapes, to test the benchmarks; their figures mean nothing")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS], config.stash[ABSENT] = [], {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        tiny = metafunc.config.getoption("--tiny")
        shapes = getattr(metafunc.module, "SHAPES", SHAPES)
        cases = [
            Case("cpu", size, batch, time, vocab, dtype, width)
            for size, (batch, time, vocab, width) in shapes.items()
            if size.startswith("tiny") == tiny
            for dtype in ("float32", "bfloat16")
        ]
        metafunc.parametrize("case", cases, ids=[case.id for case in cases], indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def arena(case: Case) -> Iterator[Arena]:
    """Module scope: pytest runs the tests of one case together, and its gigabytes are gone before the next."""
    yield Arena(case)


@pytest.fixture
def absent(request: pytest.FixtureRequest, case: Case) -> Callable[[str, str, Missing], None]:
    """(contest, contestant, reason): skip, and say so at the end."""

    def skip(kind: str, name: str, reason: Missing) -> None:
        request.config.stash[ABSENT][f"{kind} {case.id} {name}"] = str(reason)
        pytest.skip(str(reason))

    return skip


@pytest.fixture
def keep_result(request: pytest.FixtureRequest, case: Case, benchmark: Any) -> Callable[[str, str], None]:
    """(contest, contestant): what stands in every extra_info, and the place in the table at the end."""

    def keep(kind: str, name: str) -> None:
        benchmark.group = f"{kind} {case.id}"
        benchmark.extra_info |= {
            "contestant": name,
            "rows": case.rows,
            "vocab": case.vocab,
            "width": case.width,
            "dtype": case.dtype,
            "logits_bytes": case.logits_bytes,
            "threads": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
        }
        if benchmark.enabled:
            benchmark.stats.group = benchmark.group
            request.config.stash[RESULTS].append(benchmark.stats.as_dict())

    return keep


@pytest.fixture
def hand_in(
    request: pytest.FixtureRequest,
    case: Case,
    arena: Arena,
    benchmark: Any,
    absent: Callable[[str, str, Missing], None],
    keep_result: Callable[[str, str], None],
) -> Callable[[str, str], None]:
    """(contest, contestant): hold the contest if it has not been, and report the contestant's rounds."""

    def report(kind: str, name: str) -> None:
        chosen = [
            item.callspec.params["contestant"]
            for item in request.session.items
            if item.function is request.function and item.callspec.params["case"] == case
        ]
        outcome = arena.contest(kind, chosen, verify_only=not benchmark.enabled)
        if (error := outcome.failures.get(name)) is not None:
            benchmark.skipped = True
            if isinstance(error, Missing):
                absent(kind, name, error)
            raise error
        benchmark.extra_info |= figures(outcome, name, arena.roofline)
        _feed(benchmark, outcome.seconds[name])
        keep_result(kind, name)

    return report


def _feed(benchmark: Any, seconds: list[float]) -> None:
    """What `benchmark.pedantic` does after each round, here for rounds that were run in turn with others'."""
    benchmark._mode = "contest"
    if benchmark.enabled:
        stats = benchmark._make_stats(iterations=1)
        for second in seconds:
            stats.update(second)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """What decides these figures besides the processor."""
    try:
        import grpo_kernels._C as native

        isa = native.isa()
    except ImportError as error:
        isa = f"none: {error}"
    machine_info["grpo_kernels"] = {
        "version": grpo_kernels.__version__,
        "instruction_set": isa,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


@pytest.hookimpl(trylast=True)  # after pytest-benchmark's own
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if results := config.stash[RESULTS]:
        terminalreporter.section("grpo_kernels beside the others")
        terminalreporter.write_line(table.markdown(results))
    if absent := config.stash[ABSENT]:
        terminalreporter.section("not measured")
        for name, reason in absent.items():
            terminalreporter.write_line(f"{name}: {reason}")
