"""Every loss type at every level with every KL penalty, in every layout and mode that is allowed, against float64; what is not allowed
raises."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from cases import EMULATED
from combination_cases import LAYOUTS, MODES, RELATIVE, answer, batch, compare, lay_out, wanted
from combination_oracle import LEVELS, LOSS_TYPES, PENALTIES


@pytest.fixture(scope="module", autouse=True)
def worst_relative_errors() -> Iterator[None]:
    yield
    print()
    for figure, (error, name) in sorted(RELATIVE.items()):
        print(f"worst relative error of {figure}: {error:.2e} ({name})")


def combination(loss_type: str, level: str, penalty: str | None) -> dict[str, Any]:
    chosen: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level}
    if penalty is not None:
        chosen |= {"kl_estimator": penalty.split()[0], "kl_bias_correction": "corrected" in penalty, "beta": 0.1}
    return chosen


@functools.lru_cache(2)  # both backends ask for the same one
def case(loss_type: str, level: str, penalty: str | None, dtype: torch.dtype) -> tuple[dict[str, Any], Any]:
    inputs = batch(f"{loss_type} {level} {penalty} {dtype}", dtype, combination(loss_type, level, penalty))
    return inputs, wanted(inputs)


def needs_two_sweeps(loss_type: str, level: str) -> bool:
    return level != "token" or loss_type == "vespo"


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_combination_is_within_budget_of_float64(backend: str, loss_type: str, level: str, penalty: str | None) -> None:
    half = torch.bfloat16 if penalty in (None, "k3", "abs") else torch.float16
    modes = [mode for mode in MODES if not ("one_pass" in mode and needs_two_sweeps(loss_type, level))]
    number = LOSS_TYPES.index(loss_type) + 2 * LEVELS.index(level) + 3 * PENALTIES.index(penalty)
    for dtype in (torch.float32, half):
        inputs, want = case(loss_type, level, penalty, dtype)
        assert (want.dlogits != 0).any()
        for (i, mode), (j, layout) in itertools.product(enumerate(modes), enumerate(LAYOUTS)):
            if dtype == half and i != j % len(modes):
                continue  # the arithmetic is that of float32; what differs is one load and one store
            if backend in EMULATED and (i, j) != (number % len(modes), number % len(LAYOUTS)):
                continue
            upstream = (1.0, 0.37)[j % 2]
            name = f"{backend}, {loss_type}, {level}, {penalty}, {mode}, {layout}, {dtype}"
            try:
                compare(name, answer(inputs, layout, mode, backend, upstream), want, dtype, upstream, "one_pass" in mode)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("loss_type, level", [(t, level) for t in LOSS_TYPES for level in LEVELS if needs_two_sweeps(t, level)])
def test_one_pass_is_refused_where_a_term_needs_its_whole_sequence(backend: str, loss_type: str, level: str, inplace: bool) -> None:
    inputs = batch("one pass", torch.float32, combination(loss_type, level, None))
    for layout in ("padded", "packed"):
        arguments, full, view, _ = lay_out(inputs, layout)
        with pytest.raises(ValueError, match=f"one_pass: loss_type '{loss_type}' at level '{level}'"):
            gk.fused_grpo_loss(view(full), **arguments, one_pass=True, inplace=inplace, backend=backend)


UNCLIPPED = ("cispo", "sapo", "vespo", "reinforce")
FORBIDDEN = [
    *[({"loss_type": t, "epsilon_high": 5.0, name: 1.5}, name) for t in UNCLIPPED for name in ("delta", "dual_clip")],
    *[({"kl_estimator": name, "kl_bias_correction": True}, "kl_bias_correction") for name in ("k1", "k2", "abs")],
    *[({"loss_type": t, "epsilon_high": 5.0, "max_completion_length": 9, "beta": 0.1, "ref_logps": None}, "ref_logps") for t in LOSS_TYPES],
    *[({"loss_type": t, "num_processes": 2}, "num_sequences") for t in ("grpo", "sapo", "luspo")],
    *[({"loss_type": t, "epsilon_high": 5.0, "num_processes": 2}, "num_items_in_batch") for t in ("dapo", "cispo", "vespo", "reinforce")],
    ({"loss_type": "cispo"}, "epsilon_high"),
    ({"loss_type": "dr_grpo"}, "max_completion_length"),
    ({"loss_type": "dr_grpo", "max_completion_length": 9, "num_processes": 2}, "num_sequences"),
    *[({"loss_type": "vespo", "importance_sampling_level": "sequence", name: 0.0}, name) for name in ("vespo_k_pos", "vespo_lambda_neg")],
    *[
        ({"loss_type": "sapo", name: value}, name)
        for name in ("sapo_temperature_pos", "sapo_temperature_neg")
        for value in (0, -1.0, math.nan)
    ],
    *[({name: "other"}, name) for name in ("loss_type", "importance_sampling_level", "kl_estimator", "entropy_aggregation")],
]


@pytest.mark.parametrize("options, named", FORBIDDEN, ids=str)
def test_what_has_no_meaning_raises_and_names_the_option(options: dict[str, Any], named: str) -> None:
    logits, ids = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    arguments = {"ref_logps": torch.zeros(2, 3)} | options
    with pytest.raises(ValueError, match=f"^{named}: "):
        gk.fused_grpo_loss(logits, ids, torch.ones(2), **arguments)
    with pytest.raises(ValueError, match=f"^{named}: "):
        gk.grpo_loss(torch.zeros(2, 3), torch.ones(2), **arguments)
