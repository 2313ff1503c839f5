"""verl's log-probs and entropy from one sweep over the logits, and a policy loss over `grpo_loss`.

verl asks for the two in two calls on the same logits, the entropy mostly first, and each of its functions reads the logits several times
and makes tensors of their size. `patch_verl` puts functions of the same signature in their place, of which the second call answers from
the sweep of the first. It has to run in every process that computes them: in each worker verl imports the module that its options name,

    VERL_USE_EXTERNAL_MODULES=grpo_kernels.integrations.verl_external        # or actor_rollout_ref.model.external_lib=...

What differs from verl's numbers is in docs/migration.md and at each function here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from grpo_kernels import grpo_loss
from grpo_kernels.scores import RowScores

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from grpo_kernels import LossOptions

__all__ = [
    "SUPPORTED_VERSIONS",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "logprobs_from_logits",
    "patch_verl",
    "policy_loss",
    "unpatch_verl",
]

SUPPORTED_VERSIONS = ("0.9.1",)  # those that the tests have run with


def patch_verl() -> None:
    """Put the functions of this module in the place of verl's of the same name, and register the policy loss "grpo_kernels".

    Names that other modules have imported are rebound as well. An engine binds (and compiles) its entropy when it is built, so patch
    before that. Calling it again changes nothing. Megatron's vocabulary-parallel functions and verl's fused kernels, which have no
    logits, stay as they are.

    Raises:
        RuntimeError: a version of verl that is not in SUPPORTED_VERSIONS.
        ImportError: verl is not installed.
    """
    import verl

    if verl.__version__ not in SUPPORTED_VERSIONS:
        raise RuntimeError(f"patch_verl: supported are verl {', '.join(SUPPORTED_VERSIONS)}, installed is {verl.__version__}")
    from verl.trainer.ppo.core_algos import register_policy_loss
    from verl.utils import torch_functional

    for ours in _REPLACEMENTS:
        theirs = getattr(torch_functional, ours.__name__)
        if theirs is not ours:
            _originals[ours] = theirs
            _rebind(theirs, ours)
    register_policy_loss("grpo_kernels")(_default_policy_loss)


def unpatch_verl() -> None:
    """Give verl its own functions back. The policy loss stays registered, an engine that was built keeps the entropy that it bound."""
    while _originals:
        _rebind(*_originals.popitem())


def _rebind(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """In every module that was imported so far, under whatever name."""
    for module in list(sys.modules.values()):
        if module is not None and not module.__name__.startswith("grpo_kernels"):
            for name in [name for name, value in list(vars(module).items()) if value is old]:
                setattr(module, name, new)


# Compiled by verl, they run as they are: kernels leave nothing to compile, and who asked before is no question for a graph.
@torch.compiler.disable
def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probability of each label.

    Args:
        logits: (..., V), already divided by the temperature. Read once, or not again where the entropy of the same logits was asked for.
        labels: (...), in [0, V).
        inplace_backward: the backward may write the gradient into the storage of `logits` (not where they are a leaf, nor after the
            entropy); then a later reader of the logits raises in its own backward, where verl's would be silently wrong.

    Returns:
        (...), float32 whatever the dtype of the logits (verl without flash-attn: the logits'). With the entropy it has one backward.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices; a DTensor.
        IndexError: a label outside [0, V), on the CPU, also -100 (on a GPU its result is NaN).
    """
    scores = _asked_before(logits, "entropy")
    if scores is not None:
        return scores.logps(_rows(logits), _like_rows(logits, labels)).view(labels.shape)
    origin = logits if logits._base is None else logits._base
    scores = RowScores(_rows(logits), inplace_backward=inplace_backward and not origin.is_leaf)
    logps = scores.logps(_rows(logits), _like_rows(logits, labels)).view(labels.shape)
    _remember(logits, "logps", logps, scores)
    return logps


@torch.compiler.disable
def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of each row of logits (..., V): (...), float32; differentiable, in one backward with the log-probs of these logits.

    A column at -inf adds 0 (verl's formula makes NaN of it).
    """
    scores = _asked_before(logits, "logps")
    if scores is not None:
        return scores.entropy().view(logits.shape[:-1])
    scores = RowScores(_rows(logits))
    entropy = scores.entropy().view(logits.shape[:-1])
    _remember(logits, "entropy", entropy, scores)
    return entropy


@torch.compiler.disable
def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`entropy_from_logits`, which needs no chunks."""
    return entropy_from_logits(logits)


_REPLACEMENTS = (logprobs_from_logits, entropy_from_logits, entropy_from_logits_with_chunking)
_originals: dict[Callable[..., Any], Callable[..., Any]] = {}  # ours -> verl's


def _rows(logits: Tensor) -> Tensor:
    rows = logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _like_rows(logits: Tensor, labels: Tensor) -> Tensor:
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels: expected shape {tuple(logits.shape[:-1])} beside logits {tuple(logits.shape)}, got {tuple(labels.shape)}"
        )
    return labels if logits.dim() in (2, 3) else labels.reshape(-1)


class _Asked(NamedTuple):
    """What was asked of some logits first, and how they were then."""

    what: str
    version: int
    graph: bool
    answer: TensorWeakRef


# Who answers the second call: the scores live as long as the first answer, whose graph holds the logits anyway, and no longer. A
# reference from the logits to their own graph would be a cycle that nobody collects.
_asked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # logits -> _Asked
_scores: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # first answer -> RowScores


def _remember(logits: Tensor, what: str, answer: Tensor, scores: RowScores) -> None:
    if not logits.is_inference():  # such a tensor does not tell whether it was written to
        _asked[logits] = _Asked(what, logits._version, _has_graph(logits), TensorWeakRef(answer))
        _scores[answer] = scores


def _asked_before(logits: Tensor, what: str) -> RowScores | None:
    """The scores of a first call for `what`, if these logits are as they were and the answer is still in use. Once."""
    asked = _asked.pop(logits, None)
    answer = None if asked is None else asked.answer()
    scores = None if answer is None else _scores.pop(answer, None)
    if asked is None or (asked.what, asked.version, asked.graph) != (what, logits._version, _has_graph(logits)):
        return None
    return scores


def _has_graph(logits: Tensor) -> bool:
    return torch.is_grad_enabled() and logits.requires_grad


def policy_loss(**options: Unpack[LossOptions]) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """A policy loss for verl's `register_policy_loss`, over `grpo_loss`.

    Clip ratios, dual clip and sapo's temperatures come from the actor's config, log-ratios are held within verl's +-20, and the aggregation
    is verl's `loss_agg_mode` with its global counts; `options` replace what the config says. KL and entropy terms stay verl's. Without
    options, which is what `patch_verl` registers as "grpo_kernels", it is verl's "vanilla".

    cispo clips the ratio from above only, at 1 + clip_ratio_high (verl's also from below). `importance_sampling_level="sequence_token",
    dual_clip=None, max_log_ratio=10` is verl's gspo.

        register_policy_loss("bounded")(policy_loss(delta=4.0, dual_clip=None))
        register_policy_loss("vespo")(policy_loss(loss_type="vespo"))

    The loss has verl's arguments; it raises ValueError for an unknown loss_agg_mode and for dp_size > 1 without the global count, and
    what `grpo_loss` raises. It returns the loss and actor/ppo_kl, actor/pg_clipfrac, actor/pg_clipfrac_lower as numbers (one host sync).
    """

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        own: dict[str, Any] = {"max_log_ratio": 20.0, **_from_config(config, options.get("loss_type", "grpo")), **options}
        output = grpo_loss(
            log_prob, advantages, old_logps=old_log_prob, completion_mask=response_mask, importance_weights=rollout_is_weights,
            token_weights=aggregation(response_mask, loss_agg_mode, config.global_batch_info), **own,
        )  # fmt: skip
        return output.loss, _metrics(output.clipped, output.logps - old_log_prob, advantages, response_mask != 0, own)

    return loss


_default_policy_loss = policy_loss()


def _from_config(config: Any, loss_type: str) -> dict[str, Any]:
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    if loss_type == "cispo":
        return {"epsilon_high": 1 + high}
    if loss_type == "sapo":
        return {"sapo_temperature_pos": config.tau_pos, "sapo_temperature_neg": config.tau_neg}
    if loss_type in ("vespo", "reinforce"):
        return {}
    return {"epsilon": low, "epsilon_high": high, "dual_clip": config.clip_ratio_c}


def aggregation(response_mask: Tensor, loss_agg_mode: str, counts: Mapping[str, Any]) -> Tensor:
    """verl's `agg_loss` as one weight per token, (B, T) float32."""
    mask = (response_mask != 0).float()
    lengths = mask.sum(-1, keepdim=True)
    ranks = counts.get("dp_size") or 1

    def count(name: str, local: Tensor) -> Any:
        if counts.get(name) is None and ranks > 1:
            raise ValueError(f"{name}: loss_agg_mode {loss_agg_mode!r} with dp_size {ranks} needs the global count, got None")
        return local.sum().clamp(min=1) if counts.get(name) is None else counts[name]

    if loss_agg_mode == "token-sum":
        return mask * ranks
    if loss_agg_mode == "token-mean":
        return mask * (ranks / count("batch_num_tokens", mask))
    if loss_agg_mode not in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        raise ValueError(f"loss_agg_mode: verl has no {loss_agg_mode!r}")
    per_sequence = mask * (ranks / count("global_batch_size", (lengths > 0).float()))
    if loss_agg_mode == "seq-mean-token-sum":
        return per_sequence
    if loss_agg_mode == "seq-mean-token-mean":
        return per_sequence / lengths.clamp(min=1)
    return per_sequence / (counts.get("loss_scale_factor") or mask.shape[-1])


def _metrics(clipped: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, own: Mapping[str, Any]) -> dict[str, float]:
    held = log_ratio.clamp(-20, 20)
    cap = own.get("dual_clip")
    capped = (advantages < 0) & (held.exp() > cap) if cap else torch.zeros_like(mask)
    values = {"actor/pg_clipfrac": clipped != 0, "actor/ppo_kl": -held, "actor/pg_clipfrac_lower": capped}
    tokens = mask.sum().clamp(min=1)
    means = torch.stack([torch.where(mask, x.float(), 0).sum() / tokens for x in values.values()])
    return dict(zip(values, means.tolist()))
