"""Implementations take turns, round by round, in one process.

The two cores, caches and memory of a machine drift within seconds, so a figure is worth something only beside another one of the same
moment: what is reported is the median over rounds of the ratio within a round, with the smallest and the largest. pytest-benchmark runs
one test to its end before the next; so the whole contest runs when the first of its tests asks, every turn for real, and each test hands
its own contestant's seconds to pytest-benchmark, which does statistics, saving and comparing as always.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Turn = Callable[[], float]  # runs once, returns the seconds of the part that counts


@dataclass
class Contestant:
    """`enter` verifies the answer (this is the warm-up too) and returns the turn; it raises where the contestant cannot take part."""

    enter: Callable[[], Turn]
    baseline: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Contest:
    """What came out: seconds of every round for those who took part, the exception for those who did not."""

    contestants: Mapping[str, Contestant]
    seconds: dict[str, list[float]]
    failures: dict[str, Exception]

    def ratio(self, name: str, to: str | None) -> dict[str, float] | None:
        """How many times the seconds of `name` go into those of `to`, per round: median, least, most."""
        if name not in self.seconds or to not in self.seconds:
            return None
        return spread([theirs / own for own, theirs in zip(self.seconds[name], self.seconds[to])])


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def run(contestants: Mapping[str, Contestant], rounds: int) -> Contest:
    """Everybody verifies, then plays `rounds` rounds; each round starts with the next one, so that nobody always follows the same."""
    turns: dict[str, Turn] = {}
    failures: dict[str, Exception] = {}
    for name, contestant in contestants.items():
        try:
            turns[name] = contestant.enter()
        except Exception as error:
            failures[name] = error
    names = list(turns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        first = round_ % len(names) if names else 0
        for name in names[first:] + names[:first]:
            seconds[name].append(turns[name]())
    return Contest(contestants, seconds, failures)


class Clocked(NamedTuple):
    """Seconds of the device; seconds until the call returned, which on a GPU is what queueing the work costs; what it returned."""

    seconds: float
    host_seconds: float
    result: Any


def clock(action: Callable[[], Any], device: str = "cpu") -> Clocked:
    """Runs it once, with the garbage collector kept out (nothing here leaves cycles that would need it)."""
    gc.disable()
    try:
        return _clock_on_gpu(action) if device == "cuda" else _clock_on_cpu(action)
    finally:
        gc.enable()


def _clock_on_cpu(action: Callable[[], Any]) -> Clocked:
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    return Clocked(seconds, seconds, result)


def _clock_on_gpu(action: Callable[[], Any]) -> Clocked:
    """Time of the GPU alone: nothing of the data is in its L2, and it sleeps until everything is queued."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _more_than_an_l2().zero_()
    torch.cuda._sleep(10_000_000)  # cycles: 5 ms
    start.record()
    queued = time.perf_counter()
    result = action()
    host_seconds = time.perf_counter() - queued
    end.record()
    torch.cuda.synchronize()
    return Clocked(start.elapsed_time(end) / 1e3, host_seconds, result)


@functools.cache
def _more_than_an_l2() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
