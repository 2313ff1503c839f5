"""From hidden states to log-probs, loss and gradients, a chunk of rows at a time, so that logits never are in memory together.

The operators choose rows by value: those that are masked leave before the first product, those whose gradient comes out 0 before the
others. On a GPU each choice waits for the device, once a call and once a chunk; while a CUDA graph is captured none is made, and the
products run over all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import backends, ops
from grpo_kernels.products import Head, HeadOptions, add_dweight

__all__ = ["Sweep", "captured", "chosen_rows", "linear_logprobs", "linear_logprobs_backward", "linear_loss_and_grad", "put", "take"]

Rows = Tensor | slice  # some of the tokens, by their number in (B, T) or (N,)


def take(x: Tensor | None, rows: Rows) -> Any:
    """x (B, T) or (N,) at these tokens as the waist takes it, (1, n)."""
    return None if x is None else x.view(-1)[rows][None]


def put(out: Tensor, rows: Rows, values: Tensor) -> None:
    out.view(-1)[rows] = values.view(-1)


def chosen_rows(needed: Tensor | None) -> Tensor | None:
    """The numbers of the tokens that are needed; None: all, or the device cannot be asked."""
    if needed is None or captured(needed.device):
        return None
    rows = needed.view(-1).nonzero()[:, 0]
    return None if len(rows) == needed.numel() else rows


def captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Sweep:
    """One way through the tokens: logits of a chunk, what the caller makes of them, and the products back.

    dhidden (as hidden), dweight (parts of (V, D)), dbias (V,): memory for the gradients that are wanted.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, active: Tensor | None, options: HeadOptions,
        dhidden: Tensor | None = None, dweight: list[Tensor] | None = None, dbias: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._hidden, self._dhidden, self._dweight, self._dbias = hidden.flatten(0, -2), dhidden, dweight or [], dbias
        self._spare = (token_ids.shape[1], hidden.shape[1]) if token_ids.dim() == 2 and hidden.shape[1] > token_ids.shape[1] else None
        self._hidden_needed = active if active is not None and captured(hidden.device) else None
        self._head, self._options = (weight, bias), options
        self._count = token_ids.numel()
        self._wanted = dhidden is not None or bool(dweight) or dbias is not None

    def pieces(self, chosen: Tensor | None) -> list[Rows]:
        """Chunks of even size: of all tokens, or of the chosen ones."""
        count = self._count if chosen is None else len(chosen)
        size = -(-count // max(1, -(-count // self._options.chunk_size)))
        pieces = [slice(start, min(start + size, count)) for start in range(0, count, max(1, size))]
        return list(pieces) if chosen is None else [chosen[piece] for piece in pieces]

    def run(self, pieces: list[Rows], visit: Callable[[Tensor, Rows, Head], Tensor | None]) -> None:
        """`visit` gets the logits (1, n, V) of each piece. Where gradients are wanted it writes dlogits over them, and says which rows
        have one (n,); None: all."""
        head = Head(*self._head, self._options, max((_length(rows) for rows in pieces), default=0))
        if self._dhidden is not None:
            self._dhidden.zero_()
        if self._dbias is not None:
            self._dbias.zero_()
        first = True
        for rows in pieces:
            places = self._places(rows)
            hidden = self._hidden[places].to(self._options.product_dtype)
            if self._hidden_needed is not None:  # what stands at masked rows must not come back as 0 times NaN
                hidden = torch.where(take(self._hidden_needed, rows)[0, :, None] != 0, hidden, 0)
            logits = head.logits(hidden)
            live = visit(logits[None], rows, head)
            if not self._wanted:
                continue
            head.uncap_(logits)
            dlogits, kept = _squeezed(logits, live)
            if len(dlogits) == 0:
                continue
            dlogits = dlogits.to(self._options.product_dtype)
            self._write_dhidden(head, dlogits, places, kept)
            if self._dweight:
                add_dweight(self._dweight, dlogits, hidden if kept is None else hidden[kept], first)
                first = False
            if self._dbias is not None:
                self._dbias += dlogits.sum(0, dtype=self._dbias.dtype)
        if first:
            for part in self._dweight:
                part.zero_()

    def _places(self, rows: Rows) -> Rows:
        """Where the hidden states of these tokens are among all: the last position of (B, T + 1, D) belongs to no token."""
        if self._spare is None:
            return rows
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self._hidden.device)
        time, positions = self._spare
        return rows // time * positions + rows % time

    def _write_dhidden(self, head: Head, dlogits: Tensor, places: Rows, kept: Tensor | None) -> None:
        if self._dhidden is None:
            return
        dhidden = self._dhidden.view(-1, self._dhidden.shape[-1])
        if isinstance(places, slice) and kept is None and dhidden.dtype == dlogits.dtype:
            torch.mm(dlogits, head.weight, out=dhidden[places])
            return
        if isinstance(places, slice):
            places = torch.arange(places.start, places.stop, device=dhidden.device)
        dhidden[places if kept is None else places[kept]] = torch.mm(dlogits, head.weight).to(dhidden.dtype)


def _length(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _squeezed(logits: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The live rows in front, in place, and which row each was; None: every row where it was.

    Rows from the end fill the places of those that leave, so as few as possible are copied.
    """
    if live is None or captured(logits.device):
        return logits, None
    count = int(live.sum())
    if count == len(logits):
        return logits, None
    kept = torch.arange(len(logits), device=logits.device)
    free, moved = (~live[:count]).nonzero()[:, 0], count + live[count:].nonzero()[:, 0]
    kept[free] = moved
    for to, source in zip(free.split(16), moved.split(16)):  # a copy of a few rows at a time
        logits[to] = logits[source]
    return logits[:count], kept[:count]


def _logprobs(backend: str, *values: Any) -> None:
    hidden, weight, bias, token_ids, active, temperature, *options, logps, entropy = values
    ops.check_values(len(weight), token_ids, active, temperature)
    kernels, chosen, sweep = _start(backend, values[:6], options)

    def visit(logits: Tensor, rows: Rows, head: Head) -> None:
        found, _, _, entropies = _score(kernels, logits, token_ids, None if chosen is not None else active, temperature, rows, head)
        put(logps, rows, found)
        put(entropy, rows, entropies)

    if chosen is not None:
        logps.zero_()
        entropy.zero_()
    sweep.run(sweep.pieces(chosen), visit)


def _logprobs_backward(backend: str, *values: Any) -> None:
    hidden, weight, bias, token_ids, active, temperature, *options, logps, dlogps, dentropy, dhidden, dweight, dbias = values
    needed = (dlogps != 0) | logps.isnan()  # the gradient of a degenerate row is NaN, whatever its coefficients
    needed = needed if dentropy is None else needed | (dentropy != 0)
    needed = needed if active is None else needed & active.bool()
    kernels, chosen, sweep = _start(backend, (*values[:4], needed.to(torch.uint8), temperature), options, dhidden, dweight, dbias)

    def visit(logits: Tensor, rows: Rows, head: Head) -> None:
        # The statistics again, for one more read: those of the forward may be of logits that a product of other rows rounded otherwise.
        mask = None if chosen is not None else active
        _, *stats = _score(kernels, logits, token_ids, mask, temperature, rows, head)
        ids, active_, taus = take(token_ids, rows), take(mask, rows), head.temperature(take(temperature, rows))
        kernels.logprobs_backward(logits, ids, active_, taus, *stats, take(dlogps, rows), take(dentropy, rows), logits)

    sweep.run(sweep.pieces(chosen), visit)


def _loss_and_grad(backend: str, *values: Any) -> None:
    hidden, weight, bias, token_ids, active, temperature, *rest = values
    tokens, params, options, outputs, gradients = rest[:6], rest[6].tolist(), rest[7:12], rest[12:18], rest[18:]
    ops.check_values(len(weight), token_ids, active, temperature)
    kernels, chosen, sweep = _start(backend, values[:6], options, *gradients)
    entropy_weights = tokens[-1]

    def visit(logits: Tensor, rows: Rows, head: Head) -> Tensor:
        ids, mask, *inputs = (take(x, rows) for x in (token_ids, active if chosen is None else None, *tokens))
        found = [torch.empty_like(inputs[0], dtype=x.dtype) for x in outputs]
        kernels.loss_and_grad(logits, ids, mask, head.temperature(take(temperature, rows)), *inputs, params, *found, logits)
        for output, x in zip(outputs, found):
            put(output, rows, x)
        # the same coefficients once more: what says which rows have a gradient
        logps, entropy, *scratch = found
        dlogps = torch.empty_like(logps)
        kernels.objective(logps, None if entropy_weights is None else entropy, *inputs, mask, params, *scratch[:2], dlogps, *scratch[2:])
        live = dlogps[0] != 0
        return live if entropy_weights is None else live | (inputs[-1][0] != 0)

    if chosen is not None:
        for output in outputs:
            output.zero_()
    sweep.run(sweep.pieces(chosen), visit)


def _start(backend: str, values: Any, options: Any, *gradients: Any) -> tuple[Any, Tensor | None, Sweep]:
    hidden, weight, bias, token_ids, active, _ = values
    options = HeadOptions(*options)
    kernels = backends.get(backend, hidden.device, options.logits_dtype)
    return kernels, chosen_rows(active), Sweep(hidden, weight, bias, token_ids, active, options, *gradients)


def _score(
    kernels: Any, logits: Tensor, token_ids: Tensor, active: Tensor | None, temperature: Tensor, rows: Rows, head: Head
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logps, row maximum, log of the sum and entropy (1, n) of a chunk."""
    taus = head.temperature(take(temperature, rows))
    stats = (torch.empty_like(taus), torch.empty_like(taus), torch.empty_like(taus), torch.empty_like(taus))
    kernels.logprobs_forward(logits, take(token_ids, rows), take(active, rows), taus, *stats)
    return stats


def _operator(name: str, arguments: str, function: Callable[..., None]) -> Callable[..., None]:
    def implementation(backend: str, hidden: Tensor, *values: Any) -> None:
        with torch.autocast(hidden.device.type, enabled=False):  # the dtypes of the products were decided above
            function(backend, hidden, *values)

    return ops.define(name, arguments, implementation)


_ROWS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor token_ids, Tensor? active, Tensor temperature"
_OPTIONS = "float logit_scale, float? logit_softcap, int chunk_size, ScalarType logits_dtype, ScalarType product_dtype"
_GRADIENTS = "Tensor(x!)? dhidden, Tensor(y!)[] dweight, Tensor(z!)? dbias"

linear_logprobs = _operator("linear_logprobs", f"{_ROWS}, {_OPTIONS}, Tensor(a!) logps, Tensor(b!) entropy", _logprobs)
linear_logprobs_backward = _operator(
    "linear_logprobs_backward",
    f"{_ROWS}, {_OPTIONS}, Tensor logps, Tensor dlogps, Tensor? dentropy, {_GRADIENTS}",
    _logprobs_backward,
)
linear_loss_and_grad = _operator(
    "linear_loss_and_grad",
    f"{_ROWS}, {ops.TOKENS}, Tensor params, {_OPTIONS}, Tensor(a!) logps, Tensor(b!) entropy, Tensor(c!) loss, Tensor(d!) policy_loss, "
    f"Tensor(e!) kl, Tensor(f!) clipped, {_GRADIENTS}",
    _loss_and_grad,
)
