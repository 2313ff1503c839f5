"""A run that is killed anywhere goes on from its last checkpoint with the same bits as one that was not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_trainer import checkpoint, report
from grpo_trainer.config import Config
from grpo_trainer.train import train

Settings = Callable[..., Config]

# Runs a Config and kills itself, as the kernel would, after a number of micro-batches have been through their backward.
KILLED = """
import json, os, signal, sys
import grpo_trainer.train as module
from grpo_trainer.config import Config
calls = 0
original = module.grpo_metrics
def counting(*arguments):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
module.grpo_metrics = counting  # called between a micro-batch's backward and the next one's forward
values = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(sys.argv[1]).items()}
module.train(Config(**values))
"""


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in ("seconds", "tokens_per_second")} for record in records]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def test_killed_in_mid_accumulation_during_warm_up_and_resumed_repeats_all_bits(settings: Settings, tmp_path: Path, rewards: str) -> None:
    # 3 micro-batches a pass in windows of 2 and 1, two passes: 6 micro-batches and 4 optimiser steps a step, 24 in all, all warm-up
    changes: dict[str, Any] = {
        "steps": 6, "save_every": 2, "eval_every": 3, "eval_size": 4, "num_iterations": 2, "gradient_accumulation_steps": 2,
        "warmup_steps": 30, "beta": 0.05, "rewards": (f"{rewards}:lengths",), "learning_rate": 5e-3,
    }  # fmt: skip
    whole = settings(output_dir=str(tmp_path / "whole"), **changes)
    train(whole)

    killed = settings(output_dir=str(tmp_path / "killed"), **changes)
    # micro-batch 4 * 6 + 3 + 1: the first of a window of two in the second pass of step 5
    process = subprocess.run([sys.executable, "-c", KILLED, json.dumps(asdict(killed)), "28"], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    output = tmp_path / "killed"
    assert [path.name for path in checkpoint.complete(output / "checkpoints")] == ["step-000002", "step-000004"]
    # what an interrupted write leaves behind must not matter either
    (output / "checkpoints/draft-000006").mkdir()
    with (output / report.METRICS).open("a") as file:
        file.write('{"step": 5, "rewa')
    train(killed, resume=True)

    ends = [folder / "checkpoints/step-000006" for folder in (tmp_path / "whole", output)]
    assert same(*[load_file(end / "model.safetensors") for end in ends])
    states = [torch.load(end / checkpoint.STATE, weights_only=True) for end in ends]
    for key in ("optimizer", "schedule", "random", "progress"):
        assert same(states[0][key], states[1][key]), key
    # the completions sampled after the resume, through everything that was measured on them
    assert timeless(report.read(tmp_path / "whole" / report.METRICS)) == timeless(report.read(output / report.METRICS))
    assert report.read(tmp_path / "whole" / report.EVALUATIONS) == report.read(output / report.EVALUATIONS)
    assert not (output / "checkpoints/draft-000006").exists()


def test_only_the_newest_checkpoints_are_kept_and_they_are_model_folders(settings: Settings) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = settings(steps=3, save_every=1, eval_size=0, keep_checkpoints=2)
    train(config)
    kept = checkpoint.complete(Path(config.output_dir) / "checkpoints")
    assert [path.name for path in kept] == ["step-000002", "step-000003"]
    assert AutoModelForCausalLM.from_pretrained(kept[-1]).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(kept[-1]).pad_token == "<pad>"


def test_a_finished_run_resumed_does_nothing(settings: Settings) -> None:
    config = settings(steps=1, save_every=1)
    record = train(config)
    assert train(config, resume=True) == record


def test_more_steps_can_be_added_to_a_finished_run(settings: Settings) -> None:
    train(settings(steps=1))
    assert train(settings(steps=3), resume=True)["step"] == 3


def test_random_state_goes_round() -> None:
    import random

    import numpy

    def draw() -> list[float]:
        return [random.random(), numpy.random.rand(), torch.rand(()).item()]

    checkpoint.set_seed(3)
    state = checkpoint.random_state()
    first = draw()
    checkpoint.set_random_state(state)
    assert draw() == first
    checkpoint.set_seed(3)
    assert draw() == first


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(settings: Settings, tmp_path: Path, how: signal.Signals) -> None:
    config = settings(steps=100_000, save_every=1, eval_size=0, num_prompts=1)
    output = Path(config.output_dir)
    output.mkdir()
    config.save(output)
    process = subprocess.Popen([sys.executable, "-m", "grpo_trainer", "--resume", "run"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not checkpoint.complete(output / "checkpoints"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    last = checkpoint.latest(output / "checkpoints")
    assert last is not None and f"interrupted. Kept: everything up to run/checkpoints/{last.name}" in errors
    assert "Continue with: grpo-train --resume run" in errors and "Traceback" not in errors
