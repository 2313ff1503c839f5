"""From logits: log-probs alone, and the loss with its gradient, beside what people use; then what masks, threads and instruction sets do.

A test's name is <contest>[<device>-<size>-<dtype>-<contestant>] and stays, so that saved runs can be compared between versions.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.arena import NAMES

HandIn = Callable[[str, str], None]


@pytest.mark.parametrize("contestant", NAMES["forward"])
def test_forward(case: object, contestant: str, hand_in: HandIn) -> None:
    hand_in("forward", contestant)


@pytest.mark.parametrize("contestant", NAMES["forward_backward"])
def test_forward_backward(case: object, contestant: str, hand_in: HandIn) -> None:
    hand_in("forward_backward", contestant)


@pytest.mark.parametrize("contestant", NAMES["half_masked"])
def test_half_masked(case: object, contestant: str, hand_in: HandIn) -> None:
    hand_in("half_masked", contestant)


@pytest.mark.parametrize("contestant", NAMES["threads"])
def test_threads(case: object, contestant: str, hand_in: HandIn) -> None:
    hand_in("threads", contestant)


@pytest.mark.parametrize("contestant", NAMES["instruction_sets"])
def test_instruction_sets(case: object, contestant: str, hand_in: HandIn) -> None:
    hand_in("instruction_sets", contestant)
