"""From the JSON that pytest-benchmark saves to the Markdown that README and results use: `python -m benchmarks.table <json>`."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Benchmark = dict[str, Any]  # one entry of "benchmarks" in that JSON


def markdown(benchmarks: Sequence[Benchmark]) -> str:
    """A heading and a table for each group, in the order in which they ran."""
    return "\n\n".join(
        _contest(group, list(members)) for group, members in itertools.groupby(benchmarks, key=lambda benchmark: benchmark["group"])
    )


def _contest(group: str, members: list[Benchmark]) -> str:
    first = members[0]["extra_info"]
    heading = f"**{group}**, logits [{first['rows']}, {first['vocab']}], {first['threads']} threads"
    if "extra_bytes" in first:
        head, row = ["", "extra MB at the peak", "of the logits", "bytes a row"], _memory
    elif first["baseline"] == "naive":
        head, row = (
            ["", "ms", "times faster than naive", "than best torch.compile", "GB/s", "share of mul_", "bytes a logit"],
            _against_naive,
        )
    else:
        head, row = ["", "ms", "beside", "times faster", "share of its time"], _against_itself
    if "baseline" in first:
        heading += f", {members[0]['stats']['rounds']} rounds, load average {first['load_average']:.1f}"
    return heading + "\n\n" + _table(head, [row(member) for member in members])


def _against_naive(member: Benchmark) -> list[str]:
    info = member["extra_info"]
    counted = info.get("bytes_counted")
    share = info.get("share_of_roofline")
    return [
        info["contestant"],
        _ms(member),
        _ratio(info["faster_than_baseline"]),
        _ratio(info["faster_than_best_compile"]),
        f"{info['gb_per_s']:.1f}" if "gb_per_s" in info else "",
        f"{share['median']:.0%}" if share else "",
        f"{counted / (info['rows'] * info['vocab']):.3g}" if counted else "",
    ]


def _against_itself(member: Benchmark) -> list[str]:
    info = member["extra_info"]
    ratio = info["faster_than_baseline"]
    return [info["contestant"], _ms(member), info["baseline"], _ratio(ratio), f"{1 / ratio['median']:.2f}" if ratio else ""]


def _memory(member: Benchmark) -> list[str]:
    info = member["extra_info"]
    return [info["contestant"], f"{info['extra_bytes'] / 1e6:.3g}", f"{info['of_logits']:.2f}", f"{info['extra_bytes'] / info['rows']:.0f}"]


def _ms(member: Benchmark) -> str:
    return f"{member['stats']['median'] * 1e3:.3g}"


def _ratio(ratio: dict[str, float] | None) -> str:
    return f"{ratio['median']:.3g} ({ratio['least']:.3g}-{ratio['most']:.3g})" if ratio else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths)) + " |"

    return "\n".join([line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description="Markdown tables from saved benchmarks.")
    parser.add_argument("json", type=Path, help="what --benchmark-json or --benchmark-save wrote")
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose name contains this, e.g. full")
    arguments = parser.parse_args()
    saved = json.loads(arguments.json.read_text())
    ours, cpu = saved["machine_info"]["grpo_kernels"], saved["machine_info"].get("cpu", {})
    print(
        f"{cpu.get('brand_raw', saved['machine_info']['machine'])}, {ours['threads']} threads, {ours['instruction_set']}, "
        f"torch {ours['torch']}, grpo_kernels {ours['version']} at {saved['commit_info']['id'][:12]}, {saved['datetime'][:10]}. "
        "Times are medians; ratios are medians of the ratio within a round, with the smallest and the largest.\n"
    )
    print(markdown([benchmark for benchmark in saved["benchmarks"] if arguments.only in benchmark["group"]]))


if __name__ == "__main__":
    main()
