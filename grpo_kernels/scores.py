"""Entropy now, log-probs when their tokens are named: one sweep over the logits, and one gradient for both.

Trainers exist (verl) that ask for the two in two calls, the entropy first: each would read the logits once, and in the backward read them
once more and write a gradient of their size. Here the sweep leaves the two row statistics that a log-prob needs (8 bytes a token), and both
outputs belong to one node of the graph, which learns its tokens before the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.checks import check_logits, per_token, stats_dtype
from grpo_kernels.rows import Sequences, as_rows, check_inplace, rows

__all__ = ["RowScores"]


class RowScores:
    """One sweep over logits (B, T, V) or (N, V): the entropy of each row, and the log-probs of tokens that are named later.

    Both are differentiable, in one backward. Neither the logits nor what was given out is held. Log-probs are made of the saved float32
    statistics: of those of `token_logprobs` the last bit may differ.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0]])
    >>> scores = RowScores(logits)
    >>> scores.entropy(), scores.logps(logits, torch.tensor([0]))
    (tensor([0.6656]), tensor([-0.2395]))
    """

    def __init__(self, logits: Tensor, *, inplace_backward: bool = False, backend: str = "") -> None:
        """Arguments and errors as `token_logprobs`."""
        self._token_ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        check_logits(logits, self._token_ids, "logits")
        inplace = check_inplace("inplace_backward", logits, inplace_backward)
        outputs = _RowScores.apply(logits, self._token_ids, inplace, backend)
        self._entropy: Tensor | None
        self._logps: Tensor | None
        self._entropy, self._logps, self._row_max, self._log_sum = outputs

    def entropy(self) -> Tensor:
        """(B, T) or (N,), in nats. Once."""
        entropy, self._entropy = self._entropy, None
        if entropy is None:
            raise RuntimeError("entropy: it was given out already")
        return entropy

    def logps(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """(B, T) or (N,), of the logits that the sweep read. Once: other tokens would change the gradient of the first ones.

        Raises:
            ValueError, TypeError: shape, dtype or device of token_ids.
            IndexError: an id outside [0, V), on the CPU (on a GPU that token's result is NaN).
        """
        check_logits(logits, token_ids, "token_ids")
        sequences = Sequences(self._token_ids.shape, len(self._token_ids))
        ids, vocab = per_token("token_ids", token_ids, sequences, logits, torch.int64), logits.shape[-1]
        ops.check_values(vocab, ids, None, torch.ones_like(self._row_max))
        given, self._logps = self._logps, None
        if given is None:
            raise RuntimeError("token_ids: these rows have their tokens already")
        with torch.no_grad():  # what was there, the log-prob of token 0, nobody has seen
            chosen = logits.gather(-1, ids.clamp(0, vocab - 1)[..., None])[..., 0]
            values = chosen.double() - self._row_max.double() - self._log_sum.double()
            given.copy_(torch.where((ids >= 0) & (ids < vocab), values, torch.nan))
            self._token_ids.copy_(ids)
        return given


class _RowScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids, inplace, backend):  # type: ignore[no-untyped-def]
        temperature = torch.ones(token_ids.shape, dtype=stats_dtype(logits), device=logits.device)
        logps, row_max, log_sum, entropy = (torch.empty_like(temperature) for _ in range(4))
        ops.logprobs_forward(backend, *as_rows(logits, token_ids, None, temperature, logps, row_max, log_sum, entropy))
        ctx.save_for_backward(logits, temperature, row_max, log_sum, entropy)
        ctx.token_ids = token_ids  # not saved for backward, which would not let them be filled in
        ctx.inplace, ctx.backend = inplace, backend
        ctx.mark_non_differentiable(row_max, log_sum)
        ctx.set_materialize_grads(False)
        return entropy, logps, row_max, log_sum

    @staticmethod
    def backward(ctx, dentropy, dlogps, *_):  # type: ignore[no-untyped-def]
        if dlogps is None and dentropy is None:
            return None, None, None, None
        saved, *stats = ctx.saved_tensors
        logits = saved.detach()
        dlogps = torch.zeros_like(stats[0]) if dlogps is None else dlogps.contiguous()
        inputs = as_rows(logits, ctx.token_ids, None, *stats, dlogps, None if dentropy is None else dentropy.contiguous())
        if ctx.inplace:
            dlogits = logits
            ops.logprobs_backward_(ctx.backend, *inputs)
        else:
            dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
            ops.logprobs_backward(ctx.backend, *inputs, rows(dlogits, ctx.token_ids))
        return ops.once(dlogits, saved, dlogps, dentropy), None, None, None
