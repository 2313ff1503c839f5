"""Process supervision: completions split into steps at a delimiter, a reward for each step, and from these an advantage for each token.

Steps are pieces of the text, since that is what a reward function reads; advantages belong to tokens, and a token may reach over a
delimiter or hold part of a character. So a step's last token is found by decoding: it is the one with which the text, as decoded so far,
holds the whole step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import process_advantages
from grpo_trainer.config import Config
from grpo_trainer.rollout import decoded
from grpo_trainer.tasks import Entry, checked_rewards, columns_of, load_function

Decode = Callable[[list[int]], str]


class StepScorer:
    """The reward of every step of a rollout's completions, each checked for being one finite number, and the step's last token."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        assert config.step_reward is not None  # config.check
        self.name, self.delimiter = config.step_reward, config.step_delimiter
        self.decode: Decode = partial(decoded, tokenizer)
        self.reward = load_function("--step-reward", self.name)

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], entries: list[Entry], rewards: list[float]
    ) -> tuple[list[list[float]], list[list[int]]]:
        """Rewards and ends of each completion's steps; `rewards` are the outcome's."""
        steps = [split(text, self.delimiter) for text in completions]
        columns = columns_of(prompts, completions, completion_ids, entries) | {"steps": steps, "rewards": rewards}
        try:
            returned = self.reward(**columns)
        except Exception as error:
            raise RuntimeError(f"--step-reward: {self.name} raised {type(error).__name__}: {error}") from error
        ends = [step_ends(self.decode, *each) for each in zip(completion_ids, completions, steps)]
        return checked_step_rewards(self.name, returned, steps), ends


def split(text: str, delimiter: str) -> list[str]:
    """The steps of a text, each with the delimiter that ends it; what follows the last delimiter is a step too.

    A piece with nothing but blanks is no step of its own: it belongs to the one before it, or to the first. A blank text has no steps.

    >>> split("6 - 2 = 4\\n\\n4 + 3 = 7\\nso 7", "\\n")
    ['6 - 2 = 4\\n\\n', '4 + 3 = 7\\n', 'so 7']
    """
    *pieces, rest = text.split(delimiter)
    steps: list[str] = []
    before = ""
    for piece, end in [*((piece, delimiter) for piece in pieces), (rest, "")]:
        if piece.strip():
            steps.append(before + piece + end)
            before = ""
        elif steps:
            steps[-1] += piece + end
        else:
            before += piece + end
    return steps


def step_ends(decode: Decode, ids: list[int], text: str, steps: Sequence[str]) -> list[int]:
    """Index of each step's last token in `ids`, whose text is `text`.

    A token that reaches over a delimiter belongs to the step that it ends. The last step goes to the last token of all, so that stopping
    (the end token has no text) is rewarded with it.
    """
    ends: list[int] = []
    for length in list(accumulate(map(len, steps)))[:-1]:

        def holds(count: int, start: str = text[:length]) -> bool:
            return decode(ids[:count]).startswith(start)

        counts = range(ends[-1] + 1 if ends else 1, len(ids) + 1)
        count = counts[bisect_left(counts, True, key=holds)]
        # Where bytes are tokens, a newline may turn into a replacement character until the character that follows it is complete
        # (sentencepiece's byte fallback), and the search may have ended behind that one. A character has 4 bytes at most.
        while earlier := [n for n in range(max(count - 4, counts.start), count) if holds(n)]:
            count = earlier[0]
        ends.append(count - 1)
    return ends + [len(ids) - 1] * bool(steps)


def step_advantages(rewards: list[list[float]], ends: list[list[int]], width: int, num_generations: int) -> Tensor:
    """(B, width) float32 on the CPU: `process_advantages` of lists of different lengths."""
    most = max(map(len, rewards))

    def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[0] * (most - len(row))] for row in rows], dtype=dtype)

    mask = torch.arange(most) < torch.tensor([[len(row)] for row in rewards])
    return process_advantages(padded(rewards, torch.float64), padded(ends, torch.int64), width, num_generations, step_mask=mask)


def checked_step_rewards(name: str, returned: Any, steps: Sequence[Sequence[str]]) -> list[list[float]]:
    """A list of finite numbers for each completion, one a step, or a ValueError that shows the first thing that is not."""
    if isinstance(returned, str) or not hasattr(returned, "__len__") or len(returned) != len(steps):
        got = f"{len(returned)} of them" if isinstance(returned, (list, tuple)) else type(returned).__name__
        raise ValueError(f"--step-reward: {name}: expected {len(steps)} lists of numbers, one a completion, got {got}")
    return [
        checked_rewards(f"--step-reward: {name}: completion {index}", values, of, "step")
        for index, (values, of) in enumerate(zip(returned, steps))
    ]
