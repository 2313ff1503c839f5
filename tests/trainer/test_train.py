"""The loop: first ratio 1, windows with their own normaliser, nothing stepped without a reason, and settings that cannot work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import grpo_trainer.train as module
from grpo_trainer.config import Config, check

Settings = Callable[..., Config]
Metrics = Callable[[Config], list[dict[str, Any]]]


def weights(config: Config) -> dict[str, torch.Tensor]:
    last = sorted((Path(config.output_dir) / "checkpoints").iterdir())[-1]
    return load_file(last / "model.safetensors")


def trained(config: Config) -> dict[str, torch.Tensor]:
    module.train(config)
    return weights(config)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Any]]:
    """Arguments and output of every call of the loss, which still does its work."""
    calls: list[tuple[dict[str, Any], Any]] = []
    original = module.fused_grpo_loss

    def recording(logits: torch.Tensor, *tensors: torch.Tensor, **arguments: Any) -> Any:
        output = original(logits, *tensors, **arguments)
        calls.append((arguments, output))
        return output

    monkeypatch.setattr(module, "fused_grpo_loss", recording)
    return calls


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_dropout_is_off_so_that_the_first_ratio_is_one(
    settings: Settings, metrics: Metrics, losses: list[Any], model_folders: dict[str, Path], architecture: str
) -> None:
    # both models have dropout 0.5; learning rate 0, so that the second pass still has the policy that sampled
    config = settings(model=str(model_folders[architecture]), learning_rate=0.0, num_iterations=2, track_kl=True, num_prompts=1, steps=1)
    module.train(config)
    assert len(losses) == 2
    for arguments, output in losses:
        ratio = torch.exp(output.logps - arguments["old_logps"])
        assert (ratio - 1).abs().max() < 1e-5
    record = metrics(config)[-1]
    assert abs(record["kl"]) < 1e-6
    assert record["clip_ratio/region_mean"] == 0


def test_on_policy_step_needs_no_old_log_probabilities_and_its_loss_is_zero_but_not_its_gradient(
    settings: Settings, metrics: Metrics, losses: list[Any]
) -> None:
    config = settings(steps=1, micro_batch_size=12)
    module.train(config)
    ((arguments, output),) = losses
    assert arguments["old_logps"] is None
    lengths = arguments["completion_mask"].sum(1)
    assert abs(output.loss.item()) < 1e-6 and len(lengths) == 12
    record = metrics(config)[-1]
    assert record["grad_norm"] > 1e-3
    assert record["reward"] == 0.5 and record["reward_std"] == pytest.approx(math.sqrt(12 / 11) / 2) and record["zero_std_groups"] == 0


def test_leftover_window_is_a_step_with_its_own_count(
    settings: Settings, metrics: Metrics, losses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 5 micro-batches of 2 completions, accumulation 2: windows of 2, 2 and 1
    config = settings(
        num_prompts=5, num_generations=2, micro_batch_size=2, gradient_accumulation_steps=2, steps=1, loss_type="dapo", warmup_steps=100
    )
    cleared: list[bool] = []
    zero_grad = torch.optim.AdamW.zero_grad
    monkeypatch.setattr(torch.optim.AdamW, "zero_grad", lambda self, **k: (cleared.append(True), zero_grad(self, **k))[1])
    module.train(config)
    record = metrics(config)[-1]
    assert record["optimizer_step"] == 3 and len(losses) == 5 and len(cleared) == 3
    assert record["learning_rate"] == pytest.approx(config.learning_rate * 3 / 100)  # moved once an optimiser step
    tokens = [int(arguments["completion_mask"].sum()) for arguments, _ in losses]
    assert [arguments["num_items_in_batch"] for arguments, _ in losses] == [
        tokens[0] + tokens[1], tokens[0] + tokens[1], tokens[2] + tokens[3], tokens[2] + tokens[3], tokens[4]
    ]  # fmt: skip
    assert [arguments["num_sequences"] for arguments, _ in losses] == [4, 4, 4, 4, 2]


def test_one_micro_batch_with_a_longer_accumulation_is_one_step(settings: Settings, metrics: Metrics) -> None:
    config = settings(num_prompts=1, micro_batch_size=4, gradient_accumulation_steps=4, steps=1)
    module.train(config)
    assert metrics(config)[-1]["optimizer_step"] == 1


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_split_into_micro_batches_does_not_change_the_step(settings: Settings, tmp_path: Path, loss_type: str) -> None:
    common: dict[str, Any] = {"steps": 1, "loss_type": loss_type, "eval_size": 0, "warmup_steps": 0, "max_grad_norm": 0.0}
    whole, split = (
        trained(settings(micro_batch_size=size, output_dir=str(tmp_path / f"by {size}"), **common)) for size in (12, 5)
    )  # fmt: skip
    # Adam's first step is learning_rate * sign(gradient): a wrong normaliser would hide, so compare the moments instead
    moments = [
        torch.load(tmp_path / f"by {size}/checkpoints/step-000001/trainer.pt")["optimizer"]["state"] for size in (12, 5)
    ]  # fmt: skip
    for index in moments[0]:
        torch.testing.assert_close(moments[0][index]["exp_avg"], moments[1][index]["exp_avg"], rtol=1e-4, atol=1e-8)
    assert whole.keys() == split.keys()


def test_weights_move_only_where_an_advantage_or_the_kl_says_so(settings: Settings, rewards: str, model_folders: dict[str, Path]) -> None:
    start = load_file(model_folders["llama"] / "model.safetensors")

    def moved(**changes: Any) -> bool:
        after = trained(settings(overwrite=True, eval_size=0, **changes))
        return any(not torch.equal(start[name], after[name]) for name in start)

    constant = (f"{rewards}:constant",)
    assert not moved(rewards=constant)
    assert not moved(rewards=constant, beta=0.1)  # the policy is the reference: the KL's gradient is 0 as well
    assert moved()


def test_the_kl_penalty_pulls_back(settings: Settings, metrics: Metrics, tmp_path: Path, rewards: str) -> None:
    common: dict[str, Any] = {"rewards": (f"{rewards}:lengths",), "learning_rate": 5e-3, "steps": 8, "eval_size": 0, "warmup_steps": 0}
    free, held = (settings(beta=beta, track_kl=True, output_dir=str(tmp_path / f"{beta}"), **common) for beta in (0.0, 3.0))
    module.train(free)
    module.train(held)
    assert 0 < metrics(held)[-1]["kl"] < 0.7 * metrics(free)[-1]["kl"]


def test_truncated_completions_can_be_left_out_of_the_loss(settings: Settings, losses: list[Any], metrics: Metrics) -> None:
    config = settings(mask_truncated=True, steps=1, micro_batch_size=12, max_completion_length=16)
    module.train(config)
    arguments, _ = losses[0]
    used = arguments["completion_mask"].any(1)
    share = metrics(config)[-1]["truncated"]
    assert 0 < share < 1 and (~used).float().mean() == pytest.approx(share)
    assert arguments["num_items_in_batch"] == int(arguments["completion_mask"].sum())
    assert arguments["num_sequences"] == 12


def test_temperature_of_sampling_is_the_temperature_of_the_loss(settings: Settings, losses: list[Any]) -> None:
    module.train(settings(steps=1, temperature=1.5))
    assert {arguments["temperature"] for arguments, _ in losses} == {1.5}


def test_a_run_leaves_finite_metrics_answers_and_a_picture(settings: Settings, metrics: Metrics) -> None:
    config = settings(num_iterations=2, gradient_accumulation_steps=2, beta=0.01, steps=3, eval_every=1)
    module.train(config)
    records = metrics(config)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for record in records[1:]:
        assert all(math.isfinite(value) for value in record.values())
        expected = {"reward", "reward_std", "zero_std_groups", "grad_norm", "kl", "entropy", "length", "truncated", "learning_rate"}
        assert expected <= record.keys() and {"clip_ratio/low_mean", "clip_ratio/high_mean", "accuracy", "worked"} <= record.keys()
    output = Path(config.output_dir)
    answers = [json.loads(line) for line in (output / "evaluations.jsonl").read_text().splitlines()]
    assert len(answers) == 4 * config.eval_size and answers[0].keys() == {"step", "question", "answer", "completion", "score"}
    assert (output / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_repeats_a_run_bit_for_bit_and_another_does_not(settings: Settings, tmp_path: Path) -> None:
    first, second, other = (
        trained(settings(seed=seed, output_dir=str(tmp_path / name), eval_size=0)) for seed, name in ((0, "a"), (0, "b"), (1, "c"))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_bfloat16_arithmetic_keeps_float32_weights(settings: Settings, metrics: Metrics) -> None:
    config = settings(dtype="bfloat16", steps=1)
    assert all(weight.dtype == torch.float32 for weight in trained(config).values())
    assert metrics(config)[-1]["grad_norm"] > 0


def test_a_gradient_that_is_not_finite_stops_before_it_is_stepped(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(parameters: Any, norm: float) -> torch.Tensor:
        return torch.tensor(float("nan"))

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    with pytest.raises(RuntimeError, match="step 1: the norm of the gradient is nan; no weight was changed"):
        module.train(settings())


def test_a_folder_with_a_run_is_not_overwritten_by_accident(settings: Settings) -> None:
    module.train(settings(steps=1))
    with pytest.raises(ValueError, match=r"--output-dir: .* holds a run; continue it with --resume .*--overwrite"):
        module.train(settings(steps=1))
    module.train(settings(steps=1, overwrite=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "--model: expected a local folder or a hub name, got ''"),
        ({"task": ""}, "--task: expected"),
        ({"num_generations": 1}, "--num-generations: expected at least 2.* got 1"),
        ({"micro_batch_size": 0}, "--micro-batch-size: expected at least 1, got 0"),
        ({"learning_rate": -1.0}, "--learning-rate: expected at least 0, got -1.0"),
        ({"learning_rate": float("nan")}, "--learning-rate: expected at least 0, got nan"),
        ({"temperature": 0.0}, "the loss does not take these options: temperature"),
        ({"epsilon": -0.1}, "the loss does not take these options: epsilon"),
        ({"loss_type": "gpro"}, "the loss does not take these options: loss_type"),
        ({"loss_options": {"dleta": 2.0}}, "the loss does not take these options: .*dleta"),
        ({"loss_options": {"beta": 2.0}}, "--loss-options: beta cannot be given here"),
        ({"reward_weights": (1.0, 2.0)}, "--reward-weights: expected one for each of the 1 rewards"),
        ({"lr_schedule": "step"}, "--lr-schedule: expected one of constant, linear, cosine, got 'step'"),
        ({"device": "tpu"}, "--device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"device": "cuda:99"}, "--device: cuda:99 is not there"),
    ],
)
def test_bad_settings(settings: Settings, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(settings(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "no/such/folder/here"}, "--model: no tokenizer could be loaded from 'no/such/folder/here'"),
        ({"max_completion_length": 60}, "--max-prompt-length, --max-completion-length: 32 [+] 60 tokens, but .* has 64 positions"),
    ],
)
def test_bad_models(settings: Settings, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module.train(settings(**changes))


def test_a_model_without_end_token_is_refused(settings: Settings, model_folders: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(model_folders["llama"]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "endless")
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(ValueError, match="--model: neither its tokenizer nor its generation settings name an end token"):
        module.train(settings(model=str(tmp_path / "endless")))


def test_a_model_without_pad_token_pads_with_its_end_token(settings: Settings, metrics: Metrics, model_folders: dict[str, Path]) -> None:
    config = settings(model=str(model_folders["no_pad"]), steps=1)
    module.train(config)
    assert metrics(config)[-1]["grad_norm"] > 0
