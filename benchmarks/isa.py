"""The same kernels under each instruction set: one child process for each, since the choice is made once in a process. They take turns.

A child is told a line, "forward" or "inplace", plays it once and answers with the seconds, or with the reason why it cannot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # behind the installed packages

from benchmarks.contest import Turn
from benchmarks.implementations import Missing
from benchmarks.inputs import Case, WrongAnswer

NAMES = ("avx512", "avx2", "baseline")


class Children:
    """One waiting process for each instruction set; they start together, since each imports for seconds."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __enter__(self) -> Children:
        self._children = {
            name: subprocess.Popen(
                [sys.executable, __file__, json.dumps(asdict(self._case))],
                env={**os.environ, "GRPO_KERNELS_ISA": name},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for name in NAMES
        }  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for child in self._children.values():
            child.communicate()  # closes its input, which ends it

    def enter(self, what: str, name: str) -> Turn:
        self._ask(what, name)  # verifies
        return lambda: self._ask(what, name)

    def _ask(self, what: str, name: str) -> float:
        child = self._children[name]
        assert child.stdin is not None and child.stdout is not None
        if child.poll() is None:
            child.stdin.write(what + "\n")
            child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"the child process for {name} ended with status {child.wait()}")
        answer = json.loads(line)
        if "missing" in answer:
            raise Missing(answer["missing"])
        if "wrong" in answer:
            raise WrongAnswer(answer["wrong"])
        return float(answer["seconds"])


def main() -> None:
    from benchmarks.arena import Arena

    try:
        import grpo_kernels._C as native

        wanted = os.environ["GRPO_KERNELS_ISA"]
        reason = "" if native.isa() == wanted else f"this machine has {', '.join(native.isas())}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    arena = None if reason else Arena(Case(**json.loads(sys.argv[1])))
    turns: dict[str, Turn] = {}
    for line in sys.stdin:
        what = line.strip()
        try:
            if arena is None:
                raise Missing(reason)
            if what not in turns:
                contestant = arena.scores("ours") if what == "forward" else arena.trains("ours_inplace")
                turns[what] = contestant.enter()
            answer: dict[str, object] = {"seconds": turns[what]()}
        except Missing as error:
            answer = {"missing": str(error)}
        except WrongAnswer as error:
            answer = {"wrong": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
