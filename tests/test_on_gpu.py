"""benchmarks/on_gpu.sh on a machine without a GPU: the dry run takes the same path, so that on a GPU no minute goes to a typing error."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kernels import available_backends

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "on_gpu.sh"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None or shutil.which("timeout") is None, reason="needs bash and timeout")


def dry_run(folder: Path, *phases: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # what compiles takes minutes
    given = {"PYTHON": sys.executable, "OUT": str(folder / "out"), "WORK": str(folder), "LEAVE_OUT": "compile", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GRPO_KERNELS_"))}
    command = ["bash", str(SCRIPT), "--dry", "--no-build", *phases]
    return subprocess.run(command, env=environment | given | variables, capture_output=True, text=True)


def assert_follows_from_the_rounds(found: dict) -> None:
    """Two of the goals, by hand: the faster of our backends beside naive and beside the copy, round by round."""
    group = next(x["group"] for x in found["benchmarks"] if x["group"].startswith("forward_backward"))
    rounds = {x["extra_info"]["contestant"]: x["stats"]["data"] for x in found["benchmarks"] if x["group"] == group}
    ours = min((data for name, data in rounds.items() if name.endswith("_inplace")), key=statistics.median)
    reached = {row["what"]: row["reached"] for row in found["goals"]}
    assert reached["times faster than naive"] == statistics.median(a / b for a, b in zip(rounds["naive"], ours))
    assert reached["one pass in place, of copy_"] == statistics.median(a / b for a, b in zip(ours, rounds["copy_"]))


def test_the_dry_run_tests_compares_and_ends_with_the_goals(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "test", "bench")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "bench.log", "environment.txt", "gpu.json", "gpu.log", "gpu.md", "suite.log",
    ]  # fmt: skip
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    measured: dict[str, set[str]] = {}
    for benchmark in found["benchmarks"]:
        measured.setdefault(benchmark["group"].split()[0], set()).add(benchmark["extra_info"]["contestant"])
        assert len(benchmark["stats"]["data"]) == 2
    assert measured.keys() == {"forward_backward", "forward", "half_masked", "sequence", "hidden", "hidden_half_masked"}
    assert measured["forward_backward"] >= {"naive", "naive_float", "trl_steps", "cpu", "cpu_one_pass", "cpu_inplace", "copy_"}
    assert measured["half_masked"] >= {"cpu_inplace-all", "cpu_inplace-half"} and measured["hidden"] >= {"naive", "cpu", "products"}
    if available_backends()["triton"] == "available" or "interpreter" in available_backends()["triton"]:  # there, in the script
        assert "triton_inplace" in measured["forward_backward"]
    assert not found["failed"] and any("cuda" in reason for reason in found["not_measured"].values())
    assert {row["goal"] for row in found["goals"]} == {"G1", "G2", "G3", "G4", "G5", "G6", "G7", "G9", "G10"}
    assert_follows_from_the_rounds(found)
    summary = done.stdout.partition("== summary")[2]
    assert "| G1 " in summary and "| a dry run |" in summary and "bench " in summary


def test_a_phase_that_hangs_costs_no_other(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "bench", "sanitize", BENCH_SECONDS="1")
    assert done.returncode == 1
    summary = done.stdout.partition("== summary")[2].split("\n")
    phases = {line.split()[0]: line for line in summary if line.startswith(("bench ", "sanitize "))}
    assert "out of time" in phases["bench"] and phases["sanitize"].endswith("done"), done.stdout
    assert "cpu: 31 cases are right" in done.stdout


def test_a_wrong_word_is_answered_with_the_usage(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "everything")
    assert done.returncode == 2 and "--dry takes the same path" in done.stdout and not (tmp_path / "out").exists()
