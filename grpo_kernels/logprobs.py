"""Log-probabilities and entropy of chosen tokens straight from logits, differentiable, without a softmax in memory.

One read of the logits forward; backward one read and one write, or, with `inplace_backward`, the gradient in the logits' own storage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.checks import check_backend, check_logits, mask_rows, per_token, stats_dtype, temperatures
from grpo_kernels.rows import Sequences, as_rows, check_inplace, rows, zero_spare

__all__ = ["LogprobsOutput", "score", "token_logprobs", "token_logprobs_and_entropy"]


class LogprobsOutput(NamedTuple):
    """logps and entropy (B, T), float32 (float64 for float64 logits), 0 where masked; both differentiable."""

    logps: Tensor
    entropy: Tensor


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Log-probability of each chosen token: z_y / temperature - logsumexp(z / temperature).

    Args:
        logits: (B, T, V), or (B, T + 1, V) whose last position is ignored and gets gradient 0; or (N, V). float32, bfloat16 or float16
            (float64 on backend "torch"). Any strides over B and T, contiguous over V.
        token_ids: (B, T) or (N,), int64 or int32, in [0, V).
        temperature: > 0; a number, (B,) or (B, T).
        mask: (B, T); a masked token (0) is never read, its result is 0 and its gradient row is 0.
        inplace_backward: the backward writes the gradient into the storage of `logits`. One backward only; a later reader of the logits'
            values raises in its own backward.
        backend: a name of `available_backends()`; None picks the best for the device.

    Returns:
        (B, T) or (N,), float32 (float64 for float64 logits).

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or ranges, before anything runs.
        IndexError: an unmasked id outside [0, V), on the CPU (on a GPU that token's result is NaN).

    >>> import torch
    >>> token_logprobs(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]), temperature=0.5)
    tensor([-0.0360])
    """
    return token_logprobs_and_entropy(
        logits, token_ids, temperature=temperature, mask=mask, inplace_backward=inplace_backward, backend=backend
    ).logps


def token_logprobs_and_entropy(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> LogprobsOutput:
    """`token_logprobs` and the entropy -sum p log p in nats, from the same read of the logits. Arguments and errors are its.

    >>> import torch
    >>> token_logprobs_and_entropy(torch.zeros(1, 4), torch.tensor([0])).entropy
    tensor([1.3863])
    """
    check_logits(logits, token_ids, "token_ids")
    sequences, dtype = Sequences(token_ids.shape, token_ids.shape[0]), stats_dtype(logits)
    active = mask_rows("mask", mask, sequences, logits)
    taus = temperatures(temperature, sequences, logits, dtype)
    ids = per_token("token_ids", token_ids, sequences, logits, torch.int64)
    return score(logits, ids, active, taus, inplace_backward, check_backend(backend))


def score(
    logits: Tensor, token_ids: Tensor, active: Tensor | None, temperature: Tensor, inplace_backward: bool, backend: str
) -> LogprobsOutput:
    """The same from arguments that were checked already."""
    inplace = check_inplace("inplace_backward", logits, inplace_backward)
    return LogprobsOutput(*_TokenLogprobs.apply(logits, token_ids, active, temperature, inplace, backend))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, token_ids, active, temperature, inplace, backend):  # type: ignore[no-untyped-def]
        logps, row_max, log_sum, entropy = (torch.empty_like(temperature) for _ in range(4))
        ops.logprobs_forward(backend, *as_rows(logits, token_ids, active, temperature, logps, row_max, log_sum, entropy))
        ctx.save_for_backward(logits, token_ids, active, temperature, row_max, log_sum, entropy)
        ctx.inplace, ctx.backend = inplace, backend
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    def backward(ctx, dlogps, dentropy):  # type: ignore[no-untyped-def]
        if dlogps is None and dentropy is None:
            return (None,) * 6
        saved, token_ids, *stats = ctx.saved_tensors
        logits = saved.detach()
        dlogps = torch.zeros_like(stats[1]) if dlogps is None else dlogps.contiguous()
        inputs = as_rows(logits, token_ids, *stats, dlogps, None if dentropy is None else dentropy.contiguous())
        if ctx.inplace:
            dlogits = logits
            ops.logprobs_backward_(ctx.backend, *inputs)
        else:
            dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
            ops.logprobs_backward(ctx.backend, *inputs, rows(dlogits, token_ids))
        zero_spare(dlogits, token_ids)
        return ops.once(dlogits, saved, dlogps, dentropy), None, None, None, None, None
