"""The command line: complete help, values as they are meant, and one line for what cannot work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.__main__ import main
from grpo_trainer.config import Config, flag, parser

Settings = Callable[..., Config]


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `grpo-train` says as it refuses."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_help_names_every_setting_with_its_default_and_needs_no_model() -> None:
    environment = os.environ | {"COLUMNS": "500"}
    result = subprocess.run([sys.executable, "-m", "grpo_trainer", "--help"], capture_output=True, text=True, env=environment)
    assert result.returncode == 0
    for f in fields(Config):
        assert flag(f.name) in result.stdout
        text = f.metadata["help"]
        assert text in result.stdout
        if isinstance(f.default, (int, float)):
            assert f"{text} (default: {f.default})" in result.stdout
    assert "--resume OUTPUT_DIR" in result.stdout


def test_flags_become_settings() -> None:
    line = (
        "--model m --task chain_sum --task-options min_terms=2 allow_negation=true name=x=y --rewards verifier a.b:c "
        "--reward-weights 1 0.5 --no-inplace --mask-truncated --epsilon-high 0.28 --loss-options delta=4.0 dual-clip=none "
        "--attn-implementation eager --seed 7"
    )
    given = vars(parser().parse_args(line.split()))
    config = Config(**given)
    assert config.task_options == {"min_terms": 2, "allow_negation": True, "name": "x=y"}
    assert config.loss_options == {"delta": 4.0, "dual_clip": None}
    assert list(config.rewards) == ["verifier", "a.b:c"]
    assert list(config.reward_weights) == [1.0, 0.5]
    assert (config.inplace, config.mask_truncated, config.epsilon_high, config.seed) == (False, True, 0.28, 7)
    assert config.num_generations == Config().num_generations  # not given: the default


def test_settings_survive_their_file(settings: Settings, tmp_path: Path) -> None:
    config = settings(reward_weights=(0.5,), loss_options={"delta": 4.0})
    config.save(tmp_path)
    assert Config(**Config.load(tmp_path)) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nothing to do: give --model and --task, or --demo, or --resume"),
        ("--model m", "--task: expected the name of a reasoning-gym data set or a .jsonl file, got ''"),
        ("--model m --task chain_sum --num-generations 1", "--num-generations: expected at least 2"),
        ("--model m --task chain_sum --dtype float16", "argument --dtype: invalid choice: 'float16'"),
        ("--model m --task chain_sum --task-options max_terms", "argument --task-options: expected KEY=VALUE, got 'max_terms'"),
        ("--model m --task chain_sum --steps ten", "argument --steps: invalid int value: 'ten'"),
        ("--model m --task chain_sum --num-generation 4", "unrecognized arguments: --num-generation"),
        ("--resume nowhere", "argument --resume: nowhere holds no run"),
        ("--demo --model m", "--model: the demo brings its own"),
        ("--quick", "--quick: goes with --demo"),
    ],
)
def test_one_line_for_what_cannot_work(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert message in failed(capsys, *arguments.split())


def test_missing_flash_attention_is_said_before_anything_loads(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash-attn is installed here")

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model or tokenizer was loaded")

    import transformers

    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", loaded)
    said = failed(capsys, "--model", "m", "--task", "chain_sum", "--attn-implementation", "flash_attention_2")
    assert "--attn-implementation: flash_attention_2 needs the flash-attn package, which is not installed" in said


def test_an_error_in_the_middle_says_how_to_go_on(
    settings: Settings, rewards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(rewards=(f"{rewards}:raises",))
    output = Path(config.output_dir)
    output.mkdir()
    config.save(output)
    with pytest.raises(RuntimeError, match="some_rewards:raises raised KeyError"):
        main(["--resume", str(output)])
    assert f"Continue with: grpo-train --resume {output}" in capsys.readouterr().err


def test_a_resumed_run_keeps_its_settings_and_takes_new_ones(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(steps=1)
    output = Path(config.output_dir)
    output.mkdir()
    config.save(output)
    main(["--resume", str(output)])
    assert "step 1: reward 0.500, held-out accuracy" in capsys.readouterr().out
    main(["--resume", str(output), "--steps", "2"])
    assert "step 2: reward 0.500" in capsys.readouterr().out


def test_an_interrupt_that_an_import_turned_into_its_own_error_is_still_one() -> None:
    from grpo_trainer.__main__ import _interrupted

    def imports() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    with pytest.raises(ImportError) as caught:
        imports()
    assert _interrupted(caught.value) and not _interrupted(ImportError("another")) and not _interrupted(None)
