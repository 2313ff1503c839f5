"""Every setting of a run, once: the default, its reason, its flag and its help text are one line each.

`parser()` turns the fields into flags, so `--help` cannot fall behind; `check()` finds what can be found before anything is loaded.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import types
import typing
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from grpo_kernels import fused_grpo_loss, group_advantages


def unescaped(text: str) -> str:
    """What a shell writes only with effort."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def option(default: Any, help: str, read: Callable[[str], Any] | None = None) -> Any:
    """`read` turns a flag's text into the value, where that is more than the field's type."""
    metadata = {"help": help, "read": read}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Settings of one run. Raises nothing itself: see `check`.

    >>> Config(model="path/to/model", task="chain_sum", task_options={"max_terms": 4}).num_generations
    8
    """

    # What is trained, and on what.
    model: str = option("", "local folder or hub name that AutoModelForCausalLM loads")
    task: str = option("", "name of a reasoning-gym data set, or a .jsonl file with a prompt and an answer a line")
    task_options: dict[str, Any] = option({}, "options of the reasoning-gym data set")
    rewards: tuple[str, ...] = option(
        ("verifier",),
        "'verifier' (the data set's own score of what stands between <answer> tags) or module:function, called as "
        "function(prompts=..., completions=..., completion_ids=..., answer=..., **other columns), returning a number for each completion",
    )
    reward_weights: tuple[float, ...] = option((), "one weight a reward; none: all 1")
    system_prompt: str | None = option(
        None, "put before every question; none: reasoning-gym's default prompt for a chat model, nothing for a model without chat template"
    )

    # Process supervision: advantages a token, from rewards a step (DeepSeekMath §4.1.3).
    supervision: Literal["outcome", "process"] = option(
        "outcome",
        "what is trained on: --rewards, one number an answer, or --step-reward, one a step. With process, the rewards of all steps of a "
        "group are normalised together, a token's advantage is the sum over the steps that end at it or later, and --rewards are logged, "
        "evaluated and handed to the step reward",
    )
    step_reward: str | None = option(
        None,
        "module:function for process supervision, called as a reward function is, with steps=[[text, ...], ...] and rewards=[...] (the "
        "weighted sum of --rewards of each completion: several rewards come in there, as far as the function uses them) besides; returns a "
        "list of numbers for each completion, one a step",
    )
    step_delimiter: str = option(
        "\n",
        r"text that ends a step and belongs to it (\n and \t are read as newline and tab). What follows the last one is a step too, also "
        "in an answer that was cut off; blank pieces join the step before them; the end token belongs to the last step. A blank answer "
        "has no steps, and advantage 0",
        read=unescaped,
    )

    # Sampling.
    num_prompts: int = option(16, "prompts a step")
    num_generations: int = option(8, "completions a prompt: the group that rewards are compared within, at least 2")
    max_prompt_length: int = option(512, "tokens; problems with longer prompts are left out")
    max_completion_length: int = option(256, "tokens; sampling stops there")
    temperature: float = option(1.0, "of sampling, and of the log-probabilities in the loss; 1 trains the distribution that is sampled")
    generation_batch_size: int = option(0, "completions sampled at once (memory of the key-value cache); 0: all of a step")
    mask_truncated: bool = option(False, "leave completions that hit max_completion_length out of the loss (they keep their reward)")

    # The objective, in the words of grpo_kernels and TRL.
    loss_type: str = option("grpo", "how tokens are averaged: grpo, bnpo, dr_grpo or dapo")
    epsilon: float = option(0.2, "clip range of the ratio; 0.2 as in PPO and DeepSeekMath")
    epsilon_high: float | None = option(None, "upper clip range where it differs (0.28 in DAPO)")
    beta: float = option(0.0, "weight of the KL penalty to the start model; 0 as in most runs with a verifier")
    loss_options: dict[str, Any] = option({}, "further options of grpo_kernels.fused_grpo_loss, such as delta or entropy_coef")
    scale_rewards: Literal["group", "batch", "none"] = option("group", "whose std advantages are divided by")
    track_kl: bool = option(False, "log the KL to the start model also at beta 0 (a second copy of the model and its forward)")
    one_pass: bool = option(True, "loss and gradient in one read of the logits; not for losses that need every log-probability first")
    inplace: bool = option(True, "the gradient takes the logits' memory; off for a model that keeps its logits for its own backward")

    # Optimisation.
    steps: int = option(100, "turns of the loop: sample, score, update")
    num_iterations: int = option(1, "passes over each step's completions (mu); 1 is on-policy and needs no old log-probabilities")
    micro_batch_size: int = option(8, "completions a forward and backward; as memory allows, it does not change the result (but bnpo's)")
    gradient_accumulation_steps: int = option(0, "micro-batches an optimiser step; 0: all of a pass")
    learning_rate: float = option(1e-6, "AdamW; 1e-6 suits pretrained models of billions of parameters")
    warmup_steps: int = option(10, "optimiser steps over which the learning rate rises: Adam's first second moments are noise")
    lr_schedule: Literal["constant", "linear", "cosine"] = option("constant", "after the warm-up; the others reach 0 at the last step")
    weight_decay: float = option(0.0, "0: weights move only where an advantage or the KL penalty says so")
    adam_beta1: float = option(0.9, "AdamW's average of gradients")
    adam_beta2: float = option(0.99, "AdamW's average of squares; shorter than 0.999 since runs are short")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm; 0: never")

    # The run.
    seed: int = option(0, "of everything random; on a CPU the same seed repeats a run bit for bit")
    eval_every: int = option(25, "steps between evaluations and pictures")
    eval_size: int = option(200, "held-out problems (the last of a .jsonl file), answered greedily and never trained on; 0: no evaluation")
    save_every: int = option(25, "steps between checkpoints: what an interruption can cost")
    keep_checkpoints: int = option(2, "older ones are deleted")
    output_dir: str = option("runs/grpo", "folder for config.json, metrics.jsonl, evaluations.jsonl, reward.png, checkpoints/")
    overwrite: bool = option(False, "start anew in a folder that holds a run")
    device: str = option("auto", "auto (a GPU where there is one), cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "of the model's arithmetic; weights and optimiser are float32, since small steps vanish in 8 bits. auto: bfloat16 on a GPU"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = option("sdpa", "flash_attention_2 needs the flash-attn package")

    # The demo.
    demo: bool = option(False, "build and warm up a small model, then train it to show its work; no network and no GPU needed")
    quick: bool = option(False, "with --demo: the same path in under a minute, with nothing learned")

    def completions_a_step(self) -> int:
        return self.num_prompts * self.num_generations

    def micro_batches(self) -> list[range]:
        """Rows of a step's completions, micro-batch by micro-batch; the last may be short."""
        total, size = self.completions_a_step(), self.micro_batch_size
        return [range(start, min(start + size, total)) for start in range(0, total, size)]

    def windows(self) -> list[list[range]]:
        """The micro-batches of each optimiser step of a pass; the last window takes what is left over."""
        batches = self.micro_batches()
        size = self.gradient_accumulation_steps or len(batches)
        return [batches[start : start + size] for start in range(0, len(batches), size)]

    def loss_arguments(self) -> dict[str, Any]:
        arguments = {
            "loss_type": self.loss_type,
            "epsilon": self.epsilon,
            "epsilon_high": self.epsilon_high,
            "beta": self.beta,
            "temperature": self.temperature,
            "max_completion_length": self.max_completion_length,
            "one_pass": self.one_pass,
            "inplace": self.inplace,
        }
        return arguments | self.loss_options

    def resolved_device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else torch.device(self.device)

    def resolved_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if self.resolved_device().type == "cuda" else torch.float32
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> dict[str, Any]:
        """The settings that `save` wrote, as keyword arguments."""
        values = json.loads((folder / "config.json").read_text())
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# What the demo's flags stand for where they are not given. The learning rate is the largest of those tried that learned on every seed.
DEMO: dict[str, Any] = {
    "task": "chain_sum",
    "task_options": {"min_terms": 5, "max_terms": 7, "min_digits": 1, "max_digits": 1},
    "num_prompts": 32,
    "num_generations": 8,
    "max_prompt_length": 32,
    "max_completion_length": 40,
    "micro_batch_size": 256,
    "learning_rate": 5e-5,
    "warmup_steps": 3,
    "steps": 20,
    "eval_every": 5,
    "save_every": 5,
    "track_kl": True,
    "device": "cpu",
    "output_dir": "runs/demo",
    "overwrite": True,
}
# besides, with --supervision process: "6 - 2 =", "4 - 0 =", ..., "7 </think> <answer> 7 </answer>"
PROCESS_DEMO = {"step_reward": "grpo_trainer.demo:running_sums", "step_delimiter": "="}
QUICK_DEMO = DEMO | {"num_prompts": 4, "steps": 2, "eval_every": 1, "eval_size": 20, "save_every": 1, "output_dir": "runs/quick-demo"}

# of fused_grpo_loss; the trainer gives these itself
OWN_ARGUMENTS = {"num_items_in_batch", "num_sequences", "num_processes", "loss_scale"} | {"old_logps", "ref_logps", "completion_mask"}


def check(config: Config) -> None:
    """Raises ValueError, naming the setting, what came and what was expected, for all that is wrong whatever the model and the task."""

    def need(good: bool, name: str, expected: str) -> None:
        if not good:
            raise ValueError(f"{flag(name)}: expected {expected}, got {getattr(config, name)!r}")

    need(bool(config.model), "model", "a local folder or a hub name")
    need(bool(config.task), "task", "the name of a reasoning-gym data set or a .jsonl file")
    need(config.num_generations >= 2, "num_generations", "at least 2: an advantage compares a completion with the others of its group")
    for name in ("num_prompts", "max_prompt_length", "max_completion_length", "micro_batch_size", "steps", "num_iterations",
                 "eval_every", "save_every", "keep_checkpoints"):  # fmt: skip
        need(getattr(config, name) >= 1, name, "at least 1")
    for name in ("generation_batch_size", "gradient_accumulation_steps", "warmup_steps", "eval_size", "seed", "learning_rate",
                 "weight_decay", "max_grad_norm"):  # fmt: skip
        need(getattr(config, name) >= 0, name, "at least 0")
    for name in ("adam_beta1", "adam_beta2"):
        need(0 <= getattr(config, name) < 1, name, "a number in [0, 1)")
    need(0 < len(set(config.rewards)) == len(config.rewards), "rewards", "at least one, each once")
    need(len(config.reward_weights) in (0, len(config.rewards)), "reward_weights", f"one for each of the {len(config.rewards)} rewards")
    for name, hint in types_of().items():
        if typing.get_origin(hint) is Literal:
            need(getattr(config, name) in typing.get_args(hint), name, "one of " + ", ".join(typing.get_args(hint)))
    _check_supervision(config)
    _check_loss(config)
    _check_device(config)


def _check_supervision(config: Config) -> None:
    if config.supervision == "process":
        if not config.step_reward:
            raise ValueError(f"--step-reward: expected module:function with --supervision process, got {config.step_reward!r}")
        if not config.step_delimiter:
            raise ValueError("--step-delimiter: expected a text to split at, got ''")
        if config.scale_rewards != "group":
            raise ValueError(
                f"--scale-rewards: expected group with --supervision process, which normalises the steps of a group together, "
                f"got {config.scale_rewards!r}"
            )
        return
    for name in ("step_reward", "step_delimiter"):
        if getattr(config, name) != getattr(Config, name):
            raise ValueError(f"{flag(name)}: got {getattr(config, name)!r}, expected it only with --supervision process")


def _check_loss(config: Config) -> None:
    taken = config.loss_options.keys() & ({f.name for f in fields(Config)} | OWN_ARGUMENTS)
    if taken:
        raise ValueError(f"--loss-options: {', '.join(sorted(taken))} cannot be given here: the trainer sets it, or it has its own flag")
    # The loss checks its own options: one token is enough to hear what it says, before minutes of loading.
    logits = torch.zeros(1, 1, 2, requires_grad=True) * 1.0
    zeros = torch.zeros(1, 1)
    try:
        advantages = zeros if config.supervision == "process" else zeros[0]
        fused_grpo_loss(logits, zeros.long(), advantages, ref_logps=zeros, num_items_in_batch=1, num_sequences=1, **config.loss_arguments())
        group_advantages(torch.zeros(2), 2, scale_rewards=config.scale_rewards)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the loss does not take these options: {error}") from error


def _check_device(config: Config) -> None:
    try:
        device = config.resolved_device()
    except RuntimeError as error:
        raise ValueError(f"--device: expected auto, cpu, cuda or cuda:N, got {config.device!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu, cuda or cuda:N, got {config.device!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device: {config.device} is not there: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
    if config.attn_implementation == "flash_attention_2":
        if importlib.util.find_spec("flash_attn") is None:
            raise ValueError(
                "--attn-implementation: flash_attention_2 needs the flash-attn package, which is not installed: "
                "pip install 'grpo-kernels[flash-attn]', or use sdpa"
            )
        if device.type != "cuda" or config.resolved_dtype() != torch.bfloat16:
            raise ValueError(
                "--attn-implementation: flash_attention_2 runs on a GPU in bfloat16; "
                f"got --device {config.device}, --dtype {config.dtype}. Use sdpa there"
            )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def types_of() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def parser() -> argparse.ArgumentParser:
    """Flags of every field. A flag that is not given is absent from the namespace: a resumed run takes its value from config.json."""
    result = argparse.ArgumentParser(
        prog="grpo-train",
        description="Train a language model with GRPO on a task whose answers can be checked.",
        epilog="An interrupted run continues with: grpo-train --resume OUTPUT_DIR",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    result.add_argument("--resume", metavar="OUTPUT_DIR", help="continue that run from its last checkpoint; its settings are kept")
    hints = types_of()
    for f in fields(Config):
        result.add_argument(flag(f.name), **_argument(f, hints[f.name]))
    return result


def _argument(f: Field[Any], hint: Any) -> dict[str, Any]:
    default = {} if f.default_factory is dict else f.default
    text = f.metadata["help"].replace("%", "%%")
    if isinstance(default, (bool, int, float)):
        text += f" (default: {default})"
    elif default and isinstance(default, str):
        text += f" (default: {default.encode('unicode_escape').decode()})"
    elif default and isinstance(default, tuple):
        text += f" (default: {' '.join(default)})"
    if hint is bool:
        return {"help": text, "action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is dict:
        return {"help": text, "nargs": "*", "metavar": "KEY=VALUE", "action": _KeyValues}
    if typing.get_origin(hint) is tuple:
        return {"help": text, "nargs": "+", "type": typing.get_args(hint)[0], "metavar": f.name.upper().rstrip("S")}
    if typing.get_origin(hint) is Literal:
        return {"help": text, "choices": typing.get_args(hint)}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    return {"help": text, "type": f.metadata["read"] or hint, "metavar": hint.__name__.upper()}


class _KeyValues(argparse.Action):
    """min_terms=2 name=abc -> {"min_terms": 2, "name": "abc"}: a value that reads as Python is taken as such, else it is text."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None) -> None:
        result = {}
        for pair in values:
            key, equals, text = pair.partition("=")
            if not key or not equals:
                parser.error(f"argument {option_string}: expected KEY=VALUE, got {pair!r}")
            try:
                result[key.replace("-", "_")] = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
            except (ValueError, SyntaxError):
                result[key.replace("-", "_")] = text
        setattr(namespace, self.dest, result)
