"""A causal language model whose forward, when it is asked to, ends in numbers a token instead of logits.

The work is done inside the forward: outside it accelerate has made float32 of what a half-precision model returns, and DDP has looked for
the parameters that an output depends on.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from grpo_kernels import GRPOLossOutput, LogprobsOutput, fused_grpo_loss, token_logprobs_and_entropy

__all__ = ["Logits", "Scored", "score_in_forward"]


class Logits:
    """Log-probs and loss from a model's logits (B, T + 1, V), which belong to nobody else: their gradient takes their place in memory."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logprobs(self, token_ids: Tensor, mask: Tensor, temperature: float) -> LogprobsOutput:
        return token_logprobs_and_entropy(self._logits, token_ids, mask=mask, temperature=temperature, inplace_backward=True)

    def loss(self, token_ids: Tensor, advantages: Tensor, temperature: float, **options: Any) -> GRPOLossOutput:
        one_pass = options["importance_sampling_level"] == "token" and options["loss_type"] != "vespo"
        return fused_grpo_loss(self._logits, token_ids, advantages, temperature=temperature, one_pass=one_pass, inplace=True, **options)


class Scored(NamedTuple):
    result: Any  # what the function returned
    aux_loss: Tensor | None  # the load-balancing loss of a mixture of experts, where it was asked for


def score_in_forward(model: Any) -> None:
    """Let model(..., grpo_tokens=T, grpo_score=f) return Scored(f(Logits of what predicts the last T tokens), aux_loss).

    Without these its forward is the one that it was.
    """
    original = model.forward
    plain = type(model).forward
    keeps = "logits_to_keep" in inspect.signature(plain).parameters

    @functools.wraps(plain)  # generate() and PEFT read the signature
    def forward(self: Any, *args: Any, grpo_tokens: int = 0, grpo_score: Callable[[Logits], Any] | None = None, **kwargs: Any) -> Any:
        if grpo_score is None:
            return original(*args, **kwargs)
        if keeps:
            kwargs["logits_to_keep"] = grpo_tokens + 1
        outputs = original(*args, **kwargs)
        return Scored(grpo_score(Logits(outputs.logits[:, -grpo_tokens - 1 :])), getattr(outputs, "aux_loss", None))

    model.forward = types.MethodType(forward, model)
