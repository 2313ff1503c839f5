"""The demo's whole path in its quick form, and what it trains on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from grpo_trainer import demo
from grpo_trainer.__main__ import main
from grpo_trainer.config import DEMO, Config
from grpo_trainer.tasks import Problems
from grpo_trainer.train import is_worked


def entry_of(config: Config) -> Problems:
    return Problems(config, lambda entry: True)


def test_tokenizer_gives_back_every_text_with_one_token_a_number() -> None:
    tokenizer = demo.make_tokenizer()
    problems = entry_of(Config(**DEMO))
    for share in (0.0, 1.0):
        for entry in problems.take(200):
            for text in (entry["question"], demo.example(entry, share)):
                ids = tokenizer(text)["input_ids"]
                assert tokenizer.unk_token_id not in ids
                assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert len(tokenizer(entry["question"])["input_ids"]) <= DEMO["max_prompt_length"]
            assert len(tokenizer(demo.example(entry, 1.0))["input_ids"]) < DEMO["max_completion_length"]


def test_every_example_is_right_by_the_verifier_and_both_kinds_occur() -> None:
    problems = entry_of(Config(**DEMO))
    entries = problems.take(300)
    texts = [demo.example(entry, 0.3) for entry in entries]
    assert problems.verify(texts, entries) == [1.0] * 300
    share = sum(map(is_worked, texts)) / 300
    assert abs(share - 0.3) < 0.1


def test_only_the_answer_is_learned() -> None:
    tokenizer = demo.make_tokenizer()
    entries = entry_of(Config(**DEMO)).take(8)
    ids, labels = demo.batch(tokenizer, entries, 0.5)
    for row, entry in enumerate(entries):
        prompt = len(tokenizer(entry["question"])["input_ids"])
        learned = labels[row] != -100
        assert not learned[:prompt].any() and torch.equal(labels[row][learned], ids[row][learned])
        assert labels[row][learned][-1] == tokenizer.eos_token_id
        assert (ids[row, prompt + int(learned.sum()) :] == tokenizer.pad_token_id).all()


def test_warm_up_problems_and_training_problems_are_different() -> None:
    problems = entry_of(Config(**DEMO))
    trained = DEMO["steps"] * DEMO["num_prompts"]
    warm = demo.STEPS * demo.BATCH
    # numbers of problems in the sequence; a hundredth more for those passed over
    assert 1.01 * trained < demo.FIRST_PROBLEM and demo.FIRST_PROBLEM + 1.01 * warm < len(problems.task)


@pytest.mark.serial
def test_quick_demo_writes_everything_and_repeats(tmp_path: Path, capsys: pytest.CaptureFixture[str], model_folders: object) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    main(["--demo", "--quick", "--output-dir", str(first)])
    said = capsys.readouterr().out
    assert f"Picture: {first}/reward.png" in said and "right answers (verifier)" in said and said.count("before  ") >= 5
    for name in ("config.json", "metrics.jsonl", "evaluations.jsonl", "reward.png", "summary.json"):
        assert (first / name).stat().st_size > 0
    summary = json.loads((first / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "seconds", "seed", "versions"} <= summary.keys()
    assert 0 <= summary["accuracy_before"] <= 1 and summary["seconds"] > 0 and "torch" in summary["versions"]
    answers = [json.loads(line) for line in (first / "evaluations.jsonl").read_text().splitlines()]
    assert {answer["step"] for answer in answers} == {0, 1, 2}
    main(["--demo", "--quick", "--output-dir", str(second)])
    assert (first / "evaluations.jsonl").read_bytes() == (second / "evaluations.jsonl").read_bytes()
    ends = [folder / "checkpoints/step-000002/model.safetensors" for folder in (first, second)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_interrupted_warm_up_resumes_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "QUICK_STEPS", 102)
    monkeypatch.setattr(demo, "BATCH", 2)
    config = Config(**DEMO, quick=True, demo=True)
    whole = demo.warm_up(config, tmp_path / "whole")
    original = demo.batch
    calls = []

    def interrupted(*arguments):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 102:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(demo, "batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo.warm_up(config, tmp_path / "parts")
    monkeypatch.setattr(demo, "batch", original)
    parts = demo.warm_up(config, tmp_path / "parts")
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()
