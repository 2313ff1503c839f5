"""Problems, held-out problems and rewards, and what is said about the ones that cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.config import Config
from grpo_trainer.tasks import Problems, Scorer, checked_rewards

Settings = Callable[..., Config]


def fits(entry: Any) -> bool:
    return True


def write_lines(path: Path, entries: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")
    return str(path)


def test_no_held_out_problem_is_ever_trained_on(settings: Settings) -> None:
    # 200 different problems in all, so that most of a plain sequence would be held out
    config = settings(task_options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, eval_size=150)
    problems = Problems(config, fits)
    held_out = {entry["question"] for entry in problems.held_out}
    assert len(held_out) == 150
    trained = [entry["question"] for entry in problems.take(500)]
    assert not held_out & set(trained)


def test_held_out_problems_are_the_same_for_every_seed_and_training_problems_are_not(settings: Settings) -> None:
    first, second = (Problems(settings(seed=seed), fits) for seed in (0, 1))
    assert first.held_out == second.held_out
    wide = {"min_terms": 6, "max_terms": 6}
    first, second = (Problems(settings(seed=seed, task_options=wide), fits) for seed in (0, 1))
    assert not {e["question"] for e in first.take(200)} & {e["question"] for e in second.take(200)}


def test_too_long_prompts_are_left_out(settings: Settings) -> None:
    problems = Problems(settings(), lambda entry: entry["metadata"]["num_terms"] < 4)
    assert {entry["metadata"]["num_terms"] for entry in problems.held_out + problems.take(50)} == {2, 3}
    with pytest.raises(ValueError, match="--eval-size: expected 6 .* found 0"):
        Problems(settings(), lambda entry: False)
    with pytest.raises(ValueError, match="--max-prompt-length"):
        Problems(settings(eval_size=0, task_options={"size": 50}), lambda entry: False)


def test_every_reasoning_gym_name_is_a_task_and_the_cursor_is_the_whole_state(settings: Settings) -> None:
    config = settings(task="spell_backward", task_options={"max_word_len": 5}, eval_size=5)
    problems = Problems(config, fits)
    problems.take(7)
    cursor, following = problems.cursor, problems.take(4)
    again = Problems(config, fits)
    again.cursor = cursor
    assert again.take(4) == following
    right = [f"<think> so </think> <answer>{entry['answer']}</answer>" for entry in following]
    assert problems.verify(right, following) == [1.0] * 4
    assert max(problems.verify(["no tags"] * 4, following)) < 0.1


def test_json_lines(settings: Settings, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.jsonl", [{"prompt": f"{i} =", "answer": i, "level": i % 2} for i in range(12)])
    problems = Problems(settings(task=path, task_options={}, eval_size=4), fits)
    held_out = {entry["question"] for entry in problems.held_out}
    epochs = [[entry["question"] for entry in problems.take(8)] for _ in range(2)]
    assert held_out == {"8 =", "9 =", "10 =", "11 ="}
    assert all(set(epoch) == {f"{i} =" for i in range(12)} - held_out for epoch in epochs)
    assert epochs[0] != epochs[1]  # shuffled anew
    assert problems.verify(["<answer> 3 </answer>", "<answer>4</answer>", "3"], [{"answer": "3"}] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        ([{"prompt": "1 ="}], "line 1 .* expected an object with a text prompt and an answer"),
        ([{"prompt": "1 =", "answer": "1"}, ["2 =", "2"]], "line 2"),
        ([{"prompt": 1, "answer": "1"}], "line 1"),
        ([{"prompt": "1 =", "answer": "1"}], "--eval-size: expected 6 different problems .* found 1"),
    ],
)
def test_bad_json_lines(settings: Settings, tmp_path: Path, lines: list[Any], message: str) -> None:
    path = write_lines(tmp_path / "own.jsonl", lines)
    with pytest.raises(ValueError, match=message):
        Problems(settings(task=path, task_options={}), fits)


def test_all_problems_held_out_leaves_none_to_train_on(settings: Settings, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.jsonl", [{"prompt": f"{i} =", "answer": i} for i in range(6)])
    with pytest.raises(ValueError, match="no problem to train on"):
        Problems(settings(task=path, task_options={}), fits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "no_such_task"}, "--task: reasoning-gym has no data set 'no_such_task' .*; it has .*chain_sum"),
        ({"task": "missing.jsonl"}, "--task: there is no file missing.jsonl"),
        ({"task_options": {"max_trems": 3}}, "--task-options: chain_sum has no option max_trems; it has .*max_terms"),
        ({"task_options": {"min_terms": 5, "max_terms": 3}}, "--task-options: chain_sum refuses .*max_terms must be >= min_terms"),
        ({"task_options": {"min_terms": "two"}}, "--task-options: chain_sum refuses"),
    ],
)
def test_bad_tasks(settings: Settings, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problems(settings(**changes), fits)


def test_rewards_are_weighted_and_summed(settings: Settings, rewards: str) -> None:
    config = settings(rewards=("verifier", f"{rewards}:lengths"), reward_weights=(1.0, -0.5))
    problems = Problems(config, fits)
    entries = problems.take(2)
    texts = [f"<answer> {entries[0]['answer']} </answer>", "<answer> x </answer>"]
    totals, each = Scorer(config, problems)(["p", "p"], texts, [[1, 2, 3], [1]], entries)
    assert each == {"verifier": [1.0, 0.0], f"{rewards}:lengths": [0.3, 0.1]}
    assert totals == pytest.approx([1 - 0.15, -0.05])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nan", "some_rewards:nan: expected a finite number, got nan for the completion 'a'"),
        ("text", "some_rewards:text: expected a finite number, got 'good'"),
        ("none", "some_rewards:none: expected a finite number, got None"),
        ("too_few", "some_rewards:too_few: expected 2 numbers, one a completion, got 1"),
        ("number", "some_rewards:number: expected a list of 2 numbers, got float"),
    ],
)
def test_bad_reward_values(settings: Settings, rewards: str, function: str, message: str) -> None:
    config = settings(rewards=(f"{rewards}:{function}",))
    problems = Problems(config, fits)
    with pytest.raises(ValueError, match=message):
        Scorer(config, problems)(["p", "p"], ["a", "b"], [[1], [1]], problems.take(2))


def test_reward_that_raises_is_named(settings: Settings, rewards: str) -> None:
    config = settings(rewards=(f"{rewards}:raises",))
    problems = Problems(config, fits)
    with pytest.raises(RuntimeError, match="some_rewards:raises raised KeyError: 'no such column'"):
        Scorer(config, problems)(["p"], ["a"], [[1]], problems.take(1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("verifyer", "expected 'verifier' or module:function, got 'verifyer'"),
        ("no_such_module:f", "cannot import 'no_such_module:f'"),
        ("some_rewards:no_such", "cannot import 'some_rewards:no_such'"),
        ("some_rewards:not_a_function", "is a int, expected a function"),
    ],
)
def test_bad_reward_names(settings: Settings, name: str, message: str) -> None:
    config = settings(rewards=(name,))
    problems = Problems(config, fits)
    with pytest.raises(ValueError, match=message):
        Scorer(config, problems)


def test_arrays_and_tensors_are_numbers_too() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for values in (numpy.array([1, 2]), torch.tensor([1.0, 2.0]), [torch.tensor(1.0), numpy.float32(2)], (True, 2)):
        assert checked_rewards("r", values, ["a", "b"]) == [1.0, 2.0]
