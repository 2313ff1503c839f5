"""What the numerical tests share: which backends must work, memory that is never zero by luck, and the worst errors of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import cases
import device
import oracle
from grpo_kernels import available_backends

# A backend that is named here and does not work is a failure, never a skip. An installation without compiler sets "torch"; a machine
# with a GPU "triton,cuda", or "torch,triton,cuda": then every tensor of the run is there, also those that modules make when imported.
BACKENDS = os.environ.get("GRPO_KERNELS_TEST_BACKENDS", "torch,cpu").split(",")
DEVICE = device.device_of(BACKENDS)
if DEVICE != "cpu":
    device.tensors_on(DEVICE).__enter__()
# They leave out what is `exhaustive`, and of every test's cross product of parameters they run as much as it takes for any two values to
# meet.
EMULATED = cases.EMULATED


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    reason = available_backends().get(request.param, "no such backend")
    if reason != "available":
        pytest.fail(f"backend {request.param!r} has to work here: {reason}. GRPO_KERNELS_TEST_BACKENDS says which ones are tested.")
    return request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)
        backend = None if callspec is None else callspec.params.get("backend")
        if DEVICE != "cpu" and backend is not None:
            item.add_marker(pytest.mark.gpu)
        elif backend in EMULATED:
            item.add_marker(pytest.mark.emulated(backend))
        marker = item.get_closest_marker("emulated")
        if marker and not (set(marker.args) or EMULATED) & set(BACKENDS):
            item.add_marker(pytest.mark.skip(reason="needs a GPU backend in an emulator: make test-emulated"))
        (left if marker and item.get_closest_marker("exhaustive") else kept).append(item)
    dropped = {id(item) for item in _beyond_pairs([item for item in kept if item.get_closest_marker("emulated")])}
    left += [item for item in kept if id(item) in dropped]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in kept if id(item) not in dropped]


def _beyond_pairs(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """What each test's cross product of parameters has beyond a pairwise choice."""
    tests: dict[object, list[pytest.Item]] = {}
    for item in items:
        if getattr(item, "callspec", None) is not None:
            tests.setdefault((item.function, item.callspec.params.get("backend")), []).append(item)  # type: ignore[attr-defined]
    for same in tests.values():
        rows = [{name: repr(value) for name, value in item.callspec.params.items()} for item in same]  # type: ignore[attr-defined]
        chosen = set(cases.pairs_of(rows))
        yield from (item for i, item in enumerate(same) if i not in chosen)


@pytest.fixture(autouse=DEVICE != "cpu")
def values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the CPU: ids and temperatures out of range raise."""
    monkeypatch.setenv("GRPO_KERNELS_DEBUG", "1")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN: an output that a kernel forgot to write cannot be right by luck."""
    torch.use_deterministic_algorithms(True, warn_only=DEVICE != "cpu")  # what the oracle does may have no such algorithm on a GPU
    yield
    torch.use_deterministic_algorithms(False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if oracle.WORST:  # empty in the controlling process of pytest-xdist
        terminalreporter.section("largest error as a share of its budget")
        for name, share in sorted(oracle.WORST.items()):
            terminalreporter.write_line(f"{share:7.3f}  {name}")
