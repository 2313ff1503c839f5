"""From hidden states: the loss, and its gradients at the hidden states and at the language-model head.

The floor is the three matrix products that no implementation can do without: logits, and the two gradients. Inputs are as small numbers
as models have; what the products round away is the same for everybody, so a gradient is held to a norm, not to each element.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
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
    logps: Tensor | None = None  # float64

    @classmethod
    def make(cls, case: Case, width: int) -> Hidden:
        """The same tensors for the same case; log-ratios as for logits (inputs.py)."""
        inputs = cls.unscored(case, width)
        logps = torch.cat([z.log_softmax(-1).gather(-1, ids)[:, 0] for z, ids, _ in inputs._chunks()]).view_as(inputs.tokens.old_logps)
        tokens = replace(
            inputs.tokens, old_logps=(logps - inputs.tokens.old_logps).float(), ref_logps=(logps + inputs.tokens.ref_logps).float()
        )
        return replace(inputs, tokens=tokens, logps=logps)

    @classmethod
    def unscored(cls, case: Case, width: int) -> Hidden:
        """Without the time and memory of the log-probs: in the place of old and reference log-probs stands how far they are to be off."""
        generator = torch.Generator(case.device).manual_seed(0)
        how: dict[str, Any] = {"generator": generator, "device": case.device}
        dtype, shape = getattr(torch, case.dtype), (case.batch, case.time)
        hidden_states = torch.randn(*shape, width, **how).to(dtype).requires_grad_()
        weight = torch.randn(case.vocab, width, **how).mul_(width**-0.5).to(dtype).requires_grad_()
        ids = torch.randint(case.vocab, shape, **how)
        near = [torch.tensor([-0.5, -0.1, 0.1, 0.5], device=case.device)[torch.randint(4, shape, **how)] for _ in range(2)]
        no_logits = hidden_states.new_empty(0)
        mask = torch.ones(shape, dtype=torch.bool, device=case.device)
        return cls(hidden_states, weight, Inputs(no_logits, ids, torch.ones(case.batch, device=case.device), *near, mask))

    def half_masked(self) -> Hidden:
        return replace(self, tokens=self.tokens.half_masked())

    def _chunks(self, needed: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(logits, ids, numbers of the rows) of the rows that are needed, float64, some at a time."""
        x, ids, weight = self.hidden_states.detach().flatten(0, 1), self.tokens.completion_ids.flatten(), self.weight.detach().double()
        rows = torch.arange(len(x), device=x.device) if needed is None else needed.nonzero()[:, 0]
        for some in rows.split(512):
            yield x[some].double() @ weight.t(), ids[some, None], some

    @functools.cached_property
    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, and its gradients of hidden states and weight, through float64 products."""
        assert self.logps is not None
        logps = self.logps.clone().requires_grad_()
        loss = textbook_loss(logps, self.tokens)
        loss.backward()
        slopes = logps.grad.flatten()
        x, weight = self.hidden_states.detach().flatten(0, 1).double(), self.weight.detach().double()
        dx, dweight = torch.zeros_like(x), torch.zeros_like(weight)
        for z, ids, rows in self._chunks(slopes != 0):
            dlogits = z.softmax(-1).mul_(-slopes[rows, None]).scatter_add_(-1, ids, slopes[rows, None])
            dx[rows] = dlogits @ weight
            dweight.addmm_(dlogits.t(), x[rows])
        return loss.detach(), dx.view_as(self.hidden_states).float(), dweight.float()


# -- implementations: log-probs of chosen tokens from hidden states, and losses. Most peers put the textbook loss on top of their log-probs.


def _from_logits(logps: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Hidden], Tensor]:
    return lambda x: logps(torch.nn.functional.linear(x.hidden_states, x.weight), x.tokens.completion_ids)


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
    """As its trainers call it, but for the entropy and the other statistics they log: less work than theirs."""
    function = imported("trl.kernels.chunked_logprob", "ChunkedLogProbFunction")
    ids = x.tokens.completion_ids
    return function.apply(x.hidden_states.flatten(0, 1), x.weight, None, ids.flatten(), 1.0, 8192, None, 1.0, ())[0].view_as(ids)


def _verl(x: Hidden) -> Tensor:
    return _verl_module()(x.hidden_states, x.weight, x.tokens.completion_ids)[0]


@functools.cache
def _verl_module() -> Any:
    """FusedLinearForPPO with its defaults, from the one file it is in: verl as a whole wants older versions of what others here need.

    GRPO_KERNELS_VERL names a folder with a verl that is not on the path (tests/verl.txt).
    """
    folder = os.environ.get("GRPO_KERNELS_VERL")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        raise Missing("verl is not installed, and GRPO_KERNELS_VERL names no folder that has it")
    source = importlib.util.spec_from_file_location("_verl_torch", Path(spec.origin).parent / "utils/experimental/torch_functional.py")
    try:
        module = importlib.util.module_from_spec(source)
        source.loader.exec_module(module)
        return module.FusedLinearForPPO()
    except Exception as error:  # whatever an import of somebody else's package may raise
        raise Missing(f"verl: {type(error).__name__}: {error}") from None


def _ours(backend: str) -> tuple[Callable[[Hidden], Tensor], Callable[[Hidden], Tensor]]:
    def needs() -> None:
        if (reason := grpo_kernels.available_backends()[backend]) != "available":
            raise Missing(f"backend {backend!r}: {reason}")

    def logps(x: Hidden) -> Tensor:
        needs()
        mask = x.tokens.completion_mask
        return grpo_kernels.fused_linear_logprobs(x.hidden_states, x.weight, x.tokens.completion_ids, mask=mask, backend=backend).logps

    def loss(x: Hidden) -> Tensor:
        needs()
        tokens = x.tokens
        return grpo_kernels.fused_linear_grpo_loss(
            x.hidden_states, x.weight, tokens.completion_ids, tokens.advantages, old_logps=tokens.old_logps, ref_logps=tokens.ref_logps,
            completion_mask=tokens.completion_mask, epsilon=EPSILON, beta=BETA, backend=backend,
        ).loss  # fmt: skip

    return logps, loss


def _textbook(logps: Callable[[Hidden], Tensor]) -> Callable[[Hidden], Tensor]:
    return lambda x: textbook_loss(logps(x), x.tokens)


_PEERS = {"naive": _from_logits(naive), "naive_float": _from_logits(naive_float), "trl_kernel": _trl, "verl": _verl}
_BACKENDS = {name: _ours(name) for name in ("triton", "cuda", "cpu")}
LOGPS: dict[str, Callable[[Hidden], Tensor]] = {**_PEERS, **{name: logps for name, (logps, _) in _BACKENDS.items()}}
LOSSES: dict[str, Callable[[Hidden], Tensor]] = {
    **{name: _textbook(logps) for name, logps in _PEERS.items()},
    "liger": _liger,
    **{name: loss for name, (_, loss) in _BACKENDS.items()},
}
# Logits are rounded once, as the model's own dtype says. Gradients: of their norm; the loss: of itself; log-probs: the largest error.
ALLOWED = {"float32": 1e-3, "bfloat16": 0.01}
ALLOWED_LOGPS = {"float32": 1e-4, "bfloat16": 0.02}
# As for logits: the gradient of a clipped token hangs on a log-prob that bfloat16 cannot hold.
ALLOWED_TO_ROUNDED_LOGPS, ALLOWED_ROUNDED_LOGPS = 0.17, 0.1


def contestant(
    name: str, case: Case, inputs: Hidden, baseline: str, observe: Callable[[Callable[[], Clocked]], dict[str, Any]]
) -> Contestant:
    """Loss, and its gradients at the hidden states and at the weight."""
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
        if name == "naive_float" and case.dtype == "float32":
            raise Missing("the same as naive for float32")
        loss = play().result
        allowed = ALLOWED_TO_ROUNDED_LOGPS if name == "naive" and case.dtype != "float32" else ALLOWED[case.dtype]
        found = {"loss": loss, **{f"gradient of the {what}": x.grad.float() for what, x in zip(("hidden states", "weight"), leaves)}}
        for (what, got), want in zip(found.items(), inputs.expected):
            error = float((got - want).norm() / want.norm())
            if not error <= allowed:
                raise WrongAnswer(f"{what}: off by {error:.3g} of its norm, {allowed:.3g} is allowed")
            facts[f"error of the {what}"] = error
        facts.update(observe(play))
        return lambda: play().seconds

    return Contestant(enter, baseline, facts)


def scores(name: str, case: Case, inputs: Hidden, baseline: str) -> Contestant:
    """Log-probs under no_grad."""

    def play() -> Clocked:
        with torch.no_grad():
            return clock(lambda: LOGPS[name](inputs), case.device)

    def enter() -> Turn:
        if name == "naive_float" and case.dtype == "float32":
            raise Missing("the same as naive for float32")
        allowed = ALLOWED_ROUNDED_LOGPS if name == "naive" and case.dtype != "float32" else ALLOWED_LOGPS[case.dtype]
        error = float(((play().result - inputs.logps) * inputs.tokens.completion_mask).abs().max())
        if not error <= allowed:
            raise WrongAnswer(f"logps: off by {error:.3g} from the float64 answer, {allowed:.3g} is allowed")
        return lambda: play().seconds

    return Contestant(enter, baseline)


def products(case: Case, inputs: Hidden, gradients: bool = True) -> Contestant:
    """The logits and both gradients of some dlogits, each one torch.mm over all rows in the inputs' dtype, nothing else.

    Into memory that is there and was written before: no implementation gets its results so cheaply.
    """

    def enter() -> Turn:
        x, weight = inputs.hidden_states.detach().flatten(0, 1), inputs.weight.detach()
        pairs = [(x, weight.t())]
        if gradients:
            dlogits = torch.randn(len(x), len(weight), device=x.device, dtype=x.dtype)
            pairs += [(dlogits, weight), (dlogits.t(), x)]
        results = [torch.mm(a, b) for a, b in pairs]

        def multiply() -> None:
            for (a, b), out in zip(pairs, results):
                torch.mm(a, b, out=out)

        return lambda: clock(multiply, case.device).seconds

    return Contestant(enter, "naive")
