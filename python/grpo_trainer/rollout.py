"""Sampling: prompts padded on the left, completions on the right, and masks by position.

Nothing here compares ids with the pad token. Many models share one id between padding and end of text, and a mask made by value
would either train on padding or never teach the model to stop.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reasoning_gym.utils import SYSTEM_PROMPTS
from torch import Tensor
from transformers import GenerationConfig

from grpo_trainer.tasks import Entry


@dataclass
class Rollout:
    """B completions on the model's device, padded to one width; lengths also as Python lists, so that slicing never waits for a GPU."""

    prompt_ids: Tensor  # (B, P) int64, left-padded
    completion_ids: Tensor  # (B, T) int64, right-padded
    prompt_lengths: list[int]
    completion_lengths: list[int]  # tokens up to and including the first end token
    truncated: list[bool]  # no end token within the limit

    def rows(self, rows: Sequence[int]) -> Rollout:
        """Some of the completions, without the padding columns that none of them needs."""
        prompt_lengths = [self.prompt_lengths[i] for i in rows]
        lengths = [self.completion_lengths[i] for i in rows]
        block = slice(rows[0], rows[-1] + 1)
        return Rollout(
            self.prompt_ids[block, self.prompt_ids.shape[1] - max(prompt_lengths) :],
            self.completion_ids[block, : max(lengths)],
            prompt_lengths,
            lengths,
            self.truncated[block],
        )

    def completions(self) -> list[list[int]]:
        """Ids of each completion, end token included."""
        ids = self.completion_ids.tolist()  # host sync: rewards read text
        return [row[:length] for row, length in zip(ids, self.completion_lengths)]

    def completion_mask(self) -> Tensor:
        """(B, T) bool: up to and including the first end token."""
        return right_mask(self.completion_lengths, self.completion_ids.shape[1], self.completion_ids.device)


def right_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor:
    return torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]


def left_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor:
    return torch.arange(width, device=device) >= width - torch.tensor(lengths, device=device)[:, None]


def left_padded(sequences: Sequence[Sequence[int]], pad: int, device: torch.device) -> Tensor:
    width = max(len(sequence) for sequence in sequences)
    return torch.tensor([[pad] * (width - len(sequence)) + list(sequence) for sequence in sequences], device=device)


def first_end(ids: Tensor, end_ids: Sequence[int]) -> tuple[list[int], list[bool]]:
    """Length of each row up to and including its first end token (its whole width without one), and whether it had none."""
    ends = torch.isin(ids, torch.tensor(end_ids, device=ids.device))
    found = ends.any(1)
    lengths = torch.where(found, ends.int().argmax(1) + 1, ids.shape[1])
    return lengths.tolist(), (~found).tolist()  # host sync: the texts are needed on the host anyway


class Prompts:
    """Problems to token ids: through the tokenizer's chat template where it has one, else the question as it stands."""

    def __init__(self, tokenizer: Any, system_prompt: str | None) -> None:
        self.tokenizer = tokenizer
        if system_prompt is None and tokenizer.chat_template:
            system_prompt = SYSTEM_PROMPTS["default"]
        self.system_prompt = system_prompt

    def text(self, entry: Entry) -> str:
        if not self.tokenizer.chat_template:
            return f"{self.system_prompt}\n{entry['question']}" if self.system_prompt else entry["question"]
        messages = [{"role": "user", "content": entry["question"]}]
        if self.system_prompt:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def ids(self, entry: Entry) -> list[int]:
        # A chat template writes its own special tokens.
        return self.tokenizer(self.text(entry), add_special_tokens=not self.tokenizer.chat_template)["input_ids"]


class Sampler:
    """A model with its tokenizer: prompts to completions, and completions to logits."""

    def __init__(self, model: Any, tokenizer: Any, dtype: torch.dtype) -> None:
        self.model, self.tokenizer, self.dtype = model, tokenizer, dtype
        self.end_ids = end_token_ids(model, tokenizer)
        # The mask goes by position, so a tokenizer without a pad token (GPT-2, Llama) pads with its end token.
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_ids[0]
        # A hub model's own settings (top_k, repetition_penalty, ...) would sample from another distribution than the one trained.
        model.generation_config = GenerationConfig(eos_token_id=self.end_ids, pad_token_id=self.pad_id)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float | None, batch_size: int = 0) -> Rollout:
        """One completion a prompt: sampled, or greedy where `temperature` is None. The model's training flag is as before afterwards."""
        if temperature is None:
            how: dict[str, Any] = {"do_sample": False}
        else:
            how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        device, size = self.model.device, batch_size or len(prompts)
        prompt_ids = left_padded(prompts, self.pad_id, device)
        lengths = [len(prompt) for prompt in prompts]
        mask = left_mask(lengths, prompt_ids.shape[1], device).long()
        was_training = self.model.training
        self.model.eval()
        try:
            chunks = []
            for start in range(0, len(prompts), size):
                block = slice(start, start + size)
                with self.autocast():
                    ids = self.model.generate(
                        input_ids=prompt_ids[block], attention_mask=mask[block], max_new_tokens=max_new_tokens, use_cache=True, **how
                    )
                chunks.append(ids[:, prompt_ids.shape[1] :])
        finally:
            self.model.train(was_training)
        width = max(chunk.shape[1] for chunk in chunks)
        completion_ids = torch.cat([torch.nn.functional.pad(chunk, (0, width - chunk.shape[1]), value=self.pad_id) for chunk in chunks])
        return Rollout(prompt_ids, completion_ids, lengths, *first_end(completion_ids, self.end_ids))

    def texts(self, completions: list[list[int]]) -> list[str]:
        return [decoded(self.tokenizer, ids) for ids in completions]

    def logits(self, model: Any, rollout: Rollout) -> Tensor:
        """(B, T + 1, V): position t predicts completion token t, the last nothing; unsliced, since a slice copies in the backward."""
        prompt_ids, completion_ids = rollout.prompt_ids, rollout.completion_ids
        prompt_mask = left_mask(rollout.prompt_lengths, prompt_ids.shape[1], prompt_ids.device)
        mask = torch.cat([prompt_mask, rollout.completion_mask()], 1).long()
        arguments: dict[str, Any] = {"logits_to_keep": completion_ids.shape[1] + 1}
        if "position_ids" in inspect.signature(model.forward).parameters:  # counted from each prompt's first real token
            arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        with self.autocast():
            return model(input_ids=torch.cat([prompt_ids, completion_ids], 1), attention_mask=mask, use_cache=False, **arguments).logits

    def autocast(self) -> Any:
        return torch.autocast(self.model.device.type, self.dtype, enabled=self.dtype != torch.float32)


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text that rewards read."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion: the tokenizer's, and those of the model's generation settings (chat models have several)."""
    of_model = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])]
    ids = list(dict.fromkeys(i for i in ids if i is not None))
    if not ids:
        raise ValueError("--model: neither its tokenizer nor its generation settings name an end token, so no completion could end")
    return ids
