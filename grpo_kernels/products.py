"""The products between hidden states and a head, for a chunk of rows at a time, in memory that every chunk uses again.

z = h W^T + b, and from dz: dh = dz W, dW += dz^T h, db += sum dz. Sums over chunks are float32, whatever the products are: on a GPU the
product is added to them before it is rounded; on a CPU, where torch has no such product, each chunk's product is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Head", "HeadOptions", "empty_dweight", "stored_dweight"]

BLOCK_BYTES = 1 << 20  # of a product that is added to another tensor: it stays in the cache between the two
PART_BYTES = 64 << 20  # of a float32 dW: parts are given back one by one while the rounded dW fills up; smaller ones malloc would keep


class HeadOptions(NamedTuple):
    """What a head does beside its weight; arguments of the operators in this order."""

    logit_scale: float
    logit_softcap: float | None  # z = softcap tanh(scale h W^T / softcap)
    chunk_size: int  # rows
    logits_dtype: torch.dtype
    product_dtype: torch.dtype  # what the products read: weight, hidden states and the gradient of the logits

    def chunks(self, token_ids: Tensor) -> int:
        """How many there are of these tokens, at most."""
        return -(-token_ids.numel() // self.chunk_size)


class Head:
    """A head's weight (V, D) and bias (V,), with a buffer for the logits of at most `rows` rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, options: HeadOptions, rows: int) -> None:
        self.options = options
        self.weight = weight.to(options.product_dtype)
        self.bias = None if bias is None else bias.to(options.product_dtype)
        self._logits = weight.new_empty((rows, len(weight)), dtype=options.logits_dtype)
        self._uncapped = None if options.logit_softcap is None else torch.empty_like(self._logits)

    def temperature(self, temperature: Tensor) -> Tensor:
        """What divides the logits: a scale alone is as good there, and costs no sweep."""
        return temperature / self.options.logit_scale if self._uncapped is None else temperature

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, V) logits of hidden states (n, D), in the buffer."""
        logits = self._logits[: len(hidden)]
        if self._uncapped is None:
            return _product(hidden, self.weight.t(), logits, self.bias)
        uncapped = _product(hidden, self.weight.t(), self._uncapped[: len(hidden)], self.bias)
        for rows in _blocks(len(logits), 4 * logits.shape[1], logits.device):
            logits[rows] = self._tanh(uncapped[rows]).mul_(self.options.logit_softcap)  # type: ignore[arg-type]
        return logits

    def uncap_(self, dlogits: Tensor) -> None:
        """dz of the logits as they came out of the product, over that of the capped ones: times scale (1 - tanh^2), from those logits."""
        if self._uncapped is None:
            return
        for rows in _blocks(len(dlogits), 4 * dlogits.shape[1], dlogits.device):
            slope = self._tanh(self._uncapped[: len(dlogits)][rows]).square_().neg_().add_(1).mul_(self.options.logit_scale)
            dlogits[rows] = slope.mul_(dlogits[rows])

    def _tanh(self, uncapped: Tensor) -> Tensor:
        wide = uncapped.to(torch.promote_types(uncapped.dtype, torch.float32), copy=True)
        return wide.mul_(self.options.logit_scale / self.options.logit_softcap).tanh_()  # type: ignore[operator]

    def dhidden(self, dlogits: Tensor, out: Tensor | None) -> Tensor:
        """dz W, (n, D)."""
        return torch.mm(dlogits, self.weight) if out is None or out.dtype != dlogits.dtype else torch.mm(dlogits, self.weight, out=out)


def empty_dweight(weight: Tensor, product_dtype: torch.dtype, chunks: int) -> list[Tensor]:
    """Memory for dW (V, D), in parts of consecutive rows of it: float32, but where so few chunks add up that none is needed.

    One chunk's product is rounded once anyway; of two on a CPU, the sum is rounded where it would be in the end.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    few = product_dtype == weight.dtype and chunks <= (2 if weight.device.type == "cpu" else 1)
    if wide == weight.dtype or few:
        return [torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)]
    in_parts = weight.device.type == "cpu" and not torch.compiler.is_compiling()
    size = max(1, PART_BYTES // (4 * weight.shape[1])) if in_parts else len(weight)
    return [weight.new_empty((min(size, len(weight) - start), weight.shape[1]), dtype=wide) for start in range(0, len(weight), size)]


def stored_dweight(parts: list[Tensor], weight_dtype: torch.dtype) -> Tensor:
    """dW as one tensor in its weight's dtype; takes the parts away while it fills up."""
    if len(parts) == 1:
        return parts[0].to(weight_dtype)
    dweight = parts[0].new_empty((sum(map(len, parts)), parts[0].shape[1]), dtype=weight_dtype)
    start = 0
    while parts:
        part = parts.pop(0)
        dweight[start : start + len(part)] = part
        start += len(part)
    return dweight


def add_dweight(parts: list[Tensor], dlogits: Tensor, hidden: Tensor, first: bool) -> None:
    """dW += dz^T h; of the first chunk, dW = dz^T h."""
    start = 0
    for part in parts:
        _add_product(part, dlogits[:, start : start + len(part)].t(), hidden, first)
        start += len(part)


def _add_product(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if out.dtype == a.dtype and first:
        torch.mm(a, b, out=out)
    elif out.dtype == a.dtype and out.dtype in (torch.float32, torch.float64):
        out.addmm_(a, b)
    elif _widens(a, out.dtype) and first:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif _widens(a, out.dtype):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        for rows in _blocks(len(out), b.shape[1] * b.element_size(), out.device):
            product = torch.mm(a[rows], b)
            out[rows] = product if first else product.add_(out[rows]) if out.dtype == product.dtype else out[rows].add_(product)


def _product(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    """out = a b + bias, rounded once, to the dtype of out."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    if _widens(a, out.dtype):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
        return out if bias is None else out.add_(bias)
    wide = a.float()
    for columns in _blocks(b.shape[1], 4 * b.shape[0], b.device):
        product = torch.mm(wide, b[:, columns].float())
        out[:, columns] = product if bias is None else product.add_(bias[columns])
    return out


def _widens(a: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch has the product of halves in float32: on an NVIDIA GPU, since 2.8."""
    half = a.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32
    return half and a.is_cuda and not torch.version.hip and hasattr(torch.ops.aten.mm, "dtype_out")


def _blocks(count: int, row_bytes: int, device: torch.device) -> list[slice]:
    """Slices of rows that are a block of BLOCK_BYTES together; on a GPU, which would wait for launches, of 64."""
    size = max(1, BLOCK_BYTES * (1 if device.type == "cpu" else 64) // row_bytes)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
