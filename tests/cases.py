"""Inputs as they are in training and worse, layouts that are not contiguous, and one way to run every mode of the loss on them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
import oracle

# 1, 2, 3; around a vector, a SIMD pack (256 to 1,024 columns) and a block of the torch backend (1,024); what models have; beyond 2^18.
NARROW = (1, 2, 3, 31, 129, 1023, 1025, 4097)
WIDE = (50257, 65537, 128257, 151936, 262145)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = ("default", "one_pass", "inplace", "one_pass+inplace", "from_logps")
# GPU kernels in an emulator on a CPU (`make test-emulated`): milliseconds a row.
EMULATED = {"triton", "cuda_on_host"}
LAYOUTS = ("contiguous", "later_time", "longer_rows", "unaligned", "time_first", "every_second_sequence")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(shape: tuple[int, int, int], g: torch.Generator, token_ids: Tensor | None = None) -> Tensor:
    """float32 rows of spread 0.1 to 20; of six with ids, one is flat, one has its target at p > 0.5, one within 1e-6 of 1."""
    spread = torch.empty(*shape[:2], 1).uniform_(-2.3, 3, generator=g).exp()
    z = torch.randn(shape, generator=g) * spread + 3 * torch.randn(*shape[:2], 1, generator=g)
    if token_ids is not None:
        kind = torch.arange(token_ids.numel()).view(token_ids.shape) % 6
        z = torch.where((kind == 2)[..., None], z[..., :1], z)
        target = token_ids[..., None]
        others = z.scatter(-1, target, -torch.inf).logsumexp(-1).clamp(min=-1e4)
        margin = torch.where(kind == 4, 0.5, 15.0) + torch.rand(token_ids.shape, generator=g)
        z.scatter_(-1, target, torch.where(kind >= 4, others + margin, z.gather(-1, target)[..., 0])[..., None])
    return z


def batch(
    seed: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, *, temperature: Any = 1.0, spare: bool = False
) -> dict[str, Any]:
    """Arguments of fused_grpo_loss with every per-token tensor: ratios in and around the clip range, a mask that is not all ones."""
    g, (B, T, V) = generator(seed), shape
    ids = torch.randint(V, (B, T), generator=g)
    logits = random_logits(shape, g, ids).to(dtype)
    taus = torch.as_tensor(temperature, dtype=torch.float64)
    logps, _ = oracle.logps_and_entropy(logits.double(), ids, (taus[:, None] if taus.dim() == 1 else taus).expand(B, T))
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[0, 0] = True
    if spare:  # the position behind the last token; what stands there never matters
        logits = torch.cat([logits, torch.full((B, 1, V), torch.nan, dtype=dtype)], 1)

    def nearby(spread: float) -> Tensor:
        return (logps + spread * torch.randn(B, T, generator=g)).float()

    return {
        "logits": logits,
        "completion_ids": ids,
        "advantages": torch.randn(B, generator=g),
        "old_logps": nearby(0.3),
        "ref_logps": nearby(1.0),
        "completion_mask": mask,
        "temperature": temperature,
    }


def lay_out(x: Tensor, layout: str, sentinel: float) -> tuple[Tensor, Tensor]:
    """A buffer full of `sentinel`, and the view of it that holds x (B, T, V)."""
    B, T, V = x.shape
    shape, view = {
        "contiguous": ((B, T, V), lambda full: full),
        "later_time": ((B, T + 2, V), lambda full: full[:, 1:-1]),
        "longer_rows": ((B, T, V + 3), lambda full: full[..., :V]),
        "unaligned": ((B, T, V + 3), lambda full: full[..., 1 : V + 1]),
        "time_first": ((T, B, V), lambda full: full.transpose(0, 1)),
        "every_second_sequence": ((2 * B, T, V), lambda full: full[1::2]),
    }[layout]
    full = torch.full(shape, sentinel, dtype=x.dtype)
    view(full).copy_(x)
    return full, view


class Run(NamedTuple):
    output: gk.GRPOLossOutput
    dlogits: Tensor


def run(inputs: dict[str, Any], backend: str, mode: str = "default", layout: str = "contiguous", upstream: float = 1.0) -> Run:
    """The loss and its gradient in one of MODES, from logits in one of LAYOUTS; what is around them is neither read nor written."""
    arguments = dict(inputs)
    logits = arguments.pop("logits")
    full, view = lay_out(logits, layout, sentinel=torch.nan)
    leaf = full.requires_grad_()
    storage = leaf.clone()  # not a leaf: inplace may write over it
    z, before = view(storage), storage.detach().clone()
    if mode == "from_logps":
        names = ("completion_ids", "completion_mask", "temperature")
        ids, mask, temperature = (arguments.pop(name, default) for name, default in zip(names, (None, None, 1.0)))
        scored = gk.token_logprobs_and_entropy(z, ids, mask=mask, temperature=temperature, backend=backend)
        output = gk.grpo_loss(scored.logps, entropy=scored.entropy, completion_mask=mask, backend=backend, **arguments)
    else:
        flags = {flag: True for flag in mode.split("+") if flag != "default"}
        output = gk.fused_grpo_loss(z, **arguments, **flags, backend=backend)
    (output.loss * upstream).backward()

    around = torch.ones(full.shape, dtype=torch.bool)
    view(around).fill_(False)
    assert same_bits(storage.detach()[around], before[around]), "written outside the logits"
    assert (leaf.grad[around] == 0).all(), "gradient outside the logits"
    if "inplace" not in mode:
        assert same_bits(storage.detach(), before), "the logits were changed"
    return Run(output, view(leaf.grad))


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal shapes, dtypes and bits, so that NaN equals NaN and 0 is not -0."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.element_size()]
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(integer), y.contiguous().view(integer))


def assert_matches(result: Run, inputs: dict[str, Any], mode: str = "default", upstream: float = 1.0) -> oracle.Expected:
    """Every figure of a run within its budget of the float64 oracle."""
    expected = oracle.grpo(**inputs)
    output, dtype = result.output, inputs["logits"].dtype
    oracle.assert_within("logps", output.logps, expected.logps, oracle.logp_budget(expected.logps))
    oracle.assert_within("entropy", output.entropy, expected.entropy, oracle.logp_budget(expected.entropy))
    oracle.assert_within("kl", output.kl, expected.kl, oracle.kl_budget(expected))
    for name in ("loss", "policy_loss"):
        oracle.assert_within(name, getattr(output, name), getattr(expected, name), oracle.loss_budget(expected))
    assert torch.equal(output.clipped, expected.clipped.to(torch.int8))
    assert output.clipped.dtype == torch.int8 and {x.dtype for x in output[:5]} == {torch.float32}
    scaled = {name: getattr(expected, name) * upstream for name in ("dlogits", "a", "b", "da")}
    stored_before = upstream if "one_pass" in mode and upstream != 1 else None
    oracle.assert_dlogits(result.dlogits, expected._replace(**scaled), inputs["completion_ids"], dtype, stored_before)
    return expected


def pairwise(factors: dict[str, tuple], seed: int) -> list[dict[str, Any]]:
    """Rows in which every two values of every two factors meet, by greedy choice among random rows around a pair not yet seen."""
    rng = random.Random(seed)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(factors, 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    rows = []
    while missing:
        pair = dict(rng.choice(sorted(missing)))
        candidates = [{name: pair.get(name, rng.randrange(len(values))) for name, values in factors.items()} for _ in range(20)]
        row, found = max(((c, missing & set(itertools.combinations(c.items(), 2))) for c in candidates), key=lambda cf: len(cf[1]))
        missing -= found
        rows.append({name: factors[name][i] for name, i in row.items()})
    return rows


def pairs_of(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Which of these rows, all over the same factors, it takes for every two values of two factors that meet in one of them."""
    met = [set(itertools.combinations(sorted(row.items()), 2)) or set(row.items()) for row in rows]
    missing = set().union(*met)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(met[i] & missing))
        missing -= met[best]
        chosen.append(best)
    return sorted(chosen)
