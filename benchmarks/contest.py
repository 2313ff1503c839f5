"""Implementations take turns, round by round, in one process.

The two cores, caches and memory of a machine drift within seconds, so a figure is worth something only beside another one of the same
moment: what is reported is the median over rounds of the ratio within a round, with the smallest and the largest. pytest-benchmark runs
one test to its end before the next; so the whole contest runs when the first of its tests asks, every turn for real, and each test hands
its own contestant's seconds to pytest-benchmark, which does statistics, saving and comparing as always.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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


def clock(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result, with the garbage collector kept out (nothing here leaves cycles that would need it)."""
    gc.disable()
    try:
        start = time.perf_counter()
        result = action()
        return time.perf_counter() - start, result
    finally:
        gc.enable()
