"""The GRPO loss: from logits (`fused_grpo_loss`) and from log-probabilities (`grpo_loss`).

A batch becomes rows, None becomes an alias, a loss type becomes one weight per token; below that the layers know none of these. The loss
is by default two sweeps over the logits (forward: 1 read; backward: 1 read, 1 write); `one_pass` makes it one (1 read, 1 write).
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.checks import (
    check_backend,
    check_logits,
    mask_rows,
    per_token,
    plain_tensor,
    stats_dtype,
    temperatures,
)
from grpo_kernels.logprobs import score
from grpo_kernels.objective import token_objective, weighted_sum
from grpo_kernels.one_pass import one_pass_loss
from grpo_kernels.options import GRPOLossOutput, LossOptions, ObjectiveParams, TokenInputs
from grpo_kernels.packed import sequences_of
from grpo_kernels.rows import Sequences, check_inplace
from grpo_kernels.sequence import sequence_objective, vespo_folded
from grpo_kernels.weights import token_weights as token_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["fused_grpo_loss", "grpo_loss"]


def fused_grpo_loss(
    logits: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    importance_weights: Tensor | None = None,
    policy_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    one_pass: bool = False,
    inplace: bool = False,
    backend: str | None = None,
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """The GRPO loss (DeepSeekMath, arXiv 2402.03300, eq. 3) straight from logits.

    loss = sum_it w_it [ -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) + beta (e^d - d - 1) ] - entropy bonus, with
    rho = exp(logp - old_logp), d = ref_logp - logp, and w the aggregation's weight of a token, 0 where masked.

    Args:
        logits: (B, T, V), position t predicting completion_ids[:, t]; or (B, T + 1, V) as `model(..., logits_to_keep=T + 1)` returns
            them: the last position is ignored and gets gradient 0 (do not slice it off: autograd would copy the whole tensor).
            float32, bfloat16 or float16 (float64 on backend "torch"). Any strides over B and T, contiguous over V.
        completion_ids: (B, T) int64 or int32.
        advantages: (B,) or (B, T).
        old_logps: (B, T) log-probs under the policy that sampled; None: on-policy, the ratio is exactly 1.
        ref_logps: (B, T) log-probs under the reference policy; required where beta > 0. Given, `kl` is filled also at beta 0.
        completion_mask: (B, T) bool, int or float; non-zero counts. What stands at masked positions never matters. None: all tokens.
        importance_weights: (B,), (B, 1) or (B, T) ratio of trainer to sampler; multiplies the policy term.
        policy_weights: (B,), (B, 1) or (B, T) any other factor of the policy term (off-policy or entropy masks).
        token_weights: (B, T) own aggregation: replaces w by token_weights * mask; then no normaliser and no loss_scale is applied.
        temperature: > 0; a number, (B,) or (B, T). Divides the logits inside; old_logps and ref_logps must have been made with it.
        one_pass: loss and gradient in one visit of each row, in the forward. One backward only. A GradScaler's factor belongs in
            loss_scale then: float16 gradients are stored before the scaler multiplies.
        inplace: the logits' storage becomes their gradient (in the backward; with one_pass already in the forward). One backward only; a
            later reader of the logits raises. Without grad both flags leave the logits alone.
        backend: a name of `available_backends()`; None picks the best for the device.
        **options: see `LossOptions`.

    Returns:
        GRPOLossOutput(loss, policy_loss, logps, entropy, kl, clipped): `loss` differentiable in the logits.

    Raises:
        ValueError, TypeError: wrong shapes, dtypes, devices, ranges, an unknown option, beta > 0 without ref_logps; before any launch.
        IndexError: an unmasked id outside [0, V), on the CPU (on a GPU that token is NaN).
        RuntimeError: inplace on a leaf that requires grad; a second backward with one_pass or inplace.

    With old_logps None (or equal) and centred advantages the *value* of the loss is 0 while its gradient is not: log rewards, not the loss.

    >>> import torch
    >>> logits = torch.zeros(2, 3, 5, requires_grad=True)
    >>> out = fused_grpo_loss(logits, torch.tensor([[1, 2, 3], [4, 0, 1]]), torch.tensor([1.0, -1.0]))
    >>> out.loss.backward()
    >>> out.logps[0, 0], logits.grad[0, 0, 1]
    (tensor(-1.6094), tensor(-0.1333))
    """
    params = ObjectiveParams.from_options(options, _FUSED_ARGUMENTS)
    check_logits(logits, completion_ids, "completion_ids", packed=cu_seqlens is not None)
    if one_pass and params.needs_all_logps:
        raise ValueError(
            f"one_pass: loss_type {params.loss_type!r} at level {params.importance_sampling_level!r} needs the log-probs of whole "
            f"sequences before any gradient; pass one_pass=False"
        )
    sequences = sequences_of("completion_ids", completion_ids, cu_seqlens)
    dtype = stats_dtype(logits)
    ids = per_token("completion_ids", completion_ids, sequences, logits, torch.int64)
    taus = temperatures(temperature, sequences, logits, dtype)
    batch = Batch(logits, sequences, mask_rows("completion_mask", completion_mask, sequences, logits), check_backend(backend))
    inputs = _token_inputs(params, batch, advantages, old_logps, ref_logps, importance_weights, policy_weights, token_weights)
    inplace = check_inplace("inplace", logits, inplace)
    # autograd lets a function that writes over a view return nothing else, keeps no gradient of what was written over, and torch.compile
    # cannot tell an unused output's gradient from zeros: there the gradient takes the logits' place in the backward, after two sweeps.
    in_backward = inplace and (torch.compiler.is_compiling() or logits._is_view() or logits.retains_grad)
    if one_pass and not in_backward and logits.requires_grad and torch.is_grad_enabled():
        return one_pass_loss(logits, ids, batch.active, taus, params, inputs.tokens, inplace, batch.backend)
    logps, entropy = score(logits, ids, batch.active, taus, inplace, batch.backend)
    return _output(logps, entropy, params, batch, inputs)


def grpo_loss(
    logps: Tensor,
    advantages: Tensor,
    *,
    entropy: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    importance_weights: Tensor | None = None,
    policy_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[LossOptions],
) -> GRPOLossOutput:
    """The same loss from log-probabilities (B, T), for trainers whose loss gets only these, or that need entropy before the loss.

    Args:
        logps: (B, T), differentiable; float32 or float64 (half precision is taken to float32 first). `token_logprobs` makes them.
        entropy: (B, T), differentiable; needed where entropy_coef is not 0 (without it the output's entropy is zeros).
        The others: as `fused_grpo_loss`.

    Raises:
        ValueError, TypeError: as `fused_grpo_loss`.

    >>> import torch
    >>> logps = torch.log(torch.tensor([[1.1, 0.9, 1.5]]))
    >>> grpo_loss(logps, torch.ones(1), old_logps=torch.zeros(1, 3)).loss
    tensor(-1.0667)
    """
    params = ObjectiveParams.from_options(options, _ARGUMENTS)
    logps = _differentiable("logps", logps)
    packed = cu_seqlens is not None
    if packed and logps.dim() == 2 and logps.shape[0] == 1:
        logps = logps[0]
    if logps.dim() != (1 if packed else 2):
        raise ValueError(f"logps: expected {'(N,) or (1, N) with cu_seqlens' if packed else '(B, T)'}, got shape {tuple(logps.shape)}")
    if entropy is not None:
        entropy = _differentiable("entropy", entropy)
        if entropy.numel() != logps.numel() or entropy.shape[-1:] != logps.shape[-1:] or entropy.device != logps.device:
            raise ValueError(
                f"entropy: expected {tuple(logps.shape)} on {logps.device} as logps, got {tuple(entropy.shape)} on {entropy.device}"
            )
        entropy = entropy.reshape(logps.shape).to(logps.dtype)
    elif params.entropy_coef != 0:
        raise ValueError("entropy: entropy_coef is not 0, so the loss needs it; got None (token_logprobs_and_entropy gives it)")
    sequences = sequences_of("logps", logps, cu_seqlens)
    batch = Batch(logps, sequences, mask_rows("completion_mask", completion_mask, sequences, logps), check_backend(backend))
    inputs = _token_inputs(params, batch, advantages, old_logps, ref_logps, importance_weights, policy_weights, token_weights)
    return _output(logps, entropy, params, batch, inputs)


# an unknown option may be a misspelt argument
_FUSED_ARGUMENTS = tuple(inspect.signature(fused_grpo_loss).parameters)
_ARGUMENTS = tuple(inspect.signature(grpo_loss).parameters)


class Batch(NamedTuple):
    like: Tensor  # logits or log-probs: device and dtype of everything else
    sequences: Sequences
    active: Tensor | None
    backend: str


class Inputs(NamedTuple):
    tokens: TokenInputs
    folded: Tensor | None  # (S,) log importance weights that vespo folds into its own


def _differentiable(name: str, x: Any) -> Tensor:
    plain_tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
    return x if x.dtype == torch.float64 else x.float()


def _token_inputs(
    params: ObjectiveParams,
    batch: Batch,
    advantages: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    importance_weights: Tensor | None,
    policy_weights: Tensor | None,
    token_weights: Tensor | None,
) -> Inputs:
    """Everything per token as the objective takes it: the two policy factors as one, aggregation and entropy bonus as weights."""
    dtype = stats_dtype(batch.like)

    def constant(name: str, x: Tensor | None, **shapes: bool) -> Tensor | None:
        return None if x is None else per_token(name, x, batch.sequences, batch.like, dtype, **shapes)

    if params.beta > 0 and ref_logps is None:
        raise ValueError(f"ref_logps: beta is {params.beta}, so the loss needs the reference's log-probs; got None")
    factor = constant("importance_weights", importance_weights, per_sequence=True, column=True)
    folded = None
    if params.loss_type == "vespo" and factor is not None and importance_weights is not None:
        one_each = importance_weights.numel() == batch.sequences.count != factor.numel()
        folded = vespo_folded(importance_weights.flatten().to(dtype) if one_each else factor, batch.active, batch.sequences)
        factor = None
    other = constant("policy_weights", policy_weights, per_sequence=True, column=True)
    if factor is not None and other is not None:
        factor = factor * other

    weigh = functools.partial(token_weight, batch.active, batch.sequences, dtype=dtype, device=batch.like.device)
    if token_weights is None:
        params.check_normaliser()
        weights = weigh(
            params.loss_type, num_items_in_batch=params.num_items_in_batch, num_sequences=params.num_sequences,
            num_processes=params.num_processes, max_completion_length=params.max_completion_length, loss_scale=params.loss_scale,
        )  # fmt: skip
    else:
        weights = per_token("token_weights", token_weights, batch.sequences, batch.like, dtype)
        weights = weights if batch.active is None else torch.where(batch.active.bool(), weights, 0)
    bonus = None
    if params.entropy_coef != 0 and params.entropy_aggregation == "loss":
        bonus = params.entropy_coef * weights
    elif params.entropy_coef != 0:
        bonus = params.entropy_coef * weigh("bnpo", loss_scale=params.loss_scale if token_weights is None else 1.0)
    tokens = TokenInputs(
        per_token("advantages", advantages, batch.sequences, batch.like, dtype, per_sequence=True),
        constant("old_logps", old_logps),
        constant("ref_logps", ref_logps),
        other if factor is None else factor,
        weights,
        bonus,
    )
    return Inputs(tokens, folded)


def _output(logps: Tensor, entropy: Tensor | None, params: ObjectiveParams, batch: Batch, inputs: Inputs) -> GRPOLossOutput:
    bonus = None if entropy is None or inputs.tokens.entropy_weights is None else entropy.contiguous()
    if params.reads_sequences:
        term = sequence_objective(ops.first_order(logps), batch.active, params, inputs.tokens, inputs.folded, batch.sequences)
        loss, policy_loss, kl, clipped = weighted_sum(term, bonus, batch.active, params, inputs.tokens)
    else:
        loss, policy_loss, kl, clipped = token_objective(logps.contiguous(), bonus, batch.active, params, inputs.tokens, batch.backend)
    values = [torch.zeros_like(logps) if x is None else x.detach() for x in (logps, entropy)]
    # clones: never the caller's own memory
    values = [x.clone() if batch.active is None else torch.where(batch.active.bool(), x, 0) for x in values]
    return GRPOLossOutput(loss, policy_loss, values[0], values[1], kl, clipped)
