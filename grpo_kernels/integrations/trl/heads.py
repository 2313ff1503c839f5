"""What the head of the model computes for the trainer inside the model's forward, where half precision is still half precision.

From hidden states these are `fused_linear_grpo_loss` and `fused_linear_logprobs`; the two here are the same from logits that are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import (
    GRPOHead,
    GRPOLossOutput,
    LogprobsOutput,
    fused_grpo_loss,
    fused_linear_grpo_loss,
    fused_linear_logprobs,
    token_logprobs_and_entropy,
)

__all__ = ["SOURCES", "Float32Head", "HeadFunctions"]


class HeadFunctions(NamedTuple):
    loss: Callable[..., GRPOLossOutput]
    logprobs: Callable[..., LogprobsOutput]


def _logits(hidden_states: Tensor, lm_head_weight: Tensor, bias: Tensor | None, logit_scale: float, logit_softcap: float | None) -> Tensor:
    """They belong to nobody else, so their gradient may take their place in memory."""
    logits = torch.nn.functional.linear(hidden_states, lm_head_weight, bias)
    if logit_scale != 1:
        logits = logits * logit_scale
    return logits if logit_softcap is None else torch.tanh(logits / logit_softcap) * logit_softcap


def _loss_from_logits(
    hidden_states: Tensor, lm_head_weight: Tensor, completion_ids: Tensor, advantages: Tensor, *, bias: Tensor | None, logit_scale: float,
    logit_softcap: float | None, **options: Any,
) -> GRPOLossOutput:  # fmt: skip
    logits = _logits(hidden_states, lm_head_weight, bias, logit_scale, logit_softcap)
    one_pass = options["importance_sampling_level"] == "token" and options["loss_type"] != "vespo"
    return fused_grpo_loss(logits, completion_ids, advantages, one_pass=one_pass, inplace=True, **options)


def _logprobs_from_logits(
    hidden_states: Tensor, lm_head_weight: Tensor, token_ids: Tensor, *, bias: Tensor | None, logit_scale: float,
    logit_softcap: float | None, **options: Any,
) -> LogprobsOutput:  # fmt: skip
    logits = _logits(hidden_states, lm_head_weight, bias, logit_scale, logit_softcap)
    return token_logprobs_and_entropy(logits, token_ids, inplace_backward=True, **options)


SOURCES = {
    "hidden_states": HeadFunctions(fused_linear_grpo_loss, fused_linear_logprobs),
    "logits": HeadFunctions(_loss_from_logits, _logprobs_from_logits),
}


class Float32Head(GRPOHead):
    """A float32 head of a model in half precision (cast_lm_head_to_fp32): autocast stays outside."""

    def forward(self, hidden_states: Tensor, fn: Callable[..., Any] | None = None) -> Any:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return super().forward(hidden_states.float(), fn)
