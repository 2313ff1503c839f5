"""The benchmarks themselves, on toy shapes: they check before they time, every figure in their output follows from rounds that were run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# torch.compile takes minutes to compile; every child process imports torch for seconds, so one dtype's are enough.
QUICK = "not compile and (float32 or not (memory or instruction_sets)) and (inplace or ours_forward or not memory)"
COMPARED = ("naive", "trl", "ours", "ours_one_pass", "ours_inplace", "mul_")


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """Output and JSON of one run."""
    folder = tmp_path_factory.mktemp("benchmarks")
    process = _benchmarks(folder, "-k", QUICK)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout, json.loads((folder / "run.json").read_text())


def _environment() -> dict[str, str]:
    """For a child that is to find modules of its own folder: `make test` keeps that folder off the path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def _benchmarks(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a folder of its own: in the repository's, `python -m` would import the sources, which hold no compiled module."""
    # No variable of pytest-xdist, even where this test runs in a worker of it: pytest-benchmark would switch itself off.
    environment = {name: value for name, value in _environment().items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", str(ROOT / "benchmarks"), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "--tiny", "--benchmark-only", "--benchmark-json=run.json", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def _rounds(run: dict) -> dict[str, dict]:
    return {benchmark["name"]: benchmark for benchmark in run["benchmarks"]}


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_ratio_follows_from_the_rounds_of_the_same_run(toy_run: tuple[str, dict], dtype: str) -> None:
    rounds = _rounds(toy_run[1])
    for name in COMPARED:
        benchmark = rounds[f"test_forward_backward[cpu-tiny-{dtype}-{name}]"]
        info, own = benchmark["extra_info"], benchmark["stats"]["data"]
        naive = rounds[f"test_forward_backward[cpu-tiny-{dtype}-naive]"]["stats"]["data"]
        roofline = rounds[f"test_forward_backward[cpu-tiny-{dtype}-mul_]"]["stats"]["data"]
        assert benchmark["group"] == f"forward_backward cpu-tiny-{dtype}"
        assert len(own) == len(naive) >= 5
        ratios = [theirs / mine for mine, theirs in zip(own, naive)]
        assert info["faster_than_baseline"] == {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        assert info["share_of_roofline"]["median"] == statistics.median(theirs / mine for mine, theirs in zip(own, roofline))
        assert info["gb_per_s"] == pytest.approx(2 * info["logits_bytes"] / statistics.median(own) / 1e9)


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_hidden_states_everybody_is_compared_with_the_products_of_the_same_rounds(toy_run: tuple[str, dict], dtype: str) -> None:
    rounds = _rounds(toy_run[1])
    for test in ("hidden", "hidden_forward"):
        products = rounds[f"test_{test}[cpu-tiny-{dtype}-products]"]["stats"]["data"]
        for name in ("naive", "ours"):
            benchmark = rounds[f"test_{test}[cpu-tiny-{dtype}-{name}]"]
            own = benchmark["stats"]["data"]
            assert len(own) == len(products) >= 5
            ratios = [least / mine for mine, least in zip(own, products)]
            assert benchmark["extra_info"]["share_of_roofline"]["median"] == statistics.median(ratios)
    for error in ("loss", "gradient of the hidden states", "gradient of the weight"):
        exact, rounded = (rounds[f"test_hidden[cpu-tiny-{x}-ours]"]["extra_info"][f"error of the {error}"] for x in ("float32", "bfloat16"))
        assert exact < 1e-6 and exact < rounded < 0.01
    memory = rounds["test_hidden_memory[cpu-tiny-float32-ours_forward]"]["extra_info"]
    assert memory["width"] == 24 and memory["of_logits"] == memory["extra_bytes"] / (24 * 1003 * 4)


@pytest.mark.serial
@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_traffic_is_what_the_design_says(toy_run: tuple[str, dict], dtype: str, size: int) -> None:
    """In passes over the logits. naive: log_softmax 2; backward: zeros to scatter into 1, its own derivative 3."""
    rounds, passes = _rounds(toy_run[1]), {"naive": 6, "ours": 3, "ours_one_pass": 2, "ours_inplace": 2, "mul_": 2}
    for name, expected in passes.items():
        info = rounds[f"test_forward_backward[cpu-tiny-{dtype}-{name}]"]["extra_info"]
        assert info["bytes_counted"] == expected * info["logits_bytes"], name
    for name, expected in {"naive": 2, "ours": 1}.items():
        info = rounds[f"test_forward[cpu-tiny-{dtype}-{name}]"]["extra_info"]
        assert info["bytes_counted"] == expected * info["logits_bytes"], name
        assert info["logits_bytes"] == 24 * 1003 * size


@pytest.mark.serial
def test_the_table_has_everybody_and_names_the_absent(toy_run: tuple[str, dict], tmp_path: Path) -> None:
    output, run = toy_run
    summary = output.partition("grpo_kernels beside the others")[2]
    saved = tmp_path / "run.json"
    saved.write_text(json.dumps(run))
    table = subprocess.run(
        [sys.executable, "-m", "benchmarks.table", str(saved)], cwd=ROOT, env=_environment(), capture_output=True, text=True, check=True
    ).stdout
    for text in (summary, table):
        for name in COMPARED:
            assert f"| {name} " in text
    for test in ("half_masked", "threads", "instruction_sets", "memory", "hidden", "hidden_forward", "hidden_half_masked", "hidden_memory"):
        assert f"**{test} cpu-tiny-float32**" in table
    assert "forward cpu-tiny-float32 naive_float: the same as naive for float32" in summary.partition("not measured")[2]


@pytest.mark.serial
def test_a_wrong_answer_is_not_timed(tmp_path: Path) -> None:
    """naive is replaced by one that is off by 0.1 in one token: its test fails, no figure of it is saved, the others go on."""
    plugin = tmp_path / "one_wrong_token.py"
    plugin.write_text(
        "import pytest\n"
        "@pytest.fixture(autouse=True, scope='session')\n"
        "def one_wrong_token():\n"
        "    import dataclasses\n"
        "    from benchmarks.implementations import IMPLEMENTATIONS\n"
        "    right = IMPLEMENTATIONS['naive']\n"
        "    def wrong(logits, inputs):\n"
        "        logps = right.logps(logits, inputs).clone()\n"
        "        logps[-1, -1] += 0.1\n"
        "        return logps\n"
        "    IMPLEMENTATIONS['naive'] = dataclasses.replace(right, logps=wrong)\n"
    )
    process = _benchmarks(tmp_path, "-p", plugin.stem, "-k", "test_forward and float32 and not backward and (naive or ours)")
    assert process.returncode == 1
    assert "WrongAnswer: logps: off by 0.1" in process.stdout
    assert set(_rounds(json.loads((tmp_path / "run.json").read_text()))) == {"test_forward[cpu-tiny-float32-ours]"}


@pytest.mark.serial
def test_a_wrong_gradient_from_hidden_states_is_not_timed(tmp_path: Path) -> None:
    """The loss of naive is right, the gradients 2 % too large; ours, in turn with it, is timed."""
    plugin = tmp_path / "large_gradient.py"
    plugin.write_text(
        "import pytest\n"
        "@pytest.fixture(autouse=True, scope='session')\n"
        "def large_gradient():\n"
        "    from benchmarks import hidden\n"
        "    right = hidden.LOSSES['naive']\n"
        "    def wrong(inputs):\n"
        "        loss = right(inputs)\n"
        "        return 1.02 * loss - 0.02 * loss.detach()\n"
        "    hidden.LOSSES['naive'] = wrong\n"
    )
    process = _benchmarks(
        tmp_path, "-p", plugin.stem, "-k", "test_hidden and float32 and not (memory or forward or half) and (naive or ours)"
    )
    assert process.returncode == 1
    assert "WrongAnswer: gradient of the hidden states: off by 0.02 of its norm" in process.stdout
    assert set(_rounds(json.loads((tmp_path / "run.json").read_text()))) == {"test_hidden[cpu-tiny-float32-ours]"}
