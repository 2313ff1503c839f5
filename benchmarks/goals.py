"""What is to be reached on a GPU, beside what was: each goal a question to the rounds of one run.

Ratios are medians over the rounds of the ratio within a round, of the faster of our backends; over several sizes the worst one counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import table

OURS = ("triton", "cuda", "cpu")  # the last in a dry run


class Group:
    """One contest at one size: rounds and facts of its contestants."""

    def __init__(self, members: Sequence[dict[str, Any]]) -> None:
        self.kind, _, self.case = members[0]["group"].partition(" ")
        self.rounds = {member["extra_info"]["contestant"]: member["stats"]["data"] for member in members}
        self.rows: int = members[0]["extra_info"]["rows"]
        self.facts = {member["extra_info"]["contestant"]: member["extra_info"] for member in members}

    def best(self, *names: str) -> str | None:
        return min((name for name in names if name in self.rounds), key=lambda name: statistics.median(self.rounds[name]), default=None)

    def ours(self, suffix: str) -> str | None:
        return self.best(*(name + suffix for name in OURS))

    def ratio(self, name: str | None, to: str | None) -> float | None:
        """How many times the seconds of `to` go into those of `name`."""
        if name is None or to is None or not {name, to} <= self.rounds.keys():
            return None
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[to]))


@dataclass(frozen=True)
class Goal:
    name: str
    what: str
    kind: str  # of contest
    value: Callable[[Group], float | None]
    goal: float
    must: float
    less_is_better: bool = True
    dtype: str = "bfloat16"

    def over(self, groups: Sequence[Group]) -> float | None:
        """The worst value; of few rows no goal is set."""
        chosen = [group for group in groups if group.kind == self.kind and group.case.endswith(self.dtype)]
        values = [self.value(group) for group in chosen if group.rows >= min(8192, max(g.rows for g in chosen))]
        return (max if self.less_is_better else min)((value for value in values if value is not None), default=None)

    def verdict(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        sign = 1 if self.less_is_better else -1
        return "goal" if sign * value <= sign * self.goal else "must" if sign * value <= sign * self.must else "missed"


def _more(name: str, what: str, kind: str, value: Callable[[Group], float | None], goal: float, must: float) -> Goal:
    return Goal(name, what, kind, value, goal, must, less_is_better=False)


def _in_place_memory(group: Group) -> float | None:
    """Of what is allowed: 64 bytes a row and 2 MB."""
    facts = group.facts.get(group.ours("_inplace") or "", {})
    return facts["extra_bytes"] / (64 * facts["rows"] + (2 << 20)) if "extra_bytes" in facts else None


def _fresh_gradient_memory(group: Group) -> float | None:
    facts = group.facts.get(group.ours("_one_pass") or "", {})
    return facts["extra_bytes"] / facts["logits_bytes"] if "extra_bytes" in facts else None


def _hidden_memory(group: Group) -> float | None:
    ours, naive = (group.facts.get(name or "", {}).get("extra_bytes") for name in (group.ours(""), group.best("naive_float", "naive")))
    return naive / ours if ours and naive else None


def _compiled(group: Group) -> str | None:
    return group.best("compile_where", "compile_cross_entropy")


def _half(group: Group) -> float | None:
    half = group.ours("-half")
    return group.ratio(half, half and half.replace("-half", "-all"))


IN_PLACE, FORWARD = "forward_backward", "forward"
GOALS = [
    Goal("G1", "one pass in place, of copy_", IN_PLACE, lambda g: g.ratio(g.ours("_inplace"), "copy_"), 1.12, 1.30),
    _more("G2", "times faster than Liger", IN_PLACE, lambda g: g.ratio("liger", g.ours("_inplace")), 1.5, 1.35),
    _more("G2", "times faster than naive", IN_PLACE, lambda g: g.ratio("naive", g.ours("_inplace")), 16, 12),
    _more("G2", "times faster than torch.compile", IN_PLACE, lambda g: g.ratio(_compiled(g), g.ours("_inplace")), 4, 3),
    Goal("G3", "forward, of half a copy_", FORWARD, lambda g: 2 * r if (r := g.ratio(g.ours(""), "copy_")) else None, 1.11, 1.11),
    _more("G3", "forward, times faster than Liger", FORWARD, lambda g: g.ratio("liger", g.ours("")), 1, 1),
    _more("G3", "forward, times faster than TRL's steps", FORWARD, lambda g: g.ratio("trl_steps", g.ours("")), 8, 8),
    _more("G4", "Triton alone, times faster than Liger", IN_PLACE, lambda g: g.ratio("liger", g.best("triton_inplace")), 1.35, 1.15),
    _more("G5", "GSPO, times faster than Liger", "sequence", lambda g: g.ratio("liger", g.ours("_inplace_backward")), 1.33, 1.33),
    _more(
        "G6", "half masked, times faster than Liger", "half_masked", lambda g: g.ratio("liger-half", g.ours("_inplace-half")), 1.33, 1.33
    ),
    Goal("G7", "extra memory in place, of 64 B a row + 2 MB", IN_PLACE, _in_place_memory, 1, 1),
    Goal("G7", "extra memory of a fresh gradient, of the logits", IN_PLACE, _fresh_gradient_memory, 1.001, 1.02),
    Goal("G9", "from hidden states, of its three products", "hidden", lambda g: g.ratio(g.ours(""), "products"), 1.06, 1.12),
    _more("G9", "from hidden states, times faster than Liger", "hidden", lambda g: g.ratio("liger", g.ours("")), 3, 3),
    _more("G9", "from hidden states, naive's extra memory of ours", "hidden", _hidden_memory, 4, 4),
    Goal("G10", "half masked, of unmasked", "hidden_half_masked", _half, 0.53, 0.60),
]


def reached(benchmarks: Sequence[dict[str, Any]], mean_something: bool = True) -> list[dict[str, Any]]:
    names = dict.fromkeys(member["group"] for member in benchmarks)
    groups = [Group([member for member in benchmarks if member["group"] == name]) for name in names]
    return [
        {
            "goal": g.name,
            "what": g.what,
            "reached": value,
            "must": g.must,
            "to reach": g.goal,
            "verdict": g.verdict(value) if mean_something else "a dry run",
        }
        for g in GOALS
        for value in (g.over(groups),)
    ]


def markdown(found: Sequence[dict[str, Any]]) -> str:
    head = ["", "what", "reached", "must", "goal", "verdict"]
    rows = [
        [row["goal"], row["what"], "" if row["reached"] is None else f"{row['reached']:.3g}", f"{row['must']:g}", f"{row['to reach']:g}"]
        + [row["verdict"]]
        for row in found
    ]
    return table.table(head, rows)
