"""From hidden states: loss with both gradients, and log-probs alone, beside what people use; then what a masked row saves.

Names are as in test_logits.py: <contest>[<device>-<size>-<dtype>-<contestant>].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.hidden_arena import NAMES, HiddenArena
from benchmarks.inputs import Case

# (sequences, length, vocabulary, width): full is the head of a Qwen of 0.5 B parameters; smoke one whose float32 products take no minutes.
SHAPES = {"tiny": (4, 6, 1003, 24), "smoke": (4, 64, 32000, 256), "full": (4, 256, 151936, 896)}
HandIn = Callable[[str, str], None]


@pytest.fixture(scope="module")
def arena(case: Case) -> Iterator[HiddenArena]:
    """Module scope, as for logits: gigabytes that are gone before the next case."""
    yield HiddenArena(case)


@pytest.mark.parametrize("contestant", NAMES["hidden"])
def test_hidden(case: Case, contestant: str, hand_in: HandIn) -> None:
    hand_in("hidden", contestant)


@pytest.mark.parametrize("contestant", NAMES["hidden_forward"])
def test_hidden_forward(case: Case, contestant: str, hand_in: HandIn) -> None:
    hand_in("hidden_forward", contestant)


@pytest.mark.parametrize("contestant", NAMES["hidden_half_masked"])
def test_hidden_half_masked(case: Case, contestant: str, hand_in: HandIn) -> None:
    hand_in("hidden_half_masked", contestant)
