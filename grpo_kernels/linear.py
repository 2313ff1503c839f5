"""From hidden states to the loss, logits never whole: three matrix products instead of the four of a design that recomputes.

A chunk of rows at a time (chunked.py): its logits in a buffer, loss and gradient in one visit of each row over it, then dH and dW. So the
gradients are ready when the forward ends; the backward only multiplies them by the upstream gradient.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import chunked, ops
from grpo_kernels.batch import Batch, loss_of_logps, token_inputs
from grpo_kernels.checks import check_backend, check_hidden_states, check_number, mask_rows, per_token, stats_dtype, temperatures
from grpo_kernels.logprobs import LogprobsOutput
from grpo_kernels.objective import empty_outputs, total
from grpo_kernels.options import GRPOLossOutput, LossOptions, ObjectiveParams
from grpo_kernels.packed import sequences_of
from grpo_kernels.products import HeadOptions, empty_dweight, stored_dweight
from grpo_kernels.rows import Sequences
from grpo_kernels.whole import whole_sequences

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["fused_linear_grpo_loss", "fused_linear_logprobs"]

# The buffer of logits in bytes, and its most rows. A GPU needs 2,048 rows and more for products at full speed; a CPU 512: at 256 the sum
# of dW is added to so often that it shows.
CPU_BUFFER, GPU_BUFFER = (160 << 20, 1024), (1 << 30, 4096)


def fused_linear_grpo_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    chunk_size: int | None = None,
    logits_dtype: torch.dtype | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    importance_weights: Tensor | None = None,
    policy_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    backend: str | None = None,
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """`fused_grpo_loss` from the hidden states that the language-model head reads: the logits never exist together.

    A chunk of rows at a time: logits = scale * (h W^T + bias) in a buffer that is used again, loss and gradient in one visit of each row
    over it, then dH = dlogits W and dW += dlogits^T h: three matrix products, where designs that compute the logits again take four. Masked
    rows leave before the first product, rows without a gradient (clipped, zero advantage) before the other two. Peak memory is the buffer
    and the gradients of what requires grad (dW float32 until the backward, where half-precision chunks are added up), whatever N.

    Args:
        hidden_states: (B, T, D), position t predicting completion_ids[:, t]; or (B, T + 1, D), whose last position is ignored and gets
            gradient 0; with cu_seqlens packed (N, D) or (1, N, D). float32, bfloat16 or float16 (float64 on backend "torch"), any strides.
        lm_head_weight: (V, D), of the same dtype. Requires no grad: no gradient of it is computed or held. A weight that is sharded (a
            DTensor) raises: gathered outside its own module's forward it would lose the other ranks' gradient.
        completion_ids: (B, T) or packed (N,), int64 or int32.
        advantages: (B,) or (B, T); packed (S,) or (N,).
        bias: (V,) of the head, of the same dtype; None: none.
        logit_scale: in [1e-15, 1e15]; multiplies the product (Cohere's logit_scale, 1 / Granite's logits_scaling).
        logit_softcap: in [1e-15, 1e15]; logits become softcap * tanh(logits / softcap), after the scale (Gemma 2's
            final_logit_softcapping). A second buffer keeps what the derivative needs.
        chunk_size: most rows of a chunk; None: what fits into 160 MB on a CPU (at most 1,024 rows), 1 GB on a GPU (at most 4,096).
        logits_dtype: dtype of the logits in the buffer; None: that of the products. float32 keeps the logits of half-precision products
            from being rounded (slow on a CPU, which has no such product); their gradient is rounded before dH and dW all the same.
        The others: as `fused_grpo_loss`.

    Under torch.autocast the products run in its dtype, as torch.nn.functional.linear would; without it all dtypes have to agree. Gradients
    have the dtype of what they are of. dW adds up float32: on a GPU products that were never rounded, on a CPU products of a chunk each
    rounded once to half precision, so its error is at most that of dlogits plus half an ulp of each chunk's product and of the sum.

    Losses of whole sequences (importance_sampling_level "sequence" or "sequence_token", vespo) take three products where chunk_size holds
    the longest sequence, masked tokens not counted; else, and inside torch.compile, two sweeps and four.

    `logps` have the bits of `fused_linear_logprobs` where the products run over the same chunks: the same mask and chunk_size, a loss of
    single tokens. Products over other rows may round otherwise, so that a ratio on policy is 1 to that rounding; old_logps=None makes it 1.

    Choosing rows by value waits for the device: on a GPU once a call for the mask and once a chunk, but not while a CUDA graph is captured,
    when all rows are multiplied.

    Returns:
        GRPOLossOutput(loss, policy_loss, logps, entropy, kl, clipped): `loss` differentiable in hidden_states, lm_head_weight and bias. The
        gradients are made in the forward (under no_grad: none, and one product) and handed over in the first backward; one backward only.
        A GradScaler's factor belongs in loss_scale: float16 gradients of the logits are rounded before the scaler multiplies.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes, devices, ranges, an unknown option, beta > 0 without ref_logps; before any product.
        IndexError: an unmasked id outside [0, V), on the CPU (on a GPU that token is NaN).
        RuntimeError: a second backward; a second derivative.

    >>> import torch
    >>> hidden, head = torch.ones(2, 3, 4), torch.zeros(5, 4, requires_grad=True)
    >>> out = fused_linear_grpo_loss(hidden, head, torch.tensor([[1, 2, 3], [4, 0, 1]]), torch.tensor([1.0, -1.0]))
    >>> out.loss.backward()
    >>> out.logps[0, 0], head.grad[4, 0]
    (tensor(-1.6094), tensor(0.1667))
    """
    params = ObjectiveParams.from_options(options, _LOSS_ARGUMENTS)
    check_hidden_states(hidden_states, lm_head_weight, bias, completion_ids, "completion_ids", packed=cu_seqlens is not None)
    head = _head_options(hidden_states, lm_head_weight, bias, logit_scale, logit_softcap, chunk_size, logits_dtype)
    sequences = sequences_of("completion_ids", completion_ids, cu_seqlens)
    ids = per_token("completion_ids", completion_ids, sequences, hidden_states, torch.int64)
    taus = temperatures(temperature, sequences, hidden_states, stats_dtype(hidden_states))
    active = mask_rows("completion_mask", completion_mask, sequences, hidden_states)
    batch = Batch(hidden_states, sequences, active, check_backend(backend))
    inputs = token_inputs(params, batch, advantages, old_logps, ref_logps, importance_weights, policy_weights, token_weights)

    wanted = _wanted(hidden_states, lm_head_weight, bias)
    whole = whole_sequences(params, batch, inputs, head.chunk_size) if params.reads_sequences and any(wanted) else None
    if not any(wanted) or (params.reads_sequences and whole is None):
        logps, entropy = _LinearLogprobs.apply(hidden_states, lm_head_weight, bias, ids, active, taus, head, batch.backend)
        return loss_of_logps(logps, entropy, params, batch, inputs)
    # the way back to what is differentiated for `ops.once`, through copies of no rows: saved ones would be held until the backward
    origins = [x[:0].clone() for x, needed in zip((hidden_states, lm_head_weight, bias), wanted) if x is not None and needed]
    outputs = _LinearLoss.apply(
        hidden_states, lm_head_weight, bias, wanted, ids, active, taus, params.for_kernels(), head, whole, tuple(origins), batch.backend,
        *inputs.tokens,
    )  # fmt: skip
    return GRPOLossOutput(*outputs)


def fused_linear_logprobs(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    chunk_size: int | None = None,
    logits_dtype: torch.dtype | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> LogprobsOutput:
    """Log-probabilities and entropy of chosen tokens from hidden states, logits never whole: for old and reference log-probs.

    Without grad one product, and a peak of one chunk. Differentiable in hidden_states, lm_head_weight and bias: the backward computes the
    logits of a chunk again (four products in all), of the tokens whose upstream gradient is not 0, so prefer `fused_linear_grpo_loss`
    where it is the loss that is wanted.

    Args:
        hidden_states: (B, T, D), or (B, T + 1, D) whose last position is ignored and gets gradient 0; or (N, D).
        token_ids: (B, T) or (N,), int64 or int32, in [0, V).
        temperature: > 0; a number, (B,) or (B, T).
        mask: (B, T) or (N,); a masked token (0) is in no product, its results are 0 and its gradient row is 0.
        The others: as `fused_linear_grpo_loss`.

    Returns:
        LogprobsOutput(logps, entropy), (B, T) or (N,), float32 (float64 for float64 hidden states).

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or ranges, before anything runs.
        IndexError: an unmasked id outside [0, V), on the CPU (on a GPU that token's results are NaN).

    >>> import torch
    >>> head = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    >>> fused_linear_logprobs(torch.ones(1, 2), head, torch.tensor([0]), temperature=0.5).logps
    tensor([-0.0360])
    """
    check_hidden_states(hidden_states, lm_head_weight, bias, token_ids, "token_ids")
    head = _head_options(hidden_states, lm_head_weight, bias, logit_scale, logit_softcap, chunk_size, logits_dtype)
    sequences = Sequences(token_ids.shape, token_ids.shape[0])
    active = mask_rows("mask", mask, sequences, hidden_states)
    taus = temperatures(temperature, sequences, hidden_states, stats_dtype(hidden_states))
    ids = per_token("token_ids", token_ids, sequences, hidden_states, torch.int64)
    scored = _LinearLogprobs.apply(hidden_states, lm_head_weight, bias, ids, active, taus, head, check_backend(backend))
    return LogprobsOutput(*scored)


_LOSS_ARGUMENTS = tuple(inspect.signature(fused_linear_grpo_loss).parameters)  # an unknown option may be a misspelt argument


def _head_options(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Any, softcap: Any, chunk_size: Any, logits_dtype: Any
) -> HeadOptions:
    _check_factor("logit_scale", scale)
    if softcap is not None:
        _check_factor("logit_softcap", softcap)
    kind = hidden.device.type
    product = hidden.dtype
    if kind != "meta" and torch.is_autocast_enabled(kind) and torch.float64 not in (hidden.dtype, weight.dtype):
        product = torch.get_autocast_dtype(kind)
    else:
        for name, x in (("lm_head_weight", weight), ("bias", bias)):
            if x is not None and x.dtype != hidden.dtype:
                raise TypeError(
                    f"{name}: expected {hidden.dtype} as the hidden states, got {x.dtype}; cast one, or run under torch.autocast"
                )
    allowed = (torch.float64,) if product == torch.float64 else (torch.float32, torch.bfloat16, torch.float16)
    if logits_dtype is not None and logits_dtype not in allowed:
        raise TypeError(f"logits_dtype: expected None or {' or '.join(map(str, allowed))}, got {logits_dtype!r}")
    logits_dtype = logits_dtype or product
    if chunk_size is None:
        bytes_a_row = len(weight) * (logits_dtype.itemsize * (1 + (softcap is not None)) + product.itemsize * (product != logits_dtype))
        size, most = CPU_BUFFER if kind == "cpu" else GPU_BUFFER
        fitting = size // bytes_a_row
        chunk_size = max(1, min(fitting // 64 * 64 or fitting, most))
    elif isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size: expected an integer >= 1 or None, got {chunk_size!r}")
    return HeadOptions(float(scale), None if softcap is None else float(softcap), chunk_size, logits_dtype, product)


def _check_factor(name: str, value: Any) -> None:
    """Far enough from the ends of float32 that neither it nor the quotient of two is inf or 0 there, and NaN once multiplied."""
    if not 1e-15 <= check_number(name, value, above=0) <= 1e15:
        raise ValueError(f"{name}: expected a number in [1e-15, 1e15], which float32 multiplies logits by, got {value}")


class _Wanted(NamedTuple):
    hidden: bool
    weight: bool
    bias: bool


def _wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> _Wanted:
    """Which gradients there will be."""
    enabled = torch.is_grad_enabled()
    return _Wanted(*(enabled and x is not None and x.requires_grad for x in (hidden, weight, bias)))


def _empty_gradients(
    wanted: _Wanted, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: HeadOptions, chunks: int
) -> tuple[Tensor | None, list[Tensor], Tensor | None]:
    dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted.hidden else None
    dweight = empty_dweight(weight, head.product_dtype, chunks) if wanted.weight else []
    dbias = torch.empty_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32)) if wanted.bias and bias is not None else None
    return dhidden, dweight, dbias


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, wanted, ids, active, temperature, params, head, whole, origins, backend, *inputs):  # type: ignore[no-untyped-def]
        logps, entropy = torch.empty_like(temperature), torch.empty_like(temperature)
        loss, policy_loss, kl, clipped = empty_outputs(logps)
        dhidden, dweight, dbias = _empty_gradients(wanted, hidden, weight, bias, head, len(whole.chunks) if whole else head.chunks(ids))
        rows = (hidden, weight, bias, ids, active, temperature)
        outputs = (logps, entropy, loss, policy_loss, kl, clipped, dhidden, dweight, dbias)
        if whole is None:
            chunked.linear_loss_and_grad(backend, *rows, *inputs, params, *head, *outputs)
        else:
            whole.loss_and_grad(backend, *rows, head, *outputs)
        ctx.gradients = (dhidden, dweight, dbias)
        ctx.like, ctx.origins, ctx.backend = (weight.dtype, bias.dtype if bias is not None else None), origins, backend
        ctx.set_materialize_grads(False)
        results = total(loss), total(policy_loss), logps, entropy, kl, clipped
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx, upstream, *_):  # type: ignore[no-untyped-def]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "fused_linear_grpo_loss hands its gradients over in the first backward; for a second one call it again, or add up the "
                "losses before one backward"
            )
        constants = (None,) * 15
        if upstream is None:
            return (None, None, None, *constants)
        dhidden, dweight, dbias = gradients
        if dhidden is not None:
            ops.scale_(ctx.backend, dhidden if dhidden.dim() == 3 else dhidden[None], upstream)
        for part in dweight:
            ops.scale_(ctx.backend, part[None], upstream)
        found = _stored(dhidden, dweight, dbias if dbias is None else dbias * upstream, *ctx.like)
        return (*(x if x is None else ops.once(x, *ctx.origins, upstream) for x in found), *constants)


def _stored(
    dhidden: Tensor | None, dweight: list[Tensor], dbias: Tensor | None, weight_dtype: torch.dtype, bias_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients in the dtypes of what they are of."""
    return dhidden, stored_dweight(dweight, weight_dtype) if dweight else None, None if dbias is None else dbias.to(bias_dtype)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, active, temperature, head, backend):  # type: ignore[no-untyped-def]
        logps, entropy = torch.empty_like(temperature), torch.empty_like(temperature)
        chunked.linear_logprobs(backend, hidden, weight, bias, ids, active, temperature, *head, logps, entropy)
        ctx.save_for_backward(hidden, weight, bias, ids, active, temperature, logps)
        ctx.head, ctx.backend = head, backend
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    def backward(ctx, dlogps, dentropy):  # type: ignore[no-untyped-def]
        if dlogps is None and dentropy is None:
            return (None,) * 8
        hidden, weight, bias, ids, active, temperature, logps = ctx.saved_tensors
        dlogps = torch.zeros_like(logps) if dlogps is None else dlogps.contiguous()
        dentropy = None if dentropy is None else dentropy.contiguous()
        wanted = _Wanted(*ctx.needs_input_grad[:3])
        dhidden, dweight, dbias = _empty_gradients(wanted, hidden, weight, bias, ctx.head, ctx.head.chunks(ids))
        chunked.linear_logprobs_backward(
            ctx.backend, hidden.detach(), weight.detach(), bias if bias is None else bias.detach(), ids, active, temperature, *ctx.head,
            logps.detach(), dlogps.detach(), dentropy if dentropy is None else dentropy.detach(), dhidden, dweight, dbias,
        )  # fmt: skip
        found = _stored(dhidden, dweight, dbias, weight.dtype, weight.dtype if bias is None else bias.dtype)
        return (*(x if x is None else ops.once(x, hidden, weight, bias, dlogps, dentropy) for x in found), *(None,) * 5)
