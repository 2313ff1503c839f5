"""The whole comparison on one GPU in a few minutes: the most telling cases first, results written after each, a table of goals last.

    python benchmarks/gpu.py --output gpu.json            # on_gpu.sh builds, tests and runs this
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry     # the same path on a CPU, toy shapes: its figures mean nothing

Cases, checks and turns are those of the other benchmarks (README.md); the roofline is `copy_`, and seconds are the GPU's own.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # behind the installed packages

import torch

import grpo_kernels
from benchmarks import contest, goals, hidden, table
from benchmarks.arena import Arena, figures
from benchmarks.contest import Clocked, Contest, Contestant, clock
from benchmarks.gpu_implementations import BACKENDS, ON_GPU
from benchmarks.implementations import Missing
from benchmarks.inputs import Case

ROOFLINE = "copy_"
KERNELS = [name for name in ON_GPU if re.match("liger|" + "|".join(BACKENDS), name)]
EVERYBODY = list(ON_GPU)
# What is held at which size, the most telling first; compiling takes most of the time, and one shape of it is enough.
SUITES: list[tuple[tuple[int, int, str], dict[str, list[str]]]] = [
    ((8192, 151936, "bfloat16"), {"forward_backward": EVERYBODY, "half_masked": KERNELS, "sequence": KERNELS, "forward": EVERYBODY}),
    ((8192, 32000, "bfloat16"), {"forward_backward": KERNELS, "forward": KERNELS}),
    ((16384, 151936, "bfloat16"), {"forward_backward": KERNELS}),
    ((8192, 128256, "bfloat16"), {"forward_backward": KERNELS, "forward": KERNELS}),
    ((16384, 128256, "bfloat16"), {"forward_backward": KERNELS}),
    ((16384, 32000, "bfloat16"), {"forward_backward": KERNELS}),
    ((8192, 151936, "float32"), {"forward_backward": KERNELS, "forward": KERNELS}),
    ((256, 32000, "bfloat16"), {"forward_backward": KERNELS}),  # what an implementation costs beside its kernels
]
DRY = [((4, 304, "bfloat16"), SUITES[0][1]), ((4, 301, "float32"), {"forward": KERNELS})]
HIDDEN, DRY_HIDDEN = (8192, 128256, 4096), (4, 257, 32)  # rows, vocabulary, width
ROUNDS, DRY_ROUNDS = 15, 2


def case_of(rows: int, vocab: int, dtype: str, device: str) -> Case:
    batch = max(rows // 1024, 2)
    return Case(device, f"{rows}x{vocab}", batch, rows // batch, vocab, dtype)


def observed(device: str, play: Callable[[], Clocked]) -> dict[str, Any]:
    """What one turn costs the host, and, on a GPU, in memory beside what was there: a fresh gradient counts."""
    if device != "cuda":
        return {"host_seconds": play().host_seconds}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    clocked = play()
    return {"host_seconds": clocked.host_seconds, "extra_bytes": torch.cuda.max_memory_allocated() - before}


class GpuArena(Arena):
    roofline = ROOFLINE

    def hold(self, kind: str, names: list[str], rounds: int) -> Contest:
        return contest.run({**getattr(self, f"_{kind}_among")(names), ROOFLINE: self._roofline()}, rounds)

    def _forward_backward_among(self, names: list[str]) -> dict[str, Contestant]:
        return {name: self.trains(name) for name in ["naive", *names]}

    def _forward_among(self, names: list[str]) -> dict[str, Contestant]:
        return {name: self.scores(name) for name in ["naive", *names] if self.implementations[name].logps}

    def _sequence_among(self, names: list[str]) -> dict[str, Contestant]:
        """GSPO: the gradient of a token waits for its whole sequence, so there is no one pass."""
        inputs = replace(self.inputs, level="sequence")
        return {name: self.trains(name, inputs) for name in ["naive", *names] if not name.endswith(("_one_pass", "_inplace"))}

    def _half_masked_among(self, names: list[str]) -> dict[str, Contestant]:
        half = self.inputs.half_masked()
        in_place = [name for name in names if name == "liger" or name.endswith("_inplace")]
        return {
            f"{name}-{part}": self.trains(name, inputs, baseline=f"{name}-all")
            for name in in_place
            for part, inputs in (("all", self.inputs), ("half", half))
        }

    def _observe(self, play: Callable[[], Clocked]) -> dict[str, Any]:
        return observed(self.case.device, play)

    def _roofline(self) -> Contestant:
        def turn() -> float:
            return clock(lambda: self.scratch.copy_(self.inputs.logits), self.case.device).seconds

        return Contestant(lambda: turn, "naive", {"bytes_needed": 2 * self.case.logits_bytes})


def hidden_contests(case: Case, width: int, names: list[str], rounds: int) -> Iterator[tuple[str, Contest]]:
    whole = hidden.Hidden.make(case, width)
    floor = {hidden.ROOFLINE: hidden.products(case, whole)}
    observe = functools.partial(observed, case.device)
    everybody = {name: hidden.contestant(name, case, whole, "naive", observe) for name in names}
    yield "hidden", contest.run({**everybody, **floor}, rounds)
    half = whole.half_masked()
    pairs = {
        f"{name}-{part}": hidden.contestant(name, case, inputs, f"{name}-all", observe)
        for name in names
        if name not in ("naive", "naive_float")
        for part, inputs in (("all", whole), ("half", half))
    }
    yield "hidden_half_masked", contest.run(pairs, rounds)


class Report:
    """What was found so far, on the screen and in a file of pytest-benchmark's form, which `python -m benchmarks.table` reads."""

    def __init__(self, path: Path | None, dry: bool) -> None:
        self.path, self.dry = path, dry
        self.found: dict[str, Any] = {
            "machine_info": machine_info(),
            "commit_info": {"id": os.environ.get("COMMIT", "unversioned")},
            "datetime": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "benchmarks": [],
            "not_measured": {},
            "failed": {},
            "goals": [],
        }

    def add(self, kind: str, case: Case, outcome: Contest, roofline: str, width: int | None = None) -> None:
        group = f"{kind} {case.id}"
        shared = {
            "rows": case.rows, "vocab": case.vocab, "width": width, "dtype": case.dtype, "logits_bytes": case.logits_bytes,
            "threads": torch.get_num_threads(), "device": device_name(), "load_average": os.getloadavg()[0],
        }  # fmt: skip
        members = [
            {
                "name": f"{kind}[{case.id}-{name}]",
                "group": group,
                "stats": {"median": statistics.median(seconds), "rounds": len(seconds), "data": seconds},
                "extra_info": {"contestant": name, **shared, **figures(outcome, name, roofline)},
            }
            for name, seconds in outcome.seconds.items()
        ]
        self.found["benchmarks"] += members
        if members:
            print(table.markdown(members) + "\n", flush=True)
        for name, error in outcome.failures.items():
            self.leave_out(f"{group} {name}", error)
        self.save()

    @contextmanager
    def unless(self, late: bool, what: str) -> Iterator[None]:
        """What is inside, unless it is too late; what it raises is kept, since what comes after may still fit."""
        try:
            if late:
                raise Missing("out of time")
            yield
        except Exception as error:
            self.leave_out(what, error)
            self.save()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def leave_out(self, what: str, why: Exception) -> None:
        reason = str(why) if isinstance(why, Missing) else f"{type(why).__name__}: {why}"
        expected = isinstance(why, (Missing, torch.OutOfMemoryError))
        self.found["not_measured" if expected else "failed"][what] = reason.strip().partition("\n")[0][:300]

    def save(self) -> None:
        self.found["goals"] = goals.reached(self.found["benchmarks"], mean_something=not self.dry)
        if self.path:
            self.path.write_text(json.dumps(self.found, indent=1))
            self.path.with_suffix(".md").write_text(self.summary() + "\n")

    def summary(self) -> str:
        """Who failed, who is missing (once for each reason), the goals."""
        whom: dict[str, list[str]] = {}
        for what, reason in self.found["not_measured"].items():
            whom.setdefault(reason, []).append(what)
        absent = [f"  {what[0]}{f' and {len(what) - 1} more' if len(what) > 1 else ''}: {reason}" for reason, what in whom.items()]
        failed = [f"  {what}: {reason}" for what, reason in self.found["failed"].items()]
        lines = [*(["failed, and so not timed:", *failed, ""] if failed else []), *(["not measured:", *absent, ""] if absent else [])]
        return "\n".join([*lines, goals.markdown(self.found["goals"])])


def machine_info() -> dict[str, Any]:
    try:
        import grpo_kernels._C as native

        isa = native.isa()
    except ImportError as error:
        isa = f"none: {error}"
    ours = {"version": grpo_kernels.__version__, "instruction_set": isa, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return {"machine": device_name(), "grpo_kernels": {**ours, "backends": grpo_kernels.available_backends()}}


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU, dry run"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="toy shapes on the CPU")
    parser.add_argument("--output", type=Path, help="JSON, written anew after each contest")
    parser.add_argument("--leave-out", default="", metavar="REGEX", help="contestants not to run, e.g. compile")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further contest after so long")
    parser.add_argument("--rounds", type=int, help=f"turns of each contestant; {ROUNDS}, dry {DRY_ROUNDS}")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("there is no GPU; --dry runs the same path on the CPU")
    device, rounds = ("cpu", options.rounds or DRY_ROUNDS) if options.dry else ("cuda", options.rounds or ROUNDS)
    last, report = time.monotonic() + options.seconds, Report(options.output, options.dry)

    # The CPU's kernels stand in for the GPU's in a dry run, and flash-attn takes no tensor of a CPU.
    left_out = re.compile("|".join(filter(None, [options.leave_out, "^flash_attn" if options.dry else "^cpu"])))
    # Triton's interpreter truncates to bfloat16 where a GPU rounds.
    coarse = {name: replace(ON_GPU[name], rounds_logps=True) for name in ("liger", "trl_kernel") if options.dry}

    def kept(names: list[str]) -> list[str]:
        return [name for name in names if not left_out.search(name)]

    def from_logits(rows: int, vocab: int, dtype: str, contests: dict[str, list[str]]) -> None:
        case, arena = case_of(rows, vocab, dtype, device), None
        for kind, names in contests.items():
            with report.unless(time.monotonic() > last, f"{kind} {case.id}"):
                arena = arena or GpuArena(case, ON_GPU | coarse)
                report.add(kind, case, arena.hold(kind, kept(names), rounds), ROOFLINE)

    def from_hidden_states(rows: int, vocab: int, width: int) -> None:
        case = case_of(rows, vocab, "bfloat16", device)
        with report.unless(time.monotonic() > last, f"hidden {case.id}"):
            for kind, outcome in hidden_contests(case, width, kept(list(hidden.LOSSES)), rounds):
                report.add(kind, case, outcome, hidden.ROOFLINE, width)

    first, *rest = DRY if options.dry else SUITES
    from_logits(*first[0], first[1])
    from_hidden_states(*(DRY_HIDDEN if options.dry else HIDDEN))
    for size, contests in rest:
        from_logits(*size, contests)
    report.save()
    if options.dry:
        print("A dry run: these figures mean nothing.\n")
    print(report.summary(), flush=True)
    return 1 if report.found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
