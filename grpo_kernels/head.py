"""The lm head as a module that computes the loss, so that logits are never made and the weight never leaves its owner.

A sharded weight is whole only while its module's forward runs. Gathered anywhere else it is a copy whose gradient stays on this rank: the
other ranks' part of it is lost without an error (on 2 ranks, the head's gradient was 48 % off). So the loss runs inside this forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["GRPOHead", "HeadCall", "LowRank"]


class LowRank(NamedTuple):
    """scale * up(down(dropout(hidden states))), added to the logits: one LoRA adapter of the head."""

    down: nn.Module
    up: nn.Module
    dropout: nn.Module
    scale: float


class GRPOHead(nn.Linear):
    """The nn.Linear that makes logits, which may be told what to make of them instead.

    `head(hidden_states)` is the linear map and nothing else. `head(hidden_states, fn)` returns
    `fn(hidden_states, weight, bias=..., logit_scale=..., logit_softcap=...)`, where fn is `fused_linear_grpo_loss` or
    `fused_linear_logprobs` with its other arguments bound by `functools.partial`. Where fn binds ids (B, T) by name, the last T + 1
    positions of longer hidden states are taken, as `logits_to_keep=T + 1` would; any other function is given all of them.

    Parameters and their names are nn.Linear's, so a state_dict, tied embeddings and whatever replaces linear layers see no difference.

    Args:
        in_features, out_features, bias, device, dtype: as nn.Linear; out_features is V. A tied head takes the embedding's Parameter as its
            `weight` afterwards.
        logit_scale, logit_softcap: what the model does to logits after this map, as the two functions take it.

    Raises (forward):
        TypeError: the weight is sharded (a DTensor): this forward was not called through the sharded module; or fn binds one of the
            arguments that the head gives it.

    >>> import torch
    >>> from functools import partial
    >>> from grpo_kernels import GRPOHead, fused_linear_grpo_loss
    >>> head = GRPOHead(4, 5, bias=False)
    >>> loss = partial(fused_linear_grpo_loss, completion_ids=torch.tensor([[1, 2, 3]]), advantages=torch.ones(1))
    >>> out = head(torch.zeros(1, 6, 4), loss)
    >>> out.logps
    tensor([[-1.6094, -1.6094, -1.6094]])
    """

    # on the class, so that an nn.Linear of a model becomes a head by its class alone
    logit_scale: float | None = None  # None: not measured yet
    logit_softcap: float | None = None
    next_call: HeadCall | None = None  # what the next forward is to do, where a model's own forward calls it with hidden states alone

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.logit_scale, self.logit_softcap = logit_scale, logit_softcap

    def forward(self, hidden_states: Tensor, fn: Callable[..., Any] | None = None) -> Any:
        if fn is not None:
            return self._compute(hidden_states, fn, ())
        call, self.next_call = self.next_call, None
        if call is None:
            return super().forward(hidden_states)
        if call.fn is None:
            call.hidden_states = hidden_states
            return call.stand_in
        return call.carry(self._compute(hidden_states, call.fn, call.low_rank), hidden_states)

    def _compute(self, hidden: Tensor, fn: Callable[..., Any], low_rank: Sequence[LowRank]) -> Any:
        bound = getattr(fn, "keywords", {})
        given = {"lm_head_weight", "bias", "logit_scale", "logit_softcap"} & bound.keys()
        if given:
            raise TypeError(f"{', '.join(sorted(given))}: given by the head; do not bind it in the function")
        ids = bound.get("completion_ids", bound.get("token_ids"))
        if isinstance(ids, Tensor) and ids.dim() == 2 and hidden.dim() == 3 and hidden.shape[1] > ids.shape[1] + 1:
            hidden = hidden[:, -(ids.shape[1] + 1) :]
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if low_rank:
            hidden, weight, bias = _widened(hidden, weight, bias, low_rank)
        return fn(hidden, weight, bias=bias, logit_scale=self.logit_scale, logit_softcap=self.logit_softcap)


def _widened(hidden: Tensor, weight: Tensor, bias: Tensor | None, low_rank: Sequence[LowRank]) -> tuple[Tensor, Tensor, Tensor | None]:
    """h W^T + s (h A^T) B^T as one product, [h, s h A^T] [W, B]^T: exact, where W + s B A rounded to bfloat16 loses small adapters.

    It costs a copy of the weight and, in training, a gradient of its size, also where only the adapter learns.
    """
    hiddens, weights = [hidden], [weight]
    for adapter in low_rank:
        up: Any = adapter.up
        narrow = adapter.down(adapter.dropout(hidden.to(_dtype_of(adapter.down)))) * adapter.scale
        hiddens.append(narrow.to(hidden.dtype))
        weights.append(up.weight.to(weight.dtype))
        if up.bias is not None:
            added = (up.bias * adapter.scale).to(weight.dtype)
            bias = added if bias is None else bias + added
    return torch.cat(hiddens, -1), torch.cat(weights, -1), bias


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


class HeadCall:
    """One call of a head from inside a model's forward, which passes hidden states only and does as it likes with what comes back.

    What is differentiable leaves the head as the one tensor that its forward returns, since that is where wrappers (FSDP2) hang their
    hooks: they gather the weight again before its backward and reduce its gradient after.

    fn None: look at the hidden states and return `stand_in`.
    """

    def __init__(self, fn: Callable[..., Any] | None, low_rank: Sequence[LowRank] = (), stand_in: Tensor | None = None) -> None:
        self.fn, self.low_rank, self.stand_in = fn, low_rank, stand_in
        self.hidden_states: Tensor | None = None
        self.carrier: Tensor | None = None
        self._fields: dict[str, Any] = {}

    def carry(self, result: Any, like: Tensor) -> Tensor:
        if not hasattr(result, "_asdict"):
            raise TypeError(f"lm_head_fn: expected a function that returns a NamedTuple of tensors, got {type(result).__name__}")
        self._fields = result._asdict()
        leaving = [x.reshape(1, 1, -1) for x in self._fields.values() if _differentiable(x)]
        # (1, 1, n), so that a model may slice positions and map values as it does with logits; never a view, which an in-place operation
        # of its would cut off the hooks
        self.carrier = torch.cat(leaving, -1) if leaving else like.new_empty(1, 1, 0)
        return self.carrier

    def fields(self) -> dict[str, Any]:
        """What the function returned, by name; the differentiable ones as parts of the carrier."""
        assert self.carrier is not None
        sizes = [x.numel() if _differentiable(x) else 0 for x in self._fields.values()]
        parts = self.carrier.reshape(-1).split([*sizes, self.carrier.numel() - sum(sizes)])
        return {name: part.view(x.shape).to(x.dtype) if _differentiable(x) else x for (name, x), part in zip(self._fields.items(), parts)}


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
