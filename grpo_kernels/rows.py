"""A batch as the rows that kernels see: padded (B, T) or packed (N,); and when a gradient may be written over the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sequences", "as_rows", "check_inplace", "rows", "zero_spare"]


@dataclass(frozen=True)
class Sequences:
    """Which tokens belong together: each row of (B, T), or for packed rows the index (N,) of each one's sequence, `count` for none.

    Rows (N,) without an index belong to sequences that nobody named.
    """

    shape: torch.Size
    count: int
    index: Tensor | None = None

    @property
    def known(self) -> bool:
        return self.index is not None or len(self.shape) == 2

    def spread(self, values: Tensor) -> Tensor:
        """One value a sequence (S,) at each of its tokens; 0 at packed rows of no sequence."""
        if self.index is None:
            return values[:, None].expand(self.shape)
        return torch.cat([values, values.new_zeros(1)])[self.index]

    def sums(self, x: Tensor) -> Tensor:
        """(S,) sums over the tokens of each sequence, in one fixed order."""
        if self.index is None:
            return x.sum(-1)
        return x.new_zeros(self.count + 1).index_add(0, self.index, x)[:-1]


def rows(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The (B, T, V) view of the positions that `token_ids` scores: without the spare last position, (N, V) as one sequence."""
    if token_ids.dim() == 1:
        return logits if logits.dim() == 3 else logits[None]
    return logits[:, : token_ids.shape[1]]


def zero_spare(dlogits: Tensor, token_ids: Tensor) -> None:
    """Gradient 0 for the last position of (B, T + 1, V), which predicts nothing."""
    if token_ids.dim() == 2 and dlogits.shape[1] > token_ids.shape[1]:
        dlogits[:, token_ids.shape[1] :].zero_()


def as_rows(logits: Tensor, token_ids: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    """Arguments of an operator: the rows of the logits, then ids and everything per token as (B, T)."""
    return [rows(logits, token_ids), *(x[None] if x is not None and x.dim() == 1 else x for x in (token_ids, *tensors))]


def check_inplace(name: str, logits: Tensor, inplace: bool) -> bool:
    """Whether the gradient is to be written over the logits; errors where that could not be right. Without grad nothing is written."""
    if not (inplace and logits.requires_grad and torch.is_grad_enabled()):
        return False
    # A leaf may itself be a view, of a tensor that requires no grad.
    base = logits._base
    view = "a view of " if base is not None and base.is_leaf and base.requires_grad else ""
    if view or logits.is_leaf:
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
