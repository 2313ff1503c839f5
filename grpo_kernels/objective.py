"""The options of the loss, declared once, and the loss per token as an autograd function whose forward already holds the derivative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from grpo_kernels import ops
from grpo_kernels.checks import Count, check_count, check_number, known_options

__all__ = ["GRPOLossOutput", "LossOptions", "ObjectiveParams", "TokenInputs", "empty_outputs", "token_objective"]

# What is exponentiated is held within +-80: exp(80) times an advantage of 6,000 is still a float32.
MAX_LOG_RATIO = 80.0

# option -> (what this version computes, what the same option names elsewhere and a later version brings)
CHOICES = {
    "loss_type": (("grpo", "bnpo", "dr_grpo", "dapo"), ("luspo", "cispo", "sapo", "vespo", "reinforce")),
    "importance_sampling_level": (("token",), ("sequence", "sequence_token")),
    "kl_estimator": (("k3",), ("k1", "k2", "abs")),
    "entropy_aggregation": (("loss", "token_mean"), ()),
}

LATER_OPTIONS = (
    "cu_seqlens",
    *("sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)

# loss_type -> the global count in its normaliser, which num_processes multiplies (None: always local)
GLOBAL_COUNT = {"grpo": "num_sequences", "bnpo": None, "dr_grpo": "num_sequences", "dapo": "num_items_in_batch"}


class LossOptions(TypedDict, total=False):
    """The options of every loss, in TRL's words (this is their one declaration; defaults are ObjectiveParams').

    loss_type: "grpo" (mean over each sequence, then over sequences), "bnpo" (mean over this call's tokens), "dr_grpo" (sum over
        B max_completion_length) or "dapo" (mean over `num_items_in_batch` tokens). TRL's default is "dapo".
    importance_sampling_level: "token": one ratio a token.
    epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high]; both >= 0; epsilon_high None: epsilon.
    delta: upper cap of the ratio in front of the clip (two-sided clip, arXiv 2505.07291); > 0.
    dual_clip: at a negative advantage the loss is at most -dual_clip * advantage (arXiv 1912.09729); > 1.
    beta: weight of the KL penalty; >= 0; > 0 needs ref_logps.
    kl_estimator: "k3": exp(d) - d - 1 with d = ref_logp - logp (DeepSeekMath eq. 4).
    kl_bias_correction: False.
    max_log_ratio: bound on log-ratios before they are exponentiated; > 0; None: 80. Beyond it the gradient is 0.
    entropy_coef: loss -= entropy_coef * sum(u * entropy).
    entropy_aggregation: u is the loss's own token weight ("loss") or 1 / number of this call's tokens ("token_mean").
    num_items_in_batch: active tokens of the whole optimisation step, over micro-batches and ranks (dapo); None: this call's.
    num_sequences: sequences of the whole optimisation step (grpo, dr_grpo); None: this call's.
    num_processes: ranks whose gradients the trainer averages; multiplies weights that hold a global count; > 1 needs that count.
    max_completion_length: the constant length of dr_grpo, which requires it; > 0.
    loss_scale: multiplies every weight (1 / gradient accumulation belongs here); > 0.
    """

    loss_type: str
    importance_sampling_level: str
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    dual_clip: float | None
    beta: float
    kl_estimator: str
    kl_bias_correction: bool
    max_log_ratio: float | None
    entropy_coef: float
    entropy_aggregation: str
    num_items_in_batch: Count
    num_sequences: Count
    num_processes: int
    max_completion_length: float | None
    loss_scale: float


@dataclass(frozen=True)
class ObjectiveParams:
    """LossOptions with defaults, validated. Fields are documented at LossOptions."""

    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    dual_clip: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_bias_correction: bool = False
    max_log_ratio: float | None = None
    entropy_coef: float = 0.0
    entropy_aggregation: str = "loss"
    num_items_in_batch: Count = None
    num_sequences: Count = None
    num_processes: int = 1
    max_completion_length: float | None = None
    loss_scale: float = 1.0

    @classmethod
    def from_options(cls, options: Mapping[str, Any], arguments: Sequence[str] = ()) -> ObjectiveParams:
        """Raises TypeError for an unknown option, naming the nearest of all `arguments`, and for a wrong type; ValueError for a value out
        of range, and for what a later version brings."""
        known_options(options, OPTION_NAMES, arguments, LATER_OPTIONS)
        return cls(**options)

    def __post_init__(self) -> None:
        for name, (here, later) in CHOICES.items():
            value = getattr(self, name)
            if value not in here:
                note = "; this version does not compute it yet" if value in later else ""
                raise ValueError(f"{name}: expected one of {', '.join(here)}, got {value!r}{note}")
        if self.kl_bias_correction is not False:
            raise ValueError(f"kl_bias_correction: expected False, got {self.kl_bias_correction!r}; this version does not compute it yet")
        for name in ("epsilon", "beta"):
            check_number(name, getattr(self, name), least=0)
        check_number("loss_scale", self.loss_scale, above=0)
        check_number("entropy_coef", self.entropy_coef)
        if self.epsilon_high is not None:
            check_number("epsilon_high", self.epsilon_high, least=0)
        for name, above in (("delta", 0), ("dual_clip", 1), ("max_log_ratio", 0), ("max_completion_length", 0)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=above)
        for name in ("num_items_in_batch", "num_sequences"):
            check_count(name, getattr(self, name))
        if isinstance(self.num_processes, bool) or not isinstance(self.num_processes, int) or self.num_processes < 1:
            raise ValueError(f"num_processes: expected an integer >= 1, got {self.num_processes!r}")

    def check_normaliser(self) -> None:
        """ValueError where the aggregation lacks what it divides by (custom `token_weights` need nothing)."""
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError(
                "max_completion_length: loss_type 'dr_grpo' divides by it and the padded length differs between micro-batches; pass the "
                "generation limit, got None"
            )
        count = GLOBAL_COUNT[self.loss_type]
        if self.num_processes > 1 and count is not None and getattr(self, count) is None:
            raise ValueError(
                f"{count}: loss_type {self.loss_type!r} with num_processes {self.num_processes} needs the global count, got None"
            )

    def for_kernels(self) -> Tensor:
        """epsilon, epsilon_high, delta, dual_clip (infinite: none), beta, max_log_ratio as float64 on the CPU, read at run time."""
        infinite = float("inf")
        values = (
            float(self.epsilon),
            float(self.epsilon if self.epsilon_high is None else self.epsilon_high),
            infinite if self.delta is None else float(self.delta),
            infinite if self.dual_clip is None else float(self.dual_clip),
            float(self.beta),
            MAX_LOG_RATIO if self.max_log_ratio is None else min(MAX_LOG_RATIO, self.max_log_ratio),
        )
        # Arithmetic with a tensor is what torch.compile keeps as a run-time value: a list, torch.tensor and torch.full are constants.
        return torch.stack([torch.zeros((), dtype=torch.float64) + value for value in values])


OPTION_NAMES = tuple(field.name for field in fields(ObjectiveParams))


class GRPOLossOutput(NamedTuple):
    """loss () differentiable; policy_loss () the weighted policy term alone; the rest (B, T), 0 where masked. All but loss are detached."""

    loss: Tensor
    policy_loss: Tensor
    logps: Tensor
    entropy: Tensor
    kl: Tensor
    clipped: Tensor


class TokenInputs(NamedTuple):
    """The constants of the objective, (B, T) contiguous; None is an alias: no such term."""

    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
    policy_weights: Tensor | None
    weights: Tensor
    entropy_weights: Tensor | None


def empty_outputs(logps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss, policy_loss, kl and clipped of each token, for the kernels to fill."""
    return torch.empty_like(logps), torch.empty_like(logps), torch.empty_like(logps), torch.empty_like(logps, dtype=torch.int8)


def total(x: Tensor) -> Tensor:
    """Sum over tokens; in float64, so that the split over threads does not show."""
    return x.sum(dtype=torch.float64).to(x.dtype)


class _TokenObjective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logps, entropy, active, params, backend, *inputs):  # type: ignore[no-untyped-def]
        loss, policy_loss, kl, clipped = empty_outputs(logps)
        dlogps = torch.empty_like(logps)
        ops.objective(backend, logps, entropy, *inputs, active, params, loss, policy_loss, dlogps, kl, clipped)
        entropy_weights = TokenInputs(*inputs).entropy_weights
        ctx.save_for_backward(dlogps, entropy_weights, logps)
        results = total(loss), total(policy_loss), kl, clipped
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, upstream, *_):  # type: ignore[no-untyped-def]
        dlogps, entropy_weights, logps = ctx.saved_tensors
        if upstream is None:
            return (None,) * (5 + len(TokenInputs._fields))
        dentropy = None if entropy_weights is None else ops.once(-entropy_weights * upstream)
        return ops.once(dlogps * upstream, logps), dentropy, *(None,) * (3 + len(TokenInputs._fields))


def token_objective(
    logps: Tensor, entropy: Tensor | None, active: Tensor | None, params: ObjectiveParams, inputs: TokenInputs, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss () differentiable in logps and entropy, policy_loss (), kl and clipped (B, T), from contiguous (B, T) log-probs."""
    return _TokenObjective.apply(logps, entropy, active, params.for_kernels(), backend, *inputs)
