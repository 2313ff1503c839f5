"""What is measured on: logits of a real vocabulary, and the float64 answer that every implementation must give before it is timed.

The data keep every row at work and every answer comparable. In half the rows the target is one of many (log-prob -12), in half it has p
near 0.4, as sampled tokens do. Log-ratios are +-0.1 or +-0.5: far enough from the clip edges that an implementation which rounds log-probs
to bfloat16 (a step there is 0.06) clips the same tokens. beta is not 0, so the gradient of a clipped row is not 0 either: no
implementation saves work on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

EPSILON, BETA = 0.2, 0.04


@dataclass(frozen=True)
class Case:
    """One device, shape and dtype; its id is part of the benchmarks' names, which stay comparable between versions."""

    device: str
    size: str
    batch: int
    time: int
    vocab: int
    dtype: str
    width: int | None = None  # of hidden states, where they are what is measured on

    @property
    def id(self) -> str:
        return f"{self.device}-{self.size}-{self.dtype}"

    @property
    def rows(self) -> int:
        return self.batch * self.time

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocab * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Inputs:
    """logits (B, T, V); advantages (B,); everything else (B, T), float32. `logits` is never written to.

    `level`: of the ratio, each token's own or one a sequence (GSPO).
    """

    logits: Tensor
    completion_ids: Tensor
    advantages: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    completion_mask: Tensor
    level: str = "token"

    @classmethod
    def make(cls, case: Case, seed: int = 0) -> Inputs:
        """The same tensors for the same case, in every process."""
        device, shape = case.device, (case.batch, case.time)
        generator = torch.Generator(device).manual_seed(seed)
        logits = torch.randn(*shape, case.vocab, generator=generator, device=device).to(getattr(torch, case.dtype))
        ids = torch.randint(case.vocab, shape, generator=generator, device=device)
        logits[:, ::2].scatter_(-1, ids[:, ::2, None], math.log(case.vocab))
        logits[:, 1::2].scatter_(-1, ids[:, 1::2, None], 0.0)
        logps = chosen_logps(logits, ids)

        def pick(*values: float) -> Tensor:
            return torch.tensor(values, device=device)[torch.randint(len(values), shape, generator=generator, device=device)]

        return cls(
            logits,
            ids,
            advantages=(torch.linspace(0.5, 1.5, case.batch) * torch.tensor([1.0, -1.0]).repeat(case.batch)[: case.batch]).to(device),
            old_logps=(logps - pick(-0.5, -0.1, 0.1, 0.5)).float(),
            ref_logps=(logps + pick(-0.5, 0.5)).float(),
            completion_mask=torch.ones(shape, dtype=torch.bool, device=device),
        )

    def half_masked(self) -> Inputs:
        """The same with the second half of every sequence masked, as padding is."""
        mask = self.completion_mask.clone()
        mask[:, mask.shape[1] // 2 :] = False
        return replace(self, completion_mask=mask)

    @cached_property
    def expected(self) -> Answer:
        """Computed in float64, a few rows at a time, by the textbook loss; the gradient is kept in float32."""
        logps = chosen_logps(self.logits, self.completion_ids).requires_grad_()
        loss = textbook_loss(logps, self)
        loss.backward()
        dlogits = torch.empty_like(self.logits, dtype=torch.float32)
        chunks = (x.flatten(0, 1).split(64) for x in (self.logits, self.completion_ids[..., None], logps.grad[..., None], dlogits))
        for z, ids, slopes, out in zip(*chunks):
            p = z.double().softmax(-1).mul_(-slopes)
            out.copy_(p.scatter_add_(-1, ids, slopes))
        masked = ~self.completion_mask
        return Answer(logps.detach().masked_fill(masked, 0), loss.detach(), dlogits)


@dataclass(frozen=True)
class Answer:
    """logps are 0 where masked. An implementation fills what it computes."""

    logps: Tensor | None = None
    loss: Tensor | None = None
    dlogits: Tensor | None = None


class WrongAnswer(AssertionError):
    pass


def check(answer: Answer, expected: Answer, rounds_logps: bool) -> None:
    """Raises WrongAnswer, naming the figure. The error of a gradient is its largest over rows, each relative to that row's length.

    `rounds_logps`: the implementation has its log-probs in bfloat16. A step is 0.0625 at -12, and PyTorch's log_softmax on a CPU is up to a
    whole one off. So is a ratio, relatively, and the gradient of a clipped token, beta (1 - e^d), is off by 16 % at d = 0.5. All
    others must be exact but for float32 and one final rounding.
    """
    if answer.logps is not None:
        _within("logps", (answer.logps - expected.logps).abs().max(), 0.07 if rounds_logps else 1e-5)
    if answer.loss is not None:
        _within("loss", (answer.loss - expected.loss).abs(), 0.05 if rounds_logps else 1e-5)
    if answer.dlogits is not None:
        exact = 1e-4 if answer.dlogits.dtype == torch.float32 else 2**-8 + 1e-4  # half a step of bfloat16
        worst = torch.zeros((), device=answer.dlogits.device)
        for got, want in zip(answer.dlogits.flatten(0, 1).split(64), expected.dlogits.flatten(0, 1).split(64)):
            length = want.norm(dim=-1)
            error = (got.float() - want).norm(dim=-1) / length.where(length > 0, 1)
            worst = torch.maximum(worst, error.max())  # NaN stays
        _within("dlogits", worst, 0.17 if rounds_logps else exact)


def _within(name: str, error: Tensor, budget: float) -> None:
    if not error <= budget:  # NaN is not
        raise WrongAnswer(f"{name}: off by {error.item():.3g} from the float64 answer, {budget:.3g} is allowed")


def chosen_logps(logits: Tensor, ids: Tensor) -> Tensor:
    """float64, a few rows at a time."""
    pairs = zip(logits.flatten(0, 1).split(64), ids.flatten().split(64))
    return torch.cat([z.double().log_softmax(-1).gather(-1, y[:, None])[:, 0] for z, y in pairs]).view_as(ids)


def textbook_loss(logps: Tensor, inputs: Inputs) -> Tensor:
    """DeepSeekMath's eq. 3 as trainers write it in plain PyTorch: what every peer below puts on top of its log-probs."""
    advantages, mask = inputs.advantages[:, None], inputs.completion_mask
    log_ratio = logps - inputs.old_logps
    if inputs.level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(log_ratio)
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    distance = inputs.ref_logps - logps
    per_token = (policy + BETA * (torch.exp(distance) - distance - 1)) * mask
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
