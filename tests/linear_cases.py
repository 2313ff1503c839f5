"""Hidden states and heads whose products are exact, so that a loss from them has the float64 answer of known logits, and how far from
the exact gradients an answer may be.

Entries have four bits: a product is a sum of multiples of 2^-8 that float32 holds whatever the order, and the logits are that sum rounded
once to their dtype. What is left are the rounding of dlogits and of the two products back, whose bounds are summed element by element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
import oracle
from cases import same_bits

COLUMNS = 12  # D: several times what the smallest vector unit holds, and no multiple of 8
LAYOUTS = ("contiguous", "time_first", "every_second_column", "later_time")


class Problem(NamedTuple):
    hidden: Tensor  # (B, T, D) or with a spare position; NaN where masked
    weight: Tensor
    bias: Tensor | None
    arguments: dict[str, Any]  # ids, advantages, what the loss takes beside them, and the head's options
    logits: Tensor  # (B, T, V) float64, as the softmax sees them, 0 where masked
    slope: Tensor  # d logits / d product, of the same shape


def few_bits(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(-8, 9, shape, generator=g) / 8


def problem(
    inputs: dict[str, Any], dtype: torch.dtype, seed: int, *, bias: bool = False, scale: float = 1.0, softcap: float | None = None,
    logits_dtype: torch.dtype | None = None, chunk_size: int | None = None,
) -> Problem:  # fmt: skip
    """The same arguments as `inputs`, those of fused_grpo_loss, but from hidden states: old and reference log-probs keep their distance
    from the policy's."""
    arguments, g = dict(inputs), torch.Generator().manual_seed(seed)
    former = arguments.pop("logits").double()
    (B, T), V = arguments["completion_ids"].shape, former.shape[-1]
    spread = 4.0 ** torch.randint(-1, 2, (*former.shape[:2], 1), generator=g)
    hidden, weight = few_bits((*former.shape[:2], COLUMNS), g) * spread, few_bits((V, COLUMNS), g)
    offset = few_bits((V,), g) if bias else None
    product = (hidden.double() @ weight.double().t() + (0 if offset is None else offset.double())).to(logits_dtype or dtype).double()
    capped = scale * product if softcap is None else softcap * torch.tanh(scale / softcap * product)
    slope = torch.full_like(product, scale) if softcap is None else scale * (1 - (capped / softcap) ** 2)

    mask = arguments.get("completion_mask")
    mask = torch.ones(B, T, dtype=torch.bool) if mask is None else mask != 0
    ids = torch.where(mask, arguments["completion_ids"], 0)
    taus = torch.as_tensor(arguments["temperature"], dtype=torch.float64)
    taus = torch.where(mask, (taus[:, None] if taus.dim() == 1 else taus).expand(B, T), 1)
    before, now = (oracle.logps_and_entropy(torch.where(mask[..., None], z[:, :T], 0), ids, taus)[0] for z in (former, capped))
    for name in ("old_logps", "ref_logps"):
        if arguments.get(name) is not None:
            arguments[name] = (arguments[name] + torch.where(mask, now - before, 0)).float()
    needed = torch.cat([mask, torch.zeros(B, former.shape[1] - T, dtype=torch.bool)], 1)[..., None]
    return Problem(
        torch.where(needed, hidden, torch.nan).to(dtype),
        weight.to(dtype),
        None if offset is None else offset.to(dtype),
        arguments | {"logit_scale": scale, "logit_softcap": softcap, "logits_dtype": logits_dtype, "chunk_size": chunk_size},
        torch.where(mask[..., None], capped[:, :T], 0),
        torch.where(mask[..., None], slope[:, :T], 0),
    )


def lay_out(x: Tensor, layout: str) -> tuple[Tensor, Any]:
    """Memory full of NaN, and the view of it that holds x (B, T, D)."""
    B, T, D = x.shape
    shape, view = {
        "contiguous": ((B, T, D), lambda full: full),
        "time_first": ((T, B, D), lambda full: full.transpose(0, 1)),
        "every_second_column": ((B, T, 2 * D), lambda full: full[..., ::2]),
        "later_time": ((B, T + 2, D), lambda full: full[:, 2:]),
    }[layout]
    full = torch.full(shape, torch.nan, dtype=x.dtype)
    view(full).copy_(x)
    return full, view


class Result(NamedTuple):
    output: gk.GRPOLossOutput
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor | None


def run(p: Problem, backend: str | None, *, layout: str = "contiguous", upstream: float = 1.0, **changed: Any) -> Result:
    full, view = lay_out(p.hidden, layout)
    leaves = [full.requires_grad_(), p.weight.clone().requires_grad_(), None if p.bias is None else p.bias.clone().requires_grad_()]
    output = gk.fused_linear_grpo_loss(view(leaves[0]), leaves[1], bias=leaves[2], **p.arguments | changed, backend=backend)
    (output.loss * upstream).backward()
    around = torch.ones(full.shape, dtype=torch.bool)
    view(around).fill_(False)
    assert (leaves[0].grad[around] == 0).all(), "gradient outside the hidden states"
    assert torch.equal(leaves[1], p.weight) and same_bits(view(leaves[0]).detach(), p.hidden), "an input was changed"
    return Result(output, view(leaves[0].grad), *(None if x is None else x.grad for x in leaves[1:]))


def oracle_arguments(p: Problem) -> dict[str, Any]:
    head = ("logit_scale", "logit_softcap", "logits_dtype", "chunk_size")
    return {"logits": p.logits, **{name: x for name, x in p.arguments.items() if name not in head}}


def assert_gradients(p: Problem, got: Result, dlogits: Tensor, budget: Tensor, upstream: float = 1.0, chunks: int = 99) -> None:
    """dH, dW and dbias from the exact dlogits (B, T, V), of which ours may be `budget` off before they are rounded to a half dtype."""
    dtype, B = p.hidden.dtype, len(p.hidden)
    T, V = dlogits.shape[1:]
    half = dtype in (torch.bfloat16, torch.float16)
    dz, error = dlogits * p.slope * upstream, budget * p.slope * upstream
    if half:
        error = torch.where(error > 0, error + oracle.half_ulp(dz.abs() + error, dtype), 0)
    hidden, weight = torch.where(p.hidden[:, :T].isnan(), 0, p.hidden[:, :T]).double().view(B * T, -1), p.weight.double()
    dz, error = dz.reshape(B * T, V), error.reshape(B * T, V)
    ulp = 1.2e-7 if dtype != torch.float64 else 2.3e-16

    def check(name: str, got: Tensor, a: Tensor, a_error: Tensor, b: Tensor, products: int) -> None:
        assert got.dtype == dtype
        want, size = a @ b, a.abs() @ b.abs()
        allowed = a_error @ b.abs() + 2 * a.shape[1] ** 0.5 * ulp * size + 1e-300
        if half:  # each product, their sum, and the sum times the upstream gradient
            kind = str(dtype).removeprefix("torch.")
            allowed = (
                allowed + products * oracle.half_ulp(size / products + allowed, dtype) + 2 * oracle.half_ulp(want.abs() + allowed, dtype)
            )
            name = f"{name}, {kind}"
        oracle.assert_within(name, got, want, allowed)

    assert (got.dhidden[:, T:] == 0).all(), "the spare position has a gradient"
    check("dhidden", got.dhidden[:, :T].reshape(B * T, -1), dz, error, weight, 1)
    check("dweight", got.dweight, dz.t(), error.t(), hidden, chunks)
    if got.dbias is not None:
        check("dbias", got.dbias[:, None], dz.t(), error.t(), torch.ones(B * T, 1, dtype=torch.float64), 1)


def assert_matches(p: Problem, got: Result, upstream: float = 1.0) -> oracle.Expected:
    """Every figure of a token-level loss within its budget of the float64 oracle, on logits that are exact."""
    expected = oracle.grpo(**oracle_arguments(p))
    output, exact = got.output, p.hidden.dtype == torch.float64
    small = oracle.logp_budget(expected.logps) * (1e-8 if exact else 1)
    oracle.assert_within("logps", output.logps, expected.logps, small)
    oracle.assert_within("entropy", output.entropy, expected.entropy, oracle.logp_budget(expected.entropy) * (1e-8 if exact else 1))
    oracle.assert_within("kl", output.kl, expected.kl, oracle.kl_budget(expected) * (1e-7 if exact else 1) + 1e-300)
    for name in ("loss", "policy_loss"):
        oracle.assert_within(name, getattr(output, name), getattr(expected, name), oracle.loss_budget(expected) * (1e-7 if exact else 1))
    assert torch.equal(output.clipped, expected.clipped.to(torch.int8)) and output.loss.requires_grad
    assert {x.dtype for x in output[:5]} == {torch.float64 if exact else torch.float32}
    budget = oracle.dlogits_budget(expected, torch.float32) * (1e-7 if exact else 1)
    assert_gradients(p, got, expected.dlogits, budget, upstream)
    return expected
