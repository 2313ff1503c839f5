"""Losses of whole sequences (GSPO, VESPO) in three products: a chunk holds whole sequences, so its log-probs suffice for its gradient.

Where a sequence has more tokens than a chunk, or its length cannot be looked at, the loss takes two sweeps instead, and four products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from grpo_kernels import backends
from grpo_kernels.batch import Batch, Inputs
from grpo_kernels.chunked import Rows, Sweep, captured, chosen_rows, put, take
from grpo_kernels.objective import weighted_sum
from grpo_kernels.options import ObjectiveParams, TokenInputs
from grpo_kernels.products import Head, HeadOptions
from grpo_kernels.rows import Sequences
from grpo_kernels.sequence import sequence_objective

__all__ = ["Whole", "whole_sequences"]


class Whole(NamedTuple):
    """What the loss of whole sequences needs, and chunks of tokens that hold them."""

    params: ObjectiveParams
    inputs: Inputs
    sequences: Sequences  # of all tokens (N,), with an index
    chunks: list[Rows]

    def loss_and_grad(
        self, backend: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, active: Tensor | None,
        temperature: Tensor, options: HeadOptions, logps: Tensor, entropy: Tensor, loss: Tensor, policy_loss: Tensor, kl: Tensor,
        clipped: Tensor, *gradients: Any,
    ) -> None:  # fmt: skip
        """As the operator `linear_loss_and_grad`, but loss and policy_loss hold each chunk's sum at one of its tokens."""
        kernels: Any = backends.get(backend, hidden.device, options.logits_dtype)
        outputs = (logps, entropy, loss, policy_loss, kl, clipped)

        def visit(logits: Tensor, rows: Rows, head: Head) -> Tensor:
            ids, taus = take(token_ids, rows), head.temperature(take(temperature, rows))
            stats = [torch.empty_like(taus) for _ in range(4)]
            kernels.logprobs_forward(logits, ids, None, taus, *stats)
            dlogps, dentropy, results = self._objective(stats[0][0], stats[3][0], rows)
            for output, x in zip((kl, clipped, logps, entropy), (*results[2:], stats[0], stats[3])):
                put(output, rows, x)
            for output, x in zip((loss, policy_loss), results):
                output.view(-1)[rows[:1] if isinstance(rows, Tensor) else rows.start] = x
            kernels.logprobs_backward(logits, ids, None, taus, *stats[1:], dlogps[None], dentropy, logits)
            live = (dlogps != 0) | stats[2][0].isnan()
            return live if dentropy is None else live | (dentropy[0] != 0)

        for output in outputs:
            output.zero_()
        sweep = Sweep(hidden, weight, bias, token_ids, active, options, *gradients)
        with torch.autocast(hidden.device.type, enabled=False):
            sweep.run(self.chunks, visit)

    def _objective(self, logps: Tensor, entropy: Tensor, rows: Rows) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """dlogps (n,), dentropy (1, n), and loss, policy_loss, kl and clipped of the chunk."""
        index = self.sequences.index
        assert index is not None
        sequences = Sequences(logps.shape, self.sequences.count, index[rows])
        inputs = TokenInputs(*(None if x is None else x.view(-1)[rows] for x in self.inputs.tokens))  # type: ignore[arg-type]
        # Hooks of the caller (activation checkpointing) must not see this graph: they would run the whole forward again for it.
        own = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)
        with torch.enable_grad(), own:
            leaf = logps.detach().requires_grad_()
            term = sequence_objective(leaf, None, self.params, inputs, self.inputs.folded, sequences)
            results = weighted_sum(term, None if inputs.entropy_weights is None else entropy, None, self.params, inputs)
            (dlogps,) = torch.autograd.grad(results[0], leaf)
        dentropy = None if inputs.entropy_weights is None else -inputs.entropy_weights[None]
        return dlogps, dentropy, tuple(x.detach() for x in results)


def whole_sequences(params: ObjectiveParams, batch: Batch, inputs: Inputs, chunk_size: int) -> Whole | None:
    """Chunks of at most `chunk_size` rows that no sequence crosses; None where one has more rows, or where values cannot be looked at."""
    sequences, hidden = batch.sequences, batch.like
    if torch.compiler.is_compiling() or hidden.is_meta or type(hidden) is FakeTensor or captured(hidden.device):
        return None
    index = sequences.index
    if index is None:
        index = torch.arange(sequences.count, device=hidden.device).repeat_interleave(sequences.shape[1])
    chosen = chosen_rows(batch.active)
    lengths = torch.bincount(index if chosen is None else index[chosen], minlength=sequences.count).tolist()
    if max(lengths, default=0) > chunk_size:
        return None
    chunks: list[slice] = []
    for length in lengths:
        if chunks and chunks[-1].stop - chunks[-1].start + length <= chunk_size:
            chunks[-1] = slice(chunks[-1].start, chunks[-1].stop + length)
        else:
            start = chunks[-1].stop if chunks else 0
            chunks.append(slice(start, start + length))
    pieces: list[Rows] = [rows if chosen is None else chosen[rows] for rows in chunks if rows.stop > rows.start]
    return Whole(params, inputs, Sequences(index.shape, sequences.count, index), pieces)
