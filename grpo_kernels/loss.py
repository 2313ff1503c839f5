"""The GRPO loss: from logits (`fused_grpo_loss`) and from log-probabilities (`grpo_loss`).

A batch becomes rows, None becomes an alias, a loss type becomes one weight per token (batch.py); below that the layers know none of these.
The loss is by default two sweeps over the logits (forward: 1 read; backward: 1 read, 1 write); `one_pass` makes it one (1 read, 1 write).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.batch import Batch, loss_of_logps, token_inputs
from grpo_kernels.checks import check_backend, check_logits, mask_rows, per_token, plain_tensor, stats_dtype, temperatures
from grpo_kernels.logprobs import score
from grpo_kernels.one_pass import one_pass_loss
from grpo_kernels.options import GRPOLossOutput, LossOptions, ObjectiveParams
from grpo_kernels.packed import sequences_of
from grpo_kernels.rows import check_inplace

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
        cu_seqlens: (S + 1,) int32 or int64, offsets of S sequences in packed rows, from 0 and ascending; an empty sequence counts, rows
            from the last offset on are in none. Logits are (N, V) or (1, N, V) then, (B, T) reads (N,) or (1, N), and (B,) reads (S,):
            where S = N, (N,) is one value a sequence and (1, N) one a token. None: padded.
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
    inputs = token_inputs(params, batch, advantages, old_logps, ref_logps, importance_weights, policy_weights, token_weights)
    inplace = check_inplace("inplace", logits, inplace)
    # autograd lets a function that writes over a view return nothing else, keeps no gradient of what was written over, and torch.compile
    # cannot tell an unused output's gradient from zeros: there the gradient takes the logits' place in the backward, after two sweeps.
    in_backward = inplace and (torch.compiler.is_compiling() or logits._is_view() or logits.retains_grad)
    if one_pass and not in_backward and logits.requires_grad and torch.is_grad_enabled():
        return one_pass_loss(logits, ids, batch.active, taus, params, inputs.tokens, inplace, batch.backend)
    logps, entropy = score(logits, ids, batch.active, taus, inplace, batch.backend)
    return loss_of_logps(logps, entropy, params, batch, inputs)


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
    inputs = token_inputs(params, batch, advantages, old_logps, ref_logps, importance_weights, policy_weights, token_weights)
    return loss_of_logps(logps, entropy, params, batch, inputs)


# an unknown option may be a misspelt argument
_FUSED_ARGUMENTS = tuple(inspect.signature(fused_grpo_loss).parameters)
_ARGUMENTS = tuple(inspect.signature(grpo_loss).parameters)


def _differentiable(name: str, x: Any) -> Tensor:
    plain_tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {x.dtype}")
    return x if x.dtype == torch.float64 else x.float()
