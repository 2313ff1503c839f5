"""Models of a few thousand parameters, made here, so that no test needs a network or more than seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the trainer's extra is not installed")

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_trainer.config import Config

WORDS = ["<pad>", "<eos>", "<unk>", "<answer>", " </answer>", " =", " +", " -"] + [f" {digit}" for digit in range(10)]

REWARDS = '''
"""Rewards that tell completions apart without a model that knows anything."""
def alternate(prompts, completions, **columns):
    return [i % 2 for i in range(len(completions))]
def constant(completions, **columns):
    return [1.0] * len(completions)
def lengths(completion_ids, **columns):
    return [len(ids) / 10 for ids in completion_ids]
def nan(completions, **columns):
    return [float("nan")] * len(completions)
def text(completions, **columns):
    return ["good"] * len(completions)
def none(completions, **columns):
    return [None] * len(completions)
def too_few(completions, **columns):
    return [1.0]
def number(completions, **columns):
    return 1.0
def raises(completions, **columns):
    raise KeyError("no such column")
not_a_function = 3
'''


def make_tokenizer(pad: str | None = "<pad>") -> Any:
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^\s\d]+| ?\d"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, eos_token="<eos>", unk_token="<unk>")


def make_model(architecture: str) -> Any:
    torch.manual_seed(0)
    common = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if architecture == "gpt2":  # learned positions, dropout in three places
        return GPT2LMHeadModel(
            GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, **common)
        )
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
            attention_dropout=0.5,
            initializer_range=0.2,
            **common,
        )
    )


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as from_pretrained loads them, by architecture; "no_pad" has a tokenizer without a pad token."""
    folders = {}
    for name in ("llama", "gpt2", "no_pad"):
        folders[name] = tmp_path_factory.mktemp(name)
        make_model(name).save_pretrained(folders[name])
        make_tokenizer(None if name == "no_pad" else "<pad>").save_pretrained(folders[name])
    return folders


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with reward functions, in the current folder as a user's would be."""
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "some_rewards", raising=False)
    return "some_rewards"


@pytest.fixture
def settings(model_folders: dict[str, Path], rewards: str, tmp_path: Path) -> Callable[..., Config]:
    """A run of seconds whose rewards differ within each group; keyword arguments replace settings."""

    def make(**changes: Any) -> Config:
        values: dict[str, Any] = {
            "model": str(model_folders["llama"]),
            "task": "chain_sum",
            "task_options": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
            "rewards": (f"{rewards}:alternate",),
            "num_prompts": 3,
            "num_generations": 4,
            "max_prompt_length": 32,
            "max_completion_length": 8,
            "micro_batch_size": 4,
            "learning_rate": 1e-3,
            "warmup_steps": 4,
            "steps": 2,
            "eval_size": 6,
            "eval_every": 2,
            "save_every": 2,
            "device": "cpu",
            "output_dir": str(tmp_path / "run"),
        }
        return Config(**(values | changes))

    return make


@pytest.fixture
def metrics() -> Callable[[Config], list[dict[str, Any]]]:
    """The lines of metrics.jsonl."""

    def read(config: Config) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()]

    return read
