"""Who is measured: each implementation as its users would write it, under a name that stays.

Every one gives the log-probs of the chosen tokens from logits (forward), and the GRPO loss (forward + backward). All but grpo_kernels put
the same textbook loss on top of their log-probs.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import grpo_kernels
from benchmarks.inputs import BETA, EPSILON, Inputs, textbook_loss


class Missing(Exception):
    """The reason why an implementation cannot run here."""


@dataclass(frozen=True)
class Implementation:
    """`logps` and `loss` take the logits apart from the inputs.

    overwrites: the logits are their gradient afterwards. spare: it takes (B, T + 1, V), as a model returns them, and nothing else.
    rounds_logps: log-probs come in the logits' dtype. only: the one dtype it makes sense for. opaque: runs no operators that could be
    counted. needs: raises Missing where it cannot run.
    """

    name: str
    logps: Callable[[Tensor, Inputs], Tensor] | None
    loss: Callable[[Tensor, Inputs], Tensor]
    overwrites: bool = False
    spare: bool = False
    rounds_logps: bool = False
    only: str | None = None
    opaque: bool = False
    needs: Callable[[], None] = lambda: None


def peer(name: str, logps: Callable[[Tensor, Tensor], Tensor], **facts: Any) -> Implementation:
    return Implementation(
        name,
        lambda logits, inputs: logps(logits, inputs.completion_ids),
        lambda logits, inputs: textbook_loss(logps(logits, inputs.completion_ids), inputs),
        **facts,
    )


# -- plain PyTorch


def naive(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def naive_float(logits: Tensor, ids: Tensor) -> Tensor:
    return naive(logits.float(), ids)


# -- TRL's function: its own where trl is installed, else the same steps


def selective_log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    return _selective_log_softmax()[0](logits, ids)


@functools.cache
def _selective_log_softmax() -> tuple[Callable[[Tensor, Tensor], Tensor], str]:
    """The function and where it is from."""
    if importlib.util.find_spec("trl"):
        try:
            import trl
            from trl.trainer import utils

            return utils.selective_log_softmax, f"trl {trl.__version__}"
        except Exception as error:  # it does not import here, or has moved the function
            return published_steps, f"its published steps (trl: {type(error).__name__}: {error})"
    return published_steps, "its published steps (trl is not installed)"


def published_steps(logits: Tensor, ids: Tensor) -> Tensor:
    """float32: chosen logit minus logsumexp, a sequence at a time. Half precision: log_softmax and gather, a sequence at a time."""
    if logits.dtype == torch.float32:
        lse = torch.stack([sequence.logsumexp(-1) for sequence in logits])
        return logits.gather(-1, ids[..., None]).squeeze(-1) - lse
    return torch.stack([naive(sequence, chosen) for sequence, chosen in zip(logits, ids)])


# -- torch.compile in the two forms that need no second copy of the logits; a gather inside is 1.7 times slower and would flatter us


def where(logits: Tensor, ids: Tensor) -> Tensor:
    z = logits.float()
    chosen = torch.where(torch.arange(z.shape[-1], device=z.device) == ids[..., None], z, 0.0).sum(-1)
    return chosen - z.logsumexp(-1)


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float().flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)


@functools.cache
def _compiler_complaint() -> str:
    """What torch.compile says to the smallest function; "" where it works."""
    try:
        torch.compile(lambda x: x.exp() + 1, dynamic=False)(torch.zeros(4))
        return ""
    except Exception as error:
        return f"torch.compile: {type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _needs_compiler() -> None:
    if reason := _compiler_complaint():
        raise Missing(reason)


def _compiled(name: str, logps: Callable[[Tensor, Tensor], Tensor]) -> Implementation:
    """The whole computation, loss included, compiled for static shapes: the fastest that torch.compile offers."""
    eager = peer(name, logps)
    # When first called, since it imports for seconds. fullgraph: an error rather than a quiet return to eager.
    compiled = functools.cache(functools.partial(torch.compile, dynamic=False, fullgraph=True))
    return Implementation(
        name,
        lambda logits, inputs: compiled(eager.logps)(logits, inputs),
        lambda logits, inputs: compiled(eager.loss)(logits, inputs),
        opaque=True,
        needs=_needs_compiler,
    )


# -- grpo_kernels


def _needs_backend(name: str) -> Callable[[], None]:
    def needs() -> None:
        if (reason := grpo_kernels.available_backends()[name]) != "available":
            raise Missing(f"backend {name!r}: {reason}")

    return needs


def ours(name: str, backend: str, **mode: bool) -> Implementation:
    def logps(logits: Tensor, inputs: Inputs) -> Tensor:
        return grpo_kernels.token_logprobs(logits, inputs.completion_ids, mask=inputs.completion_mask, backend=backend)

    def loss(logits: Tensor, inputs: Inputs) -> Tensor:
        return grpo_kernels.fused_grpo_loss(
            logits, inputs.completion_ids, inputs.advantages, old_logps=inputs.old_logps, ref_logps=inputs.ref_logps,
            completion_mask=inputs.completion_mask, importance_sampling_level=inputs.level, epsilon=EPSILON, beta=BETA, backend=backend,
            **mode,
        ).loss  # fmt: skip

    overwrites = mode.get("inplace", False)
    return Implementation(name, None if mode else logps, loss, overwrites=overwrites, needs=_needs_backend(backend))


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        peer("naive", naive, rounds_logps=True),
        peer("naive_float", naive_float, only="bfloat16"),
        peer("trl", selective_log_softmax, rounds_logps=True),
        _compiled("compile_where", where),
        _compiled("compile_cross_entropy", cross_entropy),
        ours("ours", "cpu"),
        ours("ours_one_pass", "cpu", one_pass=True),
        ours("ours_inplace", "cpu", one_pass=True, inplace=True),
    )
}
FORWARD = [name for name, implementation in IMPLEMENTATIONS.items() if implementation.logps]
FORWARD_BACKWARD = list(IMPLEMENTATIONS)


def trl_source() -> str:
    """Which text of TRL's function was measured."""
    return _selective_log_softmax()[1]
