"""One ragged batch with everything in it, in every layout that the loss takes, and how far an answer is from the oracle's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from cases import random_logits
from combination_oracle import Expected, expect
from oracle import assert_within, half_ulp, logp_budget

# The second sequence is empty, the last has rows and no active token; holes as those of tool outputs are in the others.
LENGTHS, T, VOCAB, TAIL = (7, 0, 3, 5, 1, 4), 7, 37, 3
B = len(LENGTHS)
INSIDE = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
CU_SEQLENS = torch.tensor((0, *LENGTHS)).cumsum(0)
LAYOUTS = ("padded", "spare", "strided", "packed", "model_packed")
MODES = ("default", "inplace", "from_logps", "one_pass", "one_pass+inplace")
RELATIVE: dict[str, tuple[float, str]] = {}  # figure -> worst relative error of a tensor, and whose it was

PER_TOKEN = ("completion_ids", "old_logps", "ref_logps", "completion_mask")
PER_EITHER = ("advantages", "importance_weights", "policy_weights", "temperature")


def batch(seed: str, dtype: torch.dtype, combination: dict[str, Any]) -> dict[str, Any]:
    """Padded arguments of fused_grpo_loss with extras drawn for the seed. Masked places hold what would show in any result."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(rng.randrange(2**31))
    mask = INSIDE & (torch.rand(B, T, generator=g) < 0.8)
    mask[:, 0] = INSIDE[:, 0]
    mask[-1] = False

    def shaped(*shapes: str) -> Any:
        shape = rng.choice(shapes)
        return None if shape == "None" else torch.empty(eval(shape, {"B": B, "T": T})).uniform_(0.6, 1.4, generator=g)

    ids = torch.randint(VOCAB, (B, T), generator=g)
    logits = random_logits((B, T, VOCAB), g, ids).to(dtype)
    temperature = shaped("None", "(B,)", "(B, T)")
    temperature = rng.choice((1.0, 0.7)) if temperature is None else temperature
    taus = torch.as_tensor(temperature).double()
    taus = (taus[:, None] if taus.dim() == 1 else taus).expand(B, T)
    logps = (logits.double() / taus[..., None]).log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    def nearby(spread: float) -> Tensor:
        return (logps + spread * torch.randn(B, T, generator=g)).float()

    options = dict(combination, entropy_coef=rng.choice((0.0, 0.05, -0.02)), entropy_aggregation=rng.choice(("loss", "token_mean")))
    options |= {"max_completion_length": 16, "loss_scale": rng.choice((1.0, 0.25)), "epsilon": rng.choice((0.2, 0.1))}
    clips = combination["loss_type"] not in ("cispo", "sapo", "vespo", "reinforce")
    if clips:
        options |= {"epsilon_high": rng.choice((None, 0.28)), "delta": rng.choice((None, 1.15, 1.4)), "dual_clip": rng.choice((None, 1.2))}
    options |= {"cispo": {"epsilon_high": 1.3}, "sapo": {"sapo_temperature_neg": rng.choice((1.05, 3.0))}}.get(combination["loss_type"], {})
    if combination["loss_type"] == "vespo" and rng.random() < 0.5:
        options |= {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0}
    if rng.random() < 0.3:
        options |= {"num_items_in_batch": 31.5, "num_sequences": torch.tensor(9), "num_processes": 2}
    if not combination.get("kl_bias_correction"):  # whose gradient where something is held is a closed form, tested apart
        options |= {"max_log_ratio": rng.choice((None, 20.0, 0.3))}
    return options | {
        "logits": torch.where(mask[..., None], logits, torch.nan),
        "completion_ids": torch.where(mask, ids, torch.tensor(rng.choice((-100, 2**40)))),
        "advantages": torch.where(mask, torch.randn(B, T, generator=g), torch.nan) if rng.random() < 0.4 else torch.randn(B, generator=g),
        "old_logps": torch.where(mask, nearby(0.3), torch.nan) if rng.random() < 0.85 else None,
        "ref_logps": torch.where(mask, nearby(1.0), torch.inf) if "kl_estimator" in combination else None,
        "completion_mask": mask,
        "importance_weights": shaped("None", "(B,)", "(B, 1)", "(B, T)"),
        "policy_weights": shaped("None", "(B,)", "(B, 1)", "(B, T)"),
        "temperature": temperature,
    }


class Laid(NamedTuple):
    arguments: dict[str, Any]  # all but logits
    full: Tensor  # the memory that the logits are a part of
    view: Callable[[Tensor], Tensor]  # the logits as they are passed
    unpack: Callable[[Tensor], Tensor]  # (B, T, ...) from what has one entry a row of them


def lay_out(inputs: dict[str, Any], layout: str) -> Laid:
    arguments = dict(inputs)
    logits = arguments.pop("logits")
    nan = torch.full((B, T + 3, VOCAB + 5), torch.nan, dtype=logits.dtype)
    if layout == "padded":
        return Laid(arguments, logits.clone(), lambda full: full, lambda x: x)
    if layout == "spare":
        return Laid(arguments, torch.cat([logits, nan[:, :1, :VOCAB]], 1), lambda full: full, lambda x: x[:, :T])
    if layout == "strided":  # the completion's part of a model's logits, without a copy
        nan[:, 2:-1, :VOCAB] = logits
        return Laid(arguments, nan, lambda full: full[:, 2:-1, :VOCAB], lambda x: x)

    def packed(x: Tensor, filler: float) -> Tensor:
        rows = torch.cat([x[INSIDE], torch.full((TAIL, *x.shape[2:]), filler, dtype=x.dtype)])
        return rows[None] if layout == "model_packed" else rows

    for name in PER_TOKEN + PER_EITHER:
        x = arguments[name]
        if isinstance(x, Tensor) and (name in PER_TOKEN or x.shape == (B, T)):
            arguments[name] = packed(x, True if x.dtype == torch.bool else -100 if x.dtype == torch.int64 else torch.nan)
    arguments["cu_seqlens"] = CU_SEQLENS.int() if layout == "packed" else CU_SEQLENS

    def unpack(x: Tensor) -> Tensor:
        x = x[0] if x.shape[0] == 1 else x
        assert (x[-TAIL:] == 0).all(), "rows behind cu_seqlens[-1] are in no sequence"
        out = torch.zeros(B, T, *x.shape[1:], dtype=x.dtype)
        out[INSIDE] = x[:-TAIL]
        return out

    return Laid(arguments, packed(logits, torch.nan), lambda full: full, unpack)


class Answer(NamedTuple):
    output: gk.GRPOLossOutput  # per token (B, T)
    dlogits: Tensor  # (B, T, V)


def answer(inputs: dict[str, Any], layout: str, mode: str, backend: str, upstream: float = 1.0) -> Answer:
    arguments, full, view, unpack = lay_out(inputs, layout)
    leaf = full.requires_grad_()
    logits = view(leaf.clone())  # not a leaf: inplace may write over it
    if mode == "from_logps":
        ids, mask, temperature = (arguments.pop(name) for name in ("completion_ids", "completion_mask", "temperature"))
        temperature = per_row(temperature, ids, arguments.get("cu_seqlens"))
        if ids.shape[0] == 1:
            ids, mask, logits, temperature = ids[0], mask[0], logits[0], temperature[0] if isinstance(temperature, Tensor) else temperature
        if "cu_seqlens" in arguments:  # what is scored has no offsets, so the mask says what is in a sequence
            mask = mask & (torch.arange(len(ids)) < CU_SEQLENS[-1])
        scored = gk.token_logprobs_and_entropy(logits, ids, mask=mask, temperature=temperature, backend=backend)
        output = gk.grpo_loss(scored.logps, entropy=scored.entropy, completion_mask=mask, backend=backend, **arguments)
    else:
        output = gk.fused_grpo_loss(logits, **arguments, **{flag: True for flag in mode.split("+") if flag != "default"}, backend=backend)
    (output.loss * upstream).backward()
    around = torch.ones(leaf.shape, dtype=torch.bool)
    view(around).fill_(False)
    assert (leaf.grad[around] == 0).all(), "gradient outside the logits"
    return Answer(output._replace(**{name: unpack(getattr(output, name)) for name in output._fields[2:]}), unpack(view(leaf.grad)))


def per_row(temperature: Any, ids: Tensor, cu_seqlens: Tensor | None) -> Any:
    """token_logprobs knows no offsets: one temperature a sequence becomes one a row."""
    if cu_seqlens is None or not isinstance(temperature, Tensor) or temperature.shape == ids.shape:
        return temperature
    spread = torch.cat([temperature.repeat_interleave(cu_seqlens.diff()), torch.ones(TAIL)])
    return spread.view(ids.shape)


def wanted(inputs: dict[str, Any]) -> Expected:
    arguments = dict(inputs)
    return expect(**arguments, mask=arguments.pop("completion_mask"))


def compare(name: str, got: Answer, want: Expected, dtype: torch.dtype, upstream: float = 1.0, stored_before: bool = False) -> None:
    """Every figure within its budget; the worst relative error of each is kept with its name. `stored_before`: one pass."""
    output, active = got.output, want.logps != 0
    small = logp_budget(want.logps)
    budgets = {
        "logps": small,
        "entropy": logp_budget(want.entropy),
        "kl": 1e-5 * want.kl.abs() + want.kl_error,
        "policy_loss": 1e-6 + 1e-5 * want.size.sum() + (want.a.abs() * small).sum(),
    }
    budgets["loss"] = budgets["policy_loss"]
    for figure, budget in budgets.items():
        assert_within(f"{figure}, every combination", getattr(output, figure), getattr(want, figure), budget)
        note(figure, name, getattr(output, figure), getattr(want, figure), want.size.sum() if "loss" in figure else None)
    assert torch.equal(output.clipped, want.clipped.to(torch.int8)), "clipped"
    budget = 2e-5 * want.dlogits.abs() + ((2e-7 * (want.a.abs() + want.b.abs()) + want.a_error) / want.temperature)[..., None]
    budget = torch.where(active[..., None], budget, 0) * upstream
    target = want.dlogits * upstream
    if dtype != torch.float32:
        rounding = half_ulp(target.abs() + budget, dtype)
        if stored_before and upstream != 1:
            rounding = rounding + upstream * half_ulp((target.abs() + budget) / upstream, dtype)
        budget = torch.where(budget > 0, budget + rounding, 0)
    kind = str(dtype).removeprefix("torch.")
    assert_within(f"dlogits, every combination, {kind}", got.dlogits, target, budget)
    note(f"dlogits {kind}", name, got.dlogits, target)


def note(figure: str, name: str, got: Tensor, want: Tensor, scale: Tensor | None = None) -> None:
    """Largest error as a share of the largest value."""
    scale = want.abs().max() if scale is None else scale
    error = float((got.detach().double() - want).abs().max() / scale) if scale > 0 else 0.0
    if error > RELATIVE.get(figure, (-1.0, ""))[0]:
        RELATIVE[figure] = error, name
