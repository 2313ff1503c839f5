"""Problems and rewards: where prompts come from, which of them are never trained on, and what an answer is worth.

A task is anything with `len`, `task[i] -> {"question", "answer", ...}` and `score_answer(answer, entry)`: reasoning-gym's data sets are,
and a JSONL file becomes one here.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from grpo_trainer.config import Config

Entry = dict[str, Any]
Reward = Callable[..., Sequence[float]]

# reasoning-gym makes problem i of a data set from random.Random(seed + i): seeds next to each other share nearly all their problems.
SEED_STRIDE = 10_000_000
HELD_OUT_SEED = 3_000_000_000  # the same held-out problems whatever the run's seed; the largest that numpy takes is 2^32 - 1


class Entries(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Entry: ...


class Task(Entries, Protocol):
    def score_answer(self, answer: str | None, entry: Entry) -> float: ...


class Problems:
    """The training problems in order, and the held-out ones.

    `cursor` is the index of the next training problem, all the state there is. A problem whose question is held out, or whose prompt
    `fits` says is too long, is passed over. After the last problem comes the first again (a JSONL file is shuffled anew).
    """

    def __init__(self, config: Config, fits: Callable[[Entry], bool]) -> None:
        self.task: Task
        candidates: Entries
        if config.task.endswith(".jsonl"):
            self.task = lines = JsonLines(config)
            candidates = lines.entries[::-1]  # the end of the file, whatever the seed
        else:
            self.task = gym_task(config, seed=config.seed * SEED_STRIDE % HELD_OUT_SEED)
            candidates = gym_task(config, seed=HELD_OUT_SEED)
        self.fits = fits
        self.held_out = _distinct(candidates, config.eval_size, fits)
        if len(self.held_out) < config.eval_size:
            raise ValueError(
                f"--eval-size: expected {config.eval_size} different problems with prompts within --max-prompt-length, "
                f"found {len(self.held_out)} in {config.task}"
            )
        self._held_out_questions = {entry["question"] for entry in self.held_out}
        self.cursor = 0
        self.take(1)  # a task with nothing left to train on says so now
        self.cursor = 0

    def take(self, count: int) -> list[Entry]:
        """The next `count` training problems."""
        entries: list[Entry] = []
        passed_over = 0
        while len(entries) < count:
            entry = self.task[self.cursor]
            self.cursor += 1
            if entry["question"] in self._held_out_questions or not self.fits(entry):
                passed_over += 1
                if passed_over >= len(self.task):
                    raise ValueError("--task: no problem to train on: all are held out (--eval-size) or too long (--max-prompt-length)")
                continue
            entries.append(entry)
        assert not self._held_out_questions & {entry["question"] for entry in entries}
        return entries

    def verify(self, completions: Sequence[str], entries: Sequence[Entry]) -> list[float]:
        """The task's own score, in [0, 1], of what stands between the last <answer> and </answer> of each completion."""
        return [float(self.task.score_answer(extract_answer(text), entry)) for text, entry in zip(completions, entries)]


def gym_task(config: Config, seed: int, size: int = SEED_STRIDE) -> Task:
    """A reasoning-gym data set. `size` costs nothing: problems are made when they are asked for."""
    if config.task not in DATASETS:
        raise ValueError(
            f"--task: reasoning-gym has no data set {config.task!r} (nor does .jsonl end it); it has {', '.join(sorted(DATASETS))}"
        )
    known = {f.name for f in fields(DATASETS[config.task][1])} - {"seed"}
    unknown = config.task_options.keys() - known
    if unknown:
        raise ValueError(f"--task-options: {config.task} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    try:
        return reasoning_gym.create_dataset(config.task, **({"size": size} | config.task_options), seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"--task-options: {config.task} refuses {config.task_options}: {error}") from error


class JsonLines:
    """A .jsonl file: one object a line with `prompt` and `answer` (text or number), other keys go to the reward functions."""

    def __init__(self, config: Config) -> None:
        path = Path(config.task)
        if not path.is_file():
            raise ValueError(f"--task: there is no file {config.task}")
        if config.task_options:
            raise ValueError(f"--task-options: a .jsonl file has none, got {config.task_options}")
        with path.open(encoding="utf-8") as lines:
            self.entries = [self._entry(config.task, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not self.entries:
            raise ValueError(f"--task: {config.task} is empty; expected a line with prompt and answer for each problem")
        self.seed = config.seed
        self._epoch, self._order = -1, list(range(len(self.entries)))

    @staticmethod
    def _entry(name: str, number: int, line: str) -> Entry:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"--task: line {number} of {name} is not JSON: {error}") from error
        fields = entry if isinstance(entry, dict) else {}
        if not isinstance(fields.get("prompt"), str) or not isinstance(fields.get("answer"), (str, int, float)):
            raise ValueError(f"--task: line {number} of {name}: expected an object with a text prompt and an answer, got {line[:200]!r}")
        return {**entry, "question": entry["prompt"], "answer": str(entry["answer"])}

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        epoch, position = divmod(index, len(self.entries))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self.entries)))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
        return self.entries[self._order[position]]

    def score_answer(self, answer: str | None, entry: Entry) -> float:
        """1 for the same text but for surrounding blanks, else 0."""
        return float(answer is not None and answer.strip() == entry["answer"].strip())


def _distinct(task: Entries, count: int, fits: Callable[[Entry], bool]) -> list[Entry]:
    """The first `count` problems with different questions; fewer where the task has no more, or repeats itself for too long."""
    found: dict[str, Entry] = {}
    for index in range(min(len(task), 100 * count)):
        if len(found) == count:
            break
        entry = task[index]
        if fits(entry):
            found.setdefault(entry["question"], entry)
    return list(found.values())


class Scorer:
    """The weighted sum of the rewards of a step's completions, each checked for being one finite number a completion."""

    def __init__(self, config: Config, problems: Problems) -> None:
        self.problems = problems
        self.rewards = {name: None if name == "verifier" else load_function("--rewards", name) for name in config.rewards}
        self.weights = config.reward_weights or (1.0,) * len(config.rewards)

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], entries: list[Entry]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """The totals, and each reward's own values by name."""
        columns = columns_of(prompts, completions, completion_ids, entries)
        values: dict[str, list[float]] = {}
        for name, reward in self.rewards.items():
            if reward is None:
                returned: Any = self.problems.verify(completions, entries)
            else:
                try:
                    returned = reward(**columns)
                except Exception as error:
                    raise RuntimeError(f"the reward {name} raised {type(error).__name__}: {error}") from error
            values[name] = checked_rewards(f"the reward {name}", returned, completions)
        return [sum(w * v for w, v in zip(self.weights, row)) for row in zip(*values.values())], values


def columns_of(prompts: list[str], completions: list[str], completion_ids: list[list[int]], entries: list[Entry]) -> dict[str, list[Any]]:
    """What every reward function is called with."""
    columns: dict[str, list[Any]] = {key: [entry[key] for entry in entries] for key in entries[0] if all(key in entry for entry in entries)}
    columns |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    columns.pop("prompt", None)
    return columns


def load_function(flag: str, name: str) -> Callable[..., Any]:
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        expected = "'verifier' or module:function" if flag == "--rewards" else "module:function"
        raise ValueError(f"{flag}: expected {expected}, got {name!r}")
    if os.getcwd() not in sys.path:  # a console script has its own folder there instead
        sys.path.insert(0, os.getcwd())
    try:
        reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{flag}: cannot import {name!r} from the current folder or the installed packages: {error}") from error
    if not callable(reward):
        raise ValueError(f"{flag}: {name!r} is a {type(reward).__name__}, expected a function")
    return reward


def checked_rewards(source: str, returned: Any, texts: Sequence[str], unit: str = "completion") -> list[float]:
    """One finite number for each of the texts, or a ValueError that shows the first one that is not."""
    try:
        values = list(returned.tolist() if hasattr(returned, "tolist") else returned)
    except TypeError:
        raise ValueError(f"{source}: expected a list of {len(texts)} numbers, got {type(returned).__name__}") from None
    if isinstance(returned, str) or len(values) != len(texts):
        raise ValueError(f"{source}: expected {len(texts)} numbers, one a {unit}, got {len(values)}")
    for value, text in zip(values, texts):
        if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
            raise ValueError(f"{source}: expected a finite number, got {value!r} for the {unit} {text[:200]!r}")
        if not math.isfinite(float(value)):
            raise ValueError(f"{source}: expected a finite number, got {value} for the {unit} {text[:200]!r}")
    return [float(value) for value in values]
