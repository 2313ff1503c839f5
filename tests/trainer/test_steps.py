"""Process supervision: where steps end, what their rewards become, and that a run with them repeats and resumes as any other."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

import grpo_trainer.train as module
from grpo_kernels import process_advantages
from grpo_trainer import report
from grpo_trainer.__main__ import main
from grpo_trainer.config import Config, check, parser
from grpo_trainer.demo import example, running_sums
from grpo_trainer.rollout import decoded
from grpo_trainer.steps import StepScorer, checked_step_rewards, split, step_advantages, step_ends
from grpo_trainer.tasks import Problems

Settings = Callable[..., Config]

STEP_REWARDS = '''
"""Step rewards that tell steps apart without a model that knows anything; `seen` is what they were called with."""
seen = []
def lengths(steps, **columns):
    seen.append({"steps": steps, **columns})
    return [[len(step) / 10 for step in of_answer] for of_answer in steps]
def nan(steps, **columns):
    return [[float("nan")] * len(of_answer) for of_answer in steps]
def one_each(steps, **columns):
    return [1.0] * len(steps)
def too_few(steps, **columns):
    return [[]] * len(steps)
def one_answer(steps, **columns):
    return [[1.0]]
def nothing(steps, **columns):
    pass
def raises(steps, **columns):
    raise KeyError("no such column")
'''


@pytest.fixture
def process(settings: Settings, rewards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """As `settings`, with process supervision; `step_reward` is a function of STEP_REWARDS."""
    (tmp_path / "some_steps.py").write_text(STEP_REWARDS)
    monkeypatch.delitem(sys.modules, "some_steps", raising=False)

    def make(step_reward: str = "lengths", **changes: Any) -> Config:
        values = {"supervision": "process", "step_reward": f"some_steps:{step_reward}", "step_delimiter": "=", "max_completion_length": 16}
        return settings(**(values | changes))

    return make


def tokenizer_of(tokens: list[str], decoder: Any) -> Any:
    vocabulary = {token: index for index, token in enumerate(["<eos>", "<unk>", *tokens])}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


# tokens that are, reach over, hold several of, or only begin a delimiter
SPANNING = tokenizer_of(["a", "b", "\n", ".\n", "\nb", "a\nb\na", "\n\n", " "], decoders.Fuse())
BYTES = tokenizer_of([f"<0x{byte:02X}>" for byte in range(256)], decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))


def trained_bpe() -> Any:
    """As GPT-2's: tokens of bytes, merged across words, so that some reach over a delimiter and some are part of a character."""
    inner = Tokenizer(BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(["ab\na你b\n\na"] * 9, BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=inner)


BPE_BYTES = trained_bpe()


def ends_of(tokenizer: Any, ids: list[int], delimiter: str) -> list[int]:
    def decode(ids: list[int]) -> str:
        return decoded(tokenizer, ids)

    text = decode(ids)
    return step_ends(decode, ids, text, split(text, delimiter))


def by_trying_every_prefix(tokenizer: Any, ids: list[int], delimiter: str) -> list[int]:
    text = decoded(tokenizer, ids)
    prefixes = [decoded(tokenizer, ids[: index + 1]) for index in range(len(ids))]
    starts = ["".join(split(text, delimiter)[: index + 1]) for index in range(len(split(text, delimiter)))]
    ends = [next(index for index, prefix in enumerate(prefixes) if prefix.startswith(start)) for start in starts]
    return ends[:-1] + [len(ids) - 1] * bool(starts)


@pytest.mark.parametrize(
    ("text", "delimiter", "steps"),
    [
        ("one\ntwo", "\n", ["one\n", "two"]),
        ("one\ntwo\n", "\n", ["one\n", "two\n"]),
        ("\n\none\n \n\ntwo", "\n", ["\n\none\n \n\n", "two"]),
        ("one", "\n", ["one"]),
        ("one\n\ntwo\nmore", "\n\n", ["one\n\n", "two\nmore"]),
        ("6 - 2 = 4 + 1 = 5", "=", ["6 - 2 =", " 4 + 1 =", " 5"]),
        ("", "\n", []),
        (" \n\n", "\n", []),
    ],
)
def test_steps_are_the_pieces_that_say_something(text: str, delimiter: str, steps: list[str]) -> None:
    assert split(text, delimiter) == steps
    assert not steps or "".join(steps) == text


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["a", "\n", "b", "<eos>"], [1, 3]),
        (["a", "\nb", "a", "<eos>"], [1, 3]),  # the token that ends a step may begin the next one
        (["a\nb\na", "b"], [0, 0, 1]),  # two steps end in one token
        (["a\nb\na"], [0, 0, 0]),
        (["a", ".\n", "\n", " ", "\n", "b", "\n\n", "a"], [4, 6, 7]),  # blank lines belong to the step before
        (["a", ".\n", "<eos>"], [2]),  # and so does the end token
        (["a", "<eos>", "\n", "b"], [2, 3]),
        (["a", "b"], [1]),
        (["\n", " ", "<eos>"], []),
        (["<eos>"], []),
    ],
)
def test_ends_are_tokens_where_tokens_reach_over_the_delimiter(tokens: list[str], ends: list[int]) -> None:
    ids = SPANNING.convert_tokens_to_ids(tokens)
    assert SPANNING.unk_token_id not in ids
    assert ends_of(SPANNING, ids, "\n") == ends


@pytest.mark.parametrize(
    ("text", "delimiter", "ends"),
    [
        ("é。你", "。", [4, 7]),  # a delimiter of three tokens ends at its last
        ("a\n你\nb", "\n", [1, 5, 6]),  # "\n" is a replacement character while 你 is incomplete
        ("a\n😀😀😀😀😀\n", "\n", [1, 22]),
        ("\n你\nb", "\n", [4, 5]),
    ],
)
def test_ends_are_right_where_bytes_are_tokens(text: str, delimiter: str, ends: list[int]) -> None:
    ids = [byte + 2 for byte in text.encode()]
    assert decoded(BYTES, ids) == text
    assert ends_of(BYTES, ids, delimiter) == ends


@pytest.mark.parametrize("tokenizer", [SPANNING, BYTES, BPE_BYTES], ids=["spanning", "bytes", "bpe"])
def test_ends_are_those_of_trying_every_prefix(tokenizer: Any) -> None:
    draw = random.Random(0)
    several = 0
    for _ in range(300):
        text = "".join(draw.choices("ab\n\n你😀é", k=12))  # whole characters, but for an answer that is cut off in the middle of one
        if tokenizer is BYTES:
            ids = [byte + 2 for byte in text.encode()][: draw.randrange(1, 40)]
        elif tokenizer is BPE_BYTES:
            ids = tokenizer(text)["input_ids"][: draw.randrange(1, 40)]
        else:
            ids = [draw.randrange(len(tokenizer)) for _ in range(draw.randrange(1, 30))]
        ends = ends_of(tokenizer, ids, "\n")
        assert ends == by_trying_every_prefix(tokenizer, ids, "\n")
        several += len(ends) > 2
    assert several > 100


def test_every_token_gets_the_normalised_rewards_of_the_steps_that_end_at_it_or_later() -> None:
    # pool 1, 0, 1, 1: mean 3/4, std 1/2
    right, wrong = 0.25 / (0.5 + 1e-4), -0.75 / (0.5 + 1e-4)
    got = step_advantages([[1.0, 0.0], [1.0, 1.0], [], [1.0]], [[1, 3], [0, 4], [], [2]], 5, 2)
    expected = [[right + wrong] * 2 + [wrong] * 2 + [0.0], [2 * right] + [right] * 4, [0.0] * 5, [0.0] * 5]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_no_steps_at_all_give_no_advantage() -> None:
    assert torch.equal(step_advantages([[], []], [[], []], 3, 2), torch.zeros(2, 3))


def test_the_loss_gets_process_advantages_and_the_outcome_is_still_logged(process: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    # micro-batches of different widths; tokens that begin with the delimiter; two rewards, whose sum is what the step reward is told
    config = process(
        steps=1, micro_batch_size=1, num_iterations=2, step_delimiter=" ",
        rewards=("some_rewards:alternate", "some_rewards:lengths"), reward_weights=(1.0, 2.0),
    )  # fmt: skip
    original, calls = module.fused_grpo_loss, []

    def recording(logits: torch.Tensor, ids: torch.Tensor, advantages: torch.Tensor, **arguments: Any) -> Any:
        calls.append((ids.tolist(), arguments["completion_mask"].sum(1).tolist(), advantages))
        return original(logits, ids, advantages, **arguments)

    monkeypatch.setattr(module, "fused_grpo_loss", recording)
    record = module.train(config)
    (seen,) = sys.modules["some_steps"].seen
    texts, ids, steps = seen["completions"], seen["completion_ids"], seen["steps"]
    assert steps == [split(text, " ") for text in texts] and max(map(len, steps)) > 2
    assert seen["rewards"] == pytest.approx([i % 2 + len(row) / 5 for i, row in enumerate(ids)]) and len(seen["answer"]) == 12

    tokenizer = module.load_tokenizer(config.model)
    values = [[len(step) / 10 for step in of_answer] for of_answer in steps]
    ends = [by_trying_every_prefix(tokenizer, row, " ") for row in ids]
    most, width = max(map(len, values)), max(map(len, ids))
    padded = [torch.tensor([[*row, *[0] * (most - len(row))] for row in rows], dtype=dtype) for rows, dtype in
              ((values, torch.float64), (ends, torch.int64))]  # fmt: skip
    expected = process_advantages(*padded, width, 4, step_mask=torch.arange(most) < torch.tensor([[len(row)] for row in values]))
    pool = sum(values[:4], [])
    first = sum((value - mean(pool)) / (stdev(pool) + 1e-4) for value in values[0])
    assert expected[0, 0].item() == pytest.approx(first, rel=1e-5)

    assert [rows for rows, _, _ in calls] == [[row] for row in ids] * 2
    for row, (_, lengths, advantages) in zip([*range(12)] * 2, calls):
        assert lengths == [len(ids[row])]
        assert torch.equal(advantages, expected[row : row + 1, : len(ids[row])])
    assert len({advantages.shape[1] for _, _, advantages in calls}) > 1

    assert record["reward"] == pytest.approx(mean(seen["rewards"])) and "reward/some_rewards:lengths" in record and "accuracy" in record
    assert record["step_reward"] == pytest.approx(mean(sum(values, []))) and record["steps"] == pytest.approx(mean(map(len, steps)))
    assert record["zero_std_groups"] == 0


def test_the_demos_step_reward_follows_the_running_sums() -> None:
    problems = [{"expression": "6 - 2 - 0 + 3"}] * 7
    texts = [
        "<think> 6 - 2 = 4 - 0 = 4 + 3 = 7 </think> <answer> 7 </answer>",
        "<think> 6 - 2 = 5 - 0 = 5 + 3 = 7 </think> <answer> 7 </answer>",  # wrong sums, right answer
        "<think> 6 - 3 = 4 - 0 = 4 + 3 = 8 </think> <answer> 8 </answer>",  # a wrong term, then the right sum
        "<think> 6 - 2 = 4 - 0 = 4 + 3 = 7 + 0 = 7 </think> <answer> 7 </answer>",  # nothing is won by a further step
        "<answer> 7 </answer>",
        "<think> 6 - 2 = 4 -",  # cut off
        "",
    ]
    outcome = [1.0, 1.0, 0.01, 1.0, 1.0, 0.0, 0.0]
    got = running_sums(steps=[split(text, "=") for text in texts], rewards=outcome, metadata=problems, answer=["7"] * 7)
    assert got == [[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0.01], [1, 1, 1, 0, 1], [1], [1, 0], []]


def test_worked_examples_have_all_steps_right(settings: Settings) -> None:
    problems = Problems(settings(task_options={"min_terms": 5, "max_terms": 7, "min_digits": 1, "max_digits": 1}), lambda entry: True)
    entries = problems.take(50)
    steps = [split(example(entry, 1.0), "=") for entry in entries]
    got = running_sums(steps=steps, rewards=[1.0] * 50, metadata=[entry["metadata"] for entry in entries])
    assert got == [[1.0] * entry["metadata"]["num_terms"] for entry in entries]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("nan", ValueError, "--step-reward: some_steps:nan: completion 0: expected a finite number, got nan for the step 'a.n'"),
        ("too_few", ValueError, "--step-reward: some_steps:too_few: completion 0: expected 2 numbers, one a step, got 0"),
        ("one_each", ValueError, "--step-reward: some_steps:one_each: completion 0: expected a list of 2 numbers, got float"),
        ("one_answer", ValueError, "--step-reward: some_steps:one_answer: expected 2 lists of numbers, one a completion, got 1 of them"),
        ("nothing", ValueError, "--step-reward: some_steps:nothing: expected 2 lists of numbers, one a completion, got NoneType"),
        ("raises", RuntimeError, "--step-reward: some_steps:raises raised KeyError: 'no such column'"),
    ],
)
def test_bad_step_rewards(process: Settings, function: str, error: type[Exception], message: str) -> None:
    scorer = StepScorer(process(function, step_delimiter="\n"), SPANNING)
    ids = [SPANNING.convert_tokens_to_ids(tokens) for tokens in (["a", "\nb"], ["a"])]
    with pytest.raises(error, match=message):
        scorer(["p", "p"], ["a\nb", "a"], ids, [{"answer": "1"}] * 2, [0.0, 0.0])


def test_step_rewards_may_be_tensors_and_steps_none() -> None:
    assert checked_step_rewards("f", [torch.tensor([1.0, 2.0]), []], [["a", "b"], []]) == [[1.0, 2.0], []]
    assert checked_step_rewards("f", torch.ones(2, 1), [["a"], ["b"]]) == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_reward": None}, "--step-reward: expected module:function with --supervision process, got None"),
        ({"supervision": "outcome", "step_delimiter": "\n"}, "--step-reward: got 'some_steps:lengths', expected it only with"),
        ({"supervision": "outcome", "step_reward": None}, "--step-delimiter: got '=', expected it only with"),
        ({"supervision": "steps"}, "--supervision: expected one of outcome, process, got 'steps'"),
        ({"step_delimiter": ""}, "--step-delimiter: expected a text to split at, got ''"),
        ({"scale_rewards": "batch"}, "--scale-rewards: expected group with --supervision process.*got 'batch'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(process: Settings, changes: dict[str, Any], message: str) -> None:
    check(process())
    with pytest.raises(ValueError, match=message):
        check(replace(process(), **changes))


def test_the_demo_hears_of_wrong_settings_before_it_warms_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--demo", "--step-reward", "a:b", "--output-dir", str(tmp_path / "run")])
    assert "error: --step-reward: got 'a:b', expected it only with --supervision process" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("verifier", "--step-reward: expected module:function, got 'verifier'"),
        ("some_steps:seen", "--step-reward: 'some_steps:seen' is a list, expected a function"),
        ("some_steps:no_such", "--step-reward: cannot import 'some_steps:no_such'"),
    ],
)
def test_bad_names_are_found_before_a_model_is_loaded(process: Settings, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setattr(module, "load_model", None)
    with pytest.raises(ValueError, match=message):
        module.train(replace(process(), step_reward=name))


def test_a_delimiter_is_written_with_backslashes_on_the_command_line() -> None:
    assert vars(parser().parse_args(["--step-delimiter", r"\n\n"])) == {"step_delimiter": "\n\n"}
    assert vars(parser().parse_args(["--step-delimiter", "\n"])) == {"step_delimiter": Config.step_delimiter}


def test_a_resumed_run_repeats_all_bits(process: Settings, tmp_path: Path) -> None:
    changes = {"save_every": 1, "eval_size": 4, "learning_rate": 5e-3}
    whole, parts = (process(steps=4, output_dir=str(tmp_path / name), **changes) for name in ("whole", "parts"))
    module.train(whole)
    module.train(process(steps=2, output_dir=parts.output_dir, **changes))
    module.train(parts, resume=True)
    ends = [tmp_path / name / "checkpoints/step-000004" for name in ("whole", "parts")]
    weights = [load_file(end / "model.safetensors") for end in ends]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    states = [torch.load(end / "trainer.pt", weights_only=True) for end in ends]
    assert states[0]["progress"] == states[1]["progress"] and states[0]["progress"].keys() == {"step", "optimizer_step", "cursor"}
    rewards = [[record.get("step_reward") for record in report.read(tmp_path / name / report.METRICS)] for name in ("whole", "parts")]
    assert rewards[0] == rewards[1] and None not in rewards[0][1:]


def test_a_run_from_before_process_supervision_resumes(settings: Settings) -> None:
    module.train(settings(steps=1))
    path = Path(settings().output_dir) / "config.json"
    old = {
        name: value for name, value in json.loads(path.read_text()).items() if name not in ("supervision", "step_reward", "step_delimiter")
    }
    path.write_text(json.dumps(old))
    main(["--resume", str(path.parent), "--steps", "2"])
    assert report.read(path.parent / report.METRICS)[-1].keys() >= {"reward", "accuracy"}
    assert "step_reward" not in report.read(path.parent / report.METRICS)[-1]


@pytest.mark.serial
def test_quick_demo_with_process_supervision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--demo", "--quick", "--supervision", "process", "--output-dir", str(tmp_path / "run")])
    assert "right answers (verifier)" in capsys.readouterr().out
    records = report.read(tmp_path / "run" / report.METRICS)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["steps"] > 1 and 0 <= record["step_reward"] <= 1 for record in records[1:])
    assert json.loads((tmp_path / "run/config.json").read_text())["step_reward"] == "grpo_trainer.demo:running_sums"
    assert (tmp_path / "run" / report.PICTURE).stat().st_size > 0
