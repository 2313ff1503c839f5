"""From hidden states: the loss, and its gradients at the hidden states and at the language-model head.

The floor is the three matrix products that no implementation can do without: logits, and the two gradients. Inputs are as small numbers
as models have; what the products round away is the same for everybody, so an answer is held to a norm, not to each element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import grpo_kernels
from benchmarks.contest import Clocked, Contestant, Turn, clock
from benchmarks.gpu_implementations import imported
from benchmarks.implementations import Missing, naive, naive_float
from benchmarks.inputs import BETA, EPSILON, Case, Inputs, WrongAnswer, textbook_loss

ROOFLINE = "products"


@dataclass(frozen=True)
class Hidden:
    """hidden_states (B, T, D) and weight (V, D), leaves of `dtype`; `tokens` holds everything per token, and no logits."""

    hidden_states: Tensor
    weight: Tensor
    tokens: Inputs

    @classmethod
    def make(cls, case: Case, width: int) -> Hidden:
        generator = torch.Generator(case.device).manual_seed(0)
        how: dict[str, Any] = {"generator": generator, "device": case.device}
        dtype, shape = getattr(torch, case.dtype), (case.batch, case.time)
        hidden_states = torch.randn(*shape, width, **how).to(dtype).requires_grad_()
        weight = torch.randn(case.vocab, width, **how).mul_(width**-0.5).to(dtype).requires_grad_()
        ids = torch.randint(case.vocab, shape, **how)
        near = [torch.tensor([-0.5, -0.1, 0.1, 0.5], device=case.device)[torch.randint(4, shape, **how)] for _ in range(2)]
        no_logits = hidden_states.new_empty(0)
        mask = torch.ones(shape, dtype=torch.bool, device=case.device)
        inputs = cls(hidden_states, weight, Inputs(no_logits, ids, torch.ones(case.batch, device=case.device), *near, mask))
        logps = torch.cat([logps for logps, _ in inputs.scored_rows()]).view(shape)
        tokens = replace(inputs.tokens, old_logps=(logps - near[0]).float(), ref_logps=(logps + near[1]).float())
        return replace(inputs, tokens=tokens)

    def half_masked(self) -> Hidden:
        return replace(self, tokens=self.tokens.half_masked())

    def scored_rows(self, rows: int = 1024):  # type: ignore[no-untyped-def]
        """(logps, p) of some rows at a time, float64."""
        weight = self.weight.detach().double()
        pairs = zip(self.hidden_states.detach().flatten(0, 1).split(rows), self.tokens.completion_ids.flatten().split(rows))
        for x, ids in pairs:
            logprobs = (x.double() @ weight.t()).log_softmax(-1)
            yield logprobs.gather(-1, ids[:, None])[:, 0], logprobs.exp_()

    @functools.cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """Gradients of hidden states and weight, through float64 products."""
        logps = torch.cat([logps for logps, _ in self.scored_rows()]).view_as(self.tokens.completion_ids).requires_grad_()
        textbook_loss(logps, self.tokens).backward()
        x, weight = self.hidden_states.detach().flatten(0, 1).double(), self.weight.detach().double()
        dx, dweight, start = torch.empty_like(x), torch.zeros_like(weight), 0
        for _, p in self.scored_rows():
            rows = slice(start, start := start + len(p))
            slopes, ids = logps.grad.flatten()[rows, None], self.tokens.completion_ids.flatten()[rows, None]
            dlogits = p.mul_(-slopes).scatter_add_(-1, ids, slopes)
            dx[rows] = dlogits @ weight
            dweight.addmm_(dlogits.t(), x[rows])
        return dx.view_as(self.hidden_states).float(), dweight.float()


# -- implementations: (hidden_states, weight, tokens) -> loss


def _from_logits(logps: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Hidden], Tensor]:
    return lambda x: textbook_loss(logps(x.hidden_states @ x.weight.t(), x.tokens.completion_ids), x.tokens)


def _liger(x: Hidden) -> Tensor:
    module = _liger_module(x.weight.is_cuda)
    tokens = x.tokens
    rest = {"old_per_token_logps": tokens.old_logps, "ref_per_token_logps": tokens.ref_logps}
    return module(x.hidden_states, x.weight, tokens.completion_ids, tokens.completion_mask.int(), tokens.advantages, **rest)[0]


@functools.cache
def _liger_module(compiled: bool) -> Any:
    options = {"loss_type": "grpo", "beta": BETA, "epsilon_low": EPSILON, "epsilon_high": EPSILON, "compiled": compiled}
    return imported("liger_kernel.chunked_loss.grpo_loss", "LigerFusedLinearGRPOLoss")(**options)


def _trl(x: Hidden) -> Tensor:
    function = imported("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    ids = x.tokens.completion_ids
    logps = function.apply(x.hidden_states.flatten(0, 1), x.weight, None, ids.flatten(), 1.0, 8192, None, 1.0, ())[0]
    return textbook_loss(logps.view_as(ids), x.tokens)


def _ours(backend: str) -> Callable[[Hidden], Tensor]:
    def loss(x: Hidden) -> Tensor:
        function = getattr(grpo_kernels, "fused_linear_grpo_loss", None)
        if function is None:
            raise Missing("this version has no fused_linear_grpo_loss")
        if (reason := grpo_kernels.available_backends()[backend]) != "available":
            raise Missing(f"backend {backend!r}: {reason}")
        tokens = x.tokens
        return function(
            x.hidden_states, x.weight, tokens.completion_ids, tokens.advantages, old_logps=tokens.old_logps, ref_logps=tokens.ref_logps,
            completion_mask=tokens.completion_mask, epsilon=EPSILON, beta=BETA, backend=backend,
        ).loss  # fmt: skip

    return loss


LOSSES: dict[str, Callable[[Hidden], Tensor]] = {
    "naive": _from_logits(naive),
    "naive_float": _from_logits(naive_float),
    "liger": _liger,
    "trl_kernel": _trl,
    **{name: _ours(name) for name in ("triton", "cuda", "cpu")},
}
ALLOWED = {"float32": 1e-3, "bfloat16": 0.01}  # of the norm: logits are rounded once, as the model's own dtype says
ALLOWED_TO_ROUNDED_LOGPS = 0.17  # as for logits: a clipped token's gradient hangs on a log-prob that bfloat16 cannot hold


def contestant(
    name: str, case: Case, inputs: Hidden, baseline: str, observe: Callable[[Callable[[], Clocked]], dict[str, Any]]
) -> Contestant:
    leaves, facts = (inputs.hidden_states, inputs.weight), {}

    def step() -> Tensor:
        loss = LOSSES[name](inputs)
        loss.backward()
        return loss.detach()

    def play() -> Clocked:
        for leaf in leaves:
            leaf.grad = None
        return clock(step, case.device)

    def enter() -> Turn:
        play()
        allowed = ALLOWED_TO_ROUNDED_LOGPS if name == "naive" and case.dtype != "float32" else ALLOWED[case.dtype]
        for what, leaf, want in zip(("hidden states", "weight"), leaves, inputs.expected):
            error = float((leaf.grad.float() - want).norm() / want.norm())
            if not error <= allowed:
                raise WrongAnswer(f"gradient of the {what}: off by {error:.3g} of its norm, {allowed:.3g} is allowed")
        facts.update(observe(play))
        return lambda: play().seconds

    return Contestant(enter, baseline, facts)


def products(case: Case, inputs: Hidden) -> Contestant:
    """The logits and both gradients of some dlogits, nothing else."""

    def enter() -> Turn:
        x, weight = inputs.hidden_states.detach().flatten(0, 1), inputs.weight.detach()
        dlogits = torch.randn(len(x), len(weight), device=x.device, dtype=x.dtype)

        def multiply() -> None:
            torch.mm(x, weight.t())
            torch.mm(dlogits, weight)
            torch.mm(dlogits.t(), x)

        multiply()
        return lambda: clock(multiply, case.device).seconds

    return Contestant(enter, "naive")
