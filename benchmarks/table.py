"""From the JSON that pytest-benchmark saves to the Markdown that README and results use: `python -m benchmarks.table <json>`."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
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
    heading = f"**{group}**, logits [{first['rows']}, {first['vocab']}], {first.get('device') or str(first['threads']) + ' threads'}"
    if first.get("width"):
        heading += f", from hidden states of width {first['width']}"
    if "baseline" in first:
        heading += f", {members[0]['stats']['rounds']} rounds, load average {first['load_average']:.1f}"
    columns = (
        MEMORY if "extra_bytes" in first and "baseline" not in first else AGAINST_NAIVE if first["baseline"] == "naive" else AGAINST_ITSELF
    )
    rows = [[cell(member) for cell in columns.values()] for member in members]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    heads = [head.format(**{"roofline": "mul_", **first}) for head in columns]
    return heading + "\n\n" + table([heads[i] for i in used], [[row[i] for i in used] for row in rows])


def _ms(member: Benchmark) -> str:
    return f"{member['stats']['median'] * 1e3:.3g}"


def _host_ms(member: Benchmark) -> str:
    seconds = member["extra_info"].get("host_seconds")
    return f"{seconds * 1e3:.2g}" if seconds else ""


def _times_faster(name: str) -> Cell:
    def cell(member: Benchmark) -> str:
        ratio = member["extra_info"].get(name)
        return f"{ratio['median']:.3g} ({ratio['least']:.3g}-{ratio['most']:.3g})" if ratio else ""

    return cell


def _share(member: Benchmark) -> str:
    share = member["extra_info"].get("share_of_roofline")
    return f"{share['median']:.0%}" if share else ""


def _bandwidth(member: Benchmark) -> str:
    return f"{member['extra_info']['gb_per_s']:.1f}" if "gb_per_s" in member["extra_info"] else ""


def _bytes_a_logit(member: Benchmark) -> str:
    info = member["extra_info"]
    return f"{info['bytes_counted'] / (info['rows'] * info['vocab']):.3g}" if info.get("bytes_counted") else ""


def _extra(unit: float, digits: str) -> Cell:
    return lambda member: f"{member['extra_info']['extra_bytes'] / unit:{digits}}" if "extra_bytes" in member["extra_info"] else ""


def _of(whose: str) -> Cell:
    """The extra memory as a part of somebody else's."""

    def cell(member: Benchmark) -> str:
        share = member["extra_info"].get(f"of_{whose}")
        return "" if share is None else f"{share:.3g}"

    return cell


def _of_its_time(member: Benchmark) -> str:
    ratio = member["extra_info"]["faster_than_baseline"]
    return f"{1 / ratio['median']:.2f}" if ratio else ""


Cell = Callable[[Benchmark], str]
# Columns that are empty for everybody are left out.
NAME: dict[str, Cell] = {"": lambda member: member["extra_info"]["contestant"]}
AGAINST_NAIVE: dict[str, Cell] = {
    **NAME,
    "ms": _ms,
    "times faster than naive": _times_faster("faster_than_baseline"),
    "than best torch.compile": _times_faster("faster_than_best_compile"),
    "than liger": _times_faster("faster_than_liger"),
    "than trl_chunked": _times_faster("faster_than_trl_chunked"),
    "than verl": _times_faster("faster_than_verl"),
    "GB/s": _bandwidth,
    "share of {roofline}": _share,
    "bytes a logit": _bytes_a_logit,
    "extra MB": _extra(1e6, ".3g"),
    "host ms": _host_ms,
}
AGAINST_ITSELF: dict[str, Cell] = {
    **NAME,
    "ms": _ms,
    "beside": lambda member: member["extra_info"]["baseline"],
    "times faster": _times_faster("faster_than_baseline"),
    "share of its time": _of_its_time,
    "than liger": _times_faster("faster_than_liger"),
}
MEMORY: dict[str, Cell] = {
    **NAME,
    "extra MB at the peak": _extra(1e6, ".3g"),
    "of the logits": lambda member: f"{member['extra_info']['of_logits']:.2f}",
    "of naive's": _of("naive"),
    "of naive_float's": _of("naive_float"),
    "bytes a row": lambda member: f"{member['extra_info']['extra_bytes'] / member['extra_info']['rows']:.0f}",
}


def table(head: list[str], rows: list[list[str]]) -> str:
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
