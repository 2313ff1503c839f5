"""Packed (padding-free) rows, as flash-attn takes them: sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.checks import check_cu_seqlens, mask_rows, per_token, plain_tensor
from grpo_kernels.rows import Sequences

__all__ = ["packed_targets", "sequences_of"]


def sequences_of(name: str, tokens: Tensor, cu_seqlens: Any) -> Sequences:
    """The sequences of (B, T) without cu_seqlens, of packed (N,) or (1, N) with it. Rows from cu_seqlens[-1] on are in none."""
    if cu_seqlens is None:
        if tokens.dim() != 2:
            raise ValueError(f"{name}: expected (B, T), or cu_seqlens beside packed (N,); got {tuple(tokens.shape)} without cu_seqlens")
        return Sequences(tokens.shape, tokens.shape[0])
    check_cu_seqlens(cu_seqlens, tokens)
    if tokens.dim() != 1 and (tokens.dim() != 2 or tokens.shape[0] != 1):
        raise ValueError(f"{name}: expected packed (N,) or (1, N) beside cu_seqlens, got {tuple(tokens.shape)}")
    return Sequences(tokens.flatten().shape, len(cu_seqlens) - 1, ops.sequence_index(cu_seqlens, tokens.numel()))


def packed_targets(input_ids: Tensor, cu_seqlens: Tensor, completion_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What packed logits score: row i predicts token i + 1 of its own sequence.

    Args:
        input_ids: (N,) or (1, N), int64 or int32, prompts and completions as the model read them.
        cu_seqlens: (S + 1,) offsets of the sequences, ascending from 0; rows from cu_seqlens[-1] on are padding.
        completion_mask: (N,) or (1, N), non-zero at the tokens of `input_ids` that the loss is about; None: all.

    Returns:
        (token_ids, mask), both (N,): mask int32, 0 at the last row of each sequence, which predicts nothing of it, where the token that a
        row predicts is no completion, and on padding.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices, offsets that do not ascend from 0 (their values on the CPU).

    >>> import torch
    >>> packed_targets(torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 3, 5]))
    (tensor([6, 7, 7, 9, 9]), tensor([1, 1, 0, 1, 0], dtype=torch.int32))
    """
    plain_tensor("input_ids", input_ids)
    sequences = sequences_of("input_ids", input_ids, cu_seqlens)
    ids = per_token("input_ids", input_ids, sequences, input_ids, torch.int64)
    active = mask_rows("completion_mask", completion_mask, sequences, ids)
    index = sequences.index
    if index is None or active is None or len(ids) == 0:
        return ids, torch.zeros_like(ids, dtype=torch.int32)
    follows = torch.cat([index[1:] == index[:-1], index.new_zeros(1, dtype=torch.bool)])
    following = torch.cat([torch.arange(1, len(ids), device=ids.device), index.new_full((1,), len(ids) - 1)])
    following = torch.where(follows, following, torch.arange(len(ids), device=ids.device))
    return ids[following], (follows & active[following].bool()).to(torch.int32)
