"""A batch as the rows that kernels see, and the conditions under which a gradient may be written over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_rows", "check_inplace", "rows", "zero_spare"]


def rows(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The (B, T, V) view of the positions that `token_ids` scores: without the spare last position, (N, V) as one sequence."""
    return logits[:, : token_ids.shape[1]] if logits.dim() == 3 else logits[None]


def zero_spare(dlogits: Tensor, token_ids: Tensor) -> None:
    """Gradient 0 for the last position of (B, T + 1, V), which predicts nothing."""
    if dlogits.dim() == 3 and dlogits.shape[1] > token_ids.shape[1]:
        dlogits[:, token_ids.shape[1] :].zero_()


def as_rows(logits: Tensor, token_ids: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Arguments of an operator: the rows of the logits, then ids and everything per token as (B, T)."""
    return [rows(logits, token_ids), *(x[None] if x is not None and x.dim() == 1 else x for x in (token_ids, *tensors))]


def check_inplace(name: str, logits: Tensor, inplace: bool) -> bool:
    """Whether the gradient is to be written over the logits; errors where that could not be right. Without grad nothing is written."""
    if not (inplace and logits.requires_grad and torch.is_grad_enabled()):
        return False
    whole = logits if logits._base is None else logits._base
    if whole.is_leaf and whole.requires_grad:
        view = "" if whole is logits else "a view of "
        raise RuntimeError(f"{name}: the logits are {view}a leaf that requires grad, whose values would be lost; pass {name}=False")
    dims = list(zip(logits.stride(), logits.shape))
    for i, (stride, size) in enumerate(dims):
        # what the dimensions inside this one reach; a sum, since torch.compile cannot sort lengths that it does not know
        extent = sum((n - 1) * inner for j, (inner, n) in enumerate(dims) if j != i and inner <= stride)
        if size > 1 and stride <= extent:
            raise ValueError(
                f"{name}: the logits overlap themselves in memory (shape {tuple(logits.shape)}, strides {logits.stride()}); pass "
                f"{name}=False or logits.contiguous()"
            )
    return True
