"""What a run leaves to look at: a line of metrics a step, the answers of every evaluation, and one picture of both."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, nor opened
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

METRICS, EVALUATIONS, PICTURE = "metrics.jsonl", "evaluations.jsonl", "reward.png"


def append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def forget_after(folder: Path, step: int) -> None:
    """Drops what an interrupted run wrote after the checkpoint that is resumed from, also a line that it did not finish."""
    for path in (folder / METRICS, folder / EVALUATIONS):
        if not path.exists():
            continue
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except json.JSONDecodeError:
                break
        draft = path.with_suffix(".draft")
        draft.write_text("".join(kept), encoding="utf-8")
        os.replace(draft, path)


def picture(folder: Path, title: str) -> Path:
    """Reward, held-out accuracy and share of worked answers against step; below them the length of answers, KL and entropy."""
    records = read(folder / METRICS)
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 7), layout="constrained")
    grid = axes[0, 0].get_gridspec()
    for axis in axes[0]:
        axis.remove()
    top = figure.add_subplot(grid[0, :])
    for key, label, style in (
        ("reward", "reward (training samples)", {"color": "tab:gray", "alpha": 0.7}),
        ("step_reward", "reward a step (training samples)", {"color": "tab:green", "alpha": 0.7}),
        ("accuracy", "held-out accuracy (greedy)", {"color": "tab:blue", "marker": "o"}),
        ("worked", "share of worked answers (held-out)", {"color": "tab:orange", "marker": ".", "linestyle": "--"}),
    ):
        _line(top, records, key, label=label, **style)
    top.set_title(title)
    top.grid(alpha=0.3)
    if top.lines:
        top.legend(loc="best")
    lower = (
        ("length", "tokens an answer", "tab:green"),
        ("kl", "KL to the start model (nats a token)", "tab:red"),
        ("entropy", "entropy (nats a token)", "tab:purple"),
    )
    for axis, (key, label, color) in zip(axes[1], lower):
        _line(axis, records, key, color=color)
        if not axis.lines:
            axis.text(0.5, 0.5, "not measured", ha="center", va="center", color="tab:gray", transform=axis.transAxes)
        axis.set_title(label, fontsize="medium")
        axis.grid(alpha=0.3)
    for axis in (top, *axes[1]):
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    path, draft = folder / PICTURE, folder / ("draft-" + PICTURE)
    figure.savefig(draft, dpi=110)
    pyplot.close(figure)
    os.replace(draft, path)  # whoever watches the file never sees half of one
    return path


def _line(axis: Any, records: list[dict[str, Any]], key: str, **style: Any) -> None:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    if points:
        axis.plot(*zip(*points), **style)
