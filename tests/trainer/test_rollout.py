"""What is sampled is what is trained: masks, positions and the distribution itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_kernels import token_logprobs
from grpo_trainer.rollout import Rollout, Sampler, first_end, right_mask

PROMPTS = [[8, 6, 9, 5], [10], [11, 7, 12, 6, 13, 5]]


def make_sampler(folder: Path) -> Sampler:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Sampler(model, AutoTokenizer.from_pretrained(folder), torch.float32)


def test_mask_goes_up_to_and_includes_the_first_end_token() -> None:
    ids = torch.tensor([[5, 1, 1, 1], [1, 5, 5, 1], [5, 5, 5, 1], [5, 5, 5, 5], [2, 5, 1, 5]])
    lengths, truncated = first_end(ids, [1, 2])
    assert lengths == [2, 1, 4, 4, 1]
    assert truncated == [False, False, False, True, False]
    assert right_mask(lengths, 4, ids.device).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize("folder", ["llama", "no_pad"])
def test_mask_does_not_depend_on_the_pad_id(model_folders: dict[str, Path], folder: str) -> None:
    # "no_pad" pads with the end token: by value, either every end token or none would be masked
    sampler = make_sampler(model_folders[folder])
    assert sampler.pad_id == (1 if folder == "no_pad" else 0)
    torch.manual_seed(0)
    rollout = sampler.generate(PROMPTS * 20, 12, 1.0)
    assert any(rollout.truncated) and not all(rollout.truncated)
    for ids, length, truncated in zip(rollout.completion_ids.tolist(), rollout.completion_lengths, rollout.truncated):
        assert (1 not in ids) if truncated else (ids.index(1) == length - 1)
        assert set(ids[length:]) <= {sampler.pad_id}
    assert rollout.completion_mask().sum(1).tolist() == rollout.completion_lengths


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_left_padding_changes_no_log_probability(model_folders: dict[str, Path], architecture: str) -> None:
    sampler = make_sampler(model_folders[architecture])
    torch.manual_seed(0)
    rollout = sampler.generate(PROMPTS, 8, 1.0)
    with torch.no_grad():
        together = token_logprobs(sampler.logits(sampler.model, rollout), rollout.completion_ids, mask=rollout.completion_mask())
        for row, prompt in enumerate(PROMPTS):
            length = rollout.completion_lengths[row]
            completion = rollout.completion_ids[row : row + 1, :length]
            logits = sampler.model(torch.cat([torch.tensor([prompt]), completion], 1)).logits[:, len(prompt) - 1 :]
            alone = token_logprobs(logits, completion)
            torch.testing.assert_close(together[row, :length], alone[0], rtol=0, atol=2e-6)


def test_rows_of_a_rollout_drop_the_padding_that_no_row_needs() -> None:
    rollout = Rollout(torch.tensor([[0, 0, 3], [4, 5, 6]]), torch.tensor([[7, 1, 0], [8, 9, 9]]), [1, 3], [2, 3], [False, True])
    first = rollout.rows(range(0, 1))
    assert first.prompt_ids.tolist() == [[3]] and first.completion_ids.tolist() == [[7, 1]]
    assert rollout.rows(range(0, 2)).prompt_ids.shape == (2, 3)


def test_sampling_follows_the_policy_and_not_the_models_own_generation_settings(model_folders: dict[str, Path]) -> None:
    folder = model_folders["llama"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # as hub models bring them along
    model.generation_config = GenerationConfig(top_k=1, top_p=0.1, repetition_penalty=3.0, eos_token_id=[1, 5], do_sample=True)
    sampler = Sampler(model, AutoTokenizer.from_pretrained(folder), torch.float32)
    assert sampler.end_ids == [1, 5]
    temperature = 1.7
    torch.manual_seed(0)
    rollout = sampler.generate([PROMPTS[0]] * 4000, 1, temperature)
    with torch.no_grad():
        expected = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / temperature).softmax(-1)
    counts = rollout.completion_ids[:, 0].bincount(minlength=len(expected)) / 4000
    # five standard deviations of a share of 4000 draws
    assert ((counts - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


@pytest.mark.parametrize("training", [True, False])
def test_training_flag_is_restored_after_sampling(model_folders: dict[str, Path], training: bool) -> None:
    sampler = make_sampler(model_folders["gpt2"])
    sampler.model.train(training)
    sampler.generate(PROMPTS, 3, 1.0)
    assert all(module.training == training for module in sampler.model.modules())


def test_generation_in_parts_gives_the_same_greedy_answers(model_folders: dict[str, Path]) -> None:
    sampler = make_sampler(model_folders["llama"])
    whole, parts = (sampler.generate(PROMPTS * 2, 6, None, size) for size in (0, 2))
    assert whole.completion_lengths == parts.completion_lengths
    assert whole.completions() == parts.completions()


def test_logits_come_unsliced_with_one_spare_position(model_folders: dict[str, Path]) -> None:
    sampler: Any = make_sampler(model_folders["llama"])
    rollout = sampler.generate(PROMPTS, 5, 1.0)
    logits = sampler.logits(sampler.model, rollout)
    assert logits.shape == (3, rollout.completion_ids.shape[1] + 1, sampler.model.config.vocab_size)
