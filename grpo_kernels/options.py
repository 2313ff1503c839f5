"""The options of the loss, declared and validated once; what each loss type makes of them is in registry.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from grpo_kernels.checks import Count, check_count, check_number, known_options
from grpo_kernels.reference import KL_ESTIMATORS, MAX_LOG_RATIO, OBJECTIVES
from grpo_kernels.registry import BIAS_CORRECTED_K3, KL_TERMS, LEVELS, LOSS_TYPES

__all__ = ["GRPOLossOutput", "LossOptions", "ObjectiveParams", "TokenInputs"]


class LossOptions(TypedDict, total=False):
    """The options of every loss, in TRL's words (this is their one declaration; defaults are ObjectiveParams').

    loss_type: how a token's policy term and weight are made, see docs/losses.md; "grpo", "bnpo", "dr_grpo", "dapo", "luspo" (the clipped
        ratio of PPO in five aggregations), "cispo", "sapo", "vespo", "reinforce". TRL's default is "dapo".
    importance_sampling_level: "token": one ratio a token; "sequence": one a sequence, exp of the mean log-ratio (GSPO, arXiv 2507.18071);
        "sequence_token": the sequence's value, each token's own gradient (GSPO-token).
    epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high]; both >= 0; epsilon_high None: epsilon. For cispo
        epsilon_high is the bound of the ratio itself and must be given.
    delta: upper cap of the ratio in front of the clip (two-sided clip, arXiv 2505.07291); > 0.
    dual_clip: at a negative advantage the loss is at most -dual_clip * advantage (arXiv 1912.09729); > 1.
    beta: weight of the KL penalty; >= 0; > 0 needs ref_logps.
    kl_estimator: with d = ref_logp - logp, "k3": exp(d) - d - 1 (DeepSeekMath eq. 4), "k1": -d, "k2": d^2 / 2, "abs": |d|. As a penalty k3
        descends KL(reference || policy), k2 and the bias-corrected k3 KL(policy || reference), and k1's gradient is 0 in expectation.
    kl_bias_correction: k3 times the ratio (DeepSeek-V3.2, arXiv 2512.02556). TRL's default since 1.16 is True.
    max_log_ratio: bound on log-ratios before they are exponentiated; > 0; None: 80. Beyond it the gradient is 0.
    entropy_coef: loss -= entropy_coef * sum(u * entropy).
    entropy_aggregation: u is the loss's own token weight ("loss") or 1 / number of this call's tokens ("token_mean").
    sapo_temperature_pos, sapo_temperature_neg: steepness of sapo's gate at positive and other advantages; > 0.
    vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: vespo's (k, lambda) at advantages >= 0 and < 0; > 0.
    num_items_in_batch: active tokens of the whole optimisation step, over micro-batches and ranks (dapo, cispo, vespo, reinforce); None:
        this call's.
    num_sequences: sequences of the whole optimisation step (grpo, sapo, dr_grpo, luspo); None: this call's.
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
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
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
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    num_items_in_batch: Count = None
    num_sequences: Count = None
    num_processes: int = 1
    max_completion_length: float | None = None
    loss_scale: float = 1.0

    @classmethod
    def from_options(cls, options: Mapping[str, Any], arguments: Sequence[str] = ()) -> ObjectiveParams:
        """Raises TypeError for an unknown option, naming the nearest of all `arguments`, and for a wrong type; ValueError for a value out
        of range."""
        known_options(options, OPTION_NAMES, arguments)
        return cls(**options)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not isinstance(self.kl_bias_correction, bool):
            raise TypeError(f"kl_bias_correction: expected True or False, got {self.kl_bias_correction!r}")
        for name, limits in LIMITS.items():
            if getattr(self, name) is not None or name not in OPTIONAL:
                check_number(name, getattr(self, name), **limits)
        for name in ("num_items_in_batch", "num_sequences"):
            check_count(name, getattr(self, name))
        if isinstance(self.num_processes, bool) or not isinstance(self.num_processes, int) or self.num_processes < 1:
            raise ValueError(f"num_processes: expected an integer >= 1, got {self.num_processes!r}")
        self._check_combination()

    def _check_combination(self) -> None:
        for name in ("delta", "dual_clip"):
            if getattr(self, name) is not None and self.objective != "clip":
                raise ValueError(f"{name}: caps the clipped ratio, and loss_type {self.loss_type!r} does not clip one; expected None")
        if self.objective == "cispo" and self.epsilon_high is None:
            raise ValueError(
                "epsilon_high: loss_type 'cispo' takes the bound of the ratio itself (such as 5.0), so it must be given; got None"
            )
        if self.kl_bias_correction and self.kl_estimator != "k3":
            raise ValueError(f"kl_bias_correction: corrects the k3 estimator, got kl_estimator {self.kl_estimator!r}")

    @property
    def objective(self) -> str:
        return LOSS_TYPES[self.loss_type].objective

    @property
    def needs_all_logps(self) -> bool:
        """Whether a token's term may depend on its whole sequence, so that the logits are swept twice: log-probs of all tokens first."""
        return self.importance_sampling_level != "token" or self.loss_type == "vespo"

    @property
    def reads_sequences(self) -> bool:
        """Whether it does: a level that no term reads is ignored to the last bit, so the kernels of a token's own term serve."""
        reads_level = "importance_sampling_level" in LOSS_TYPES[self.loss_type].reads or self.kl_bias_correction
        return self.loss_type == "vespo" or (self.importance_sampling_level != "token" and reads_level)

    def check_normaliser(self) -> None:
        """ValueError where the aggregation lacks what it divides by (custom `token_weights` need nothing)."""
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError(
                "max_completion_length: loss_type 'dr_grpo' divides by it and the padded length differs between micro-batches; pass the "
                "generation limit, got None"
            )
        count = LOSS_TYPES[self.loss_type].global_count
        if self.num_processes > 1 and count is not None and getattr(self, count) is None:
            raise ValueError(
                f"{count}: loss_type {self.loss_type!r} with num_processes {self.num_processes} needs the global count, got None"
            )

    def acting(self, *, token_weights: bool = False) -> set[str]:
        """The options (and old_logps) that a change of moves loss or gradient beside these; what is not here is validated and ignored.

        `token_weights`: whether the caller's own weights take the place of the aggregation.
        """
        kind = LOSS_TYPES[self.loss_type]
        names = {"loss_type", "beta", "entropy_coef", *kind.reads, *(() if token_weights else kind.weight_reads)}
        if self.beta > 0:
            term = BIAS_CORRECTED_K3 if self.kl_bias_correction else KL_TERMS[self.kl_estimator]
            names |= {"kl_estimator", *term.reads}
            names |= {"kl_bias_correction"} if self.kl_estimator == "k3" else set()
        if self.entropy_coef != 0 and (token_weights or self.loss_type != "bnpo"):  # bnpo's weight is the mean over tokens
            names.add("entropy_aggregation")
        return names

    def for_reference(self) -> dict[str, Any]:
        """The keyword arguments of `reference.token_objective`; a cap that is None became infinite."""
        return {
            "objective": self.objective,
            "epsilon": float(self.epsilon),
            "epsilon_high": float(self.epsilon if self.epsilon_high is None else self.epsilon_high),
            "delta": float("inf") if self.delta is None else float(self.delta),
            "dual_clip": float("inf") if self.dual_clip is None else float(self.dual_clip),
            "sapo_temperature_pos": float(self.sapo_temperature_pos),
            "sapo_temperature_neg": float(self.sapo_temperature_neg),
            "kl_estimator": "k3_bias_corrected" if self.kl_bias_correction else self.kl_estimator,
            "max_log_ratio": MAX_LOG_RATIO if self.max_log_ratio is None else min(MAX_LOG_RATIO, self.max_log_ratio),
        }

    def for_kernels(self) -> Tensor:
        """The same as float64 numbers on the CPU, in the same order, then beta: read at run time, no recompile for a new one."""
        named = self.for_reference()
        named["objective"] = float(OBJECTIVES.index(named["objective"]))
        named["kl_estimator"] = float(KL_ESTIMATORS.index(named["kl_estimator"]))
        # Arithmetic with a tensor is what torch.compile keeps as a run-time value: a list, torch.tensor and torch.full are constants.
        zero = torch.zeros((), dtype=torch.float64, device="cpu")  # whatever torch.set_default_device says
        return torch.stack([zero + value for value in (*named.values(), float(self.beta))])


OPTION_NAMES = tuple(field.name for field in fields(ObjectiveParams))

CHOICES: dict[str, tuple[str, ...]] = {
    "loss_type": tuple(LOSS_TYPES),
    "importance_sampling_level": tuple(LEVELS),
    "kl_estimator": tuple(KL_TERMS),
    "entropy_aggregation": ("loss", "token_mean"),
}

_POSITIVE = (
    "delta", "max_log_ratio", "max_completion_length", "loss_scale", "sapo_temperature_pos", "sapo_temperature_neg",
    "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip
LIMITS: dict[str, dict[str, float]] = {
    "epsilon": {"least": 0},
    "epsilon_high": {"least": 0},
    "beta": {"least": 0},
    "dual_clip": {"above": 1},
    "entropy_coef": {},
    **{name: {"above": 0} for name in _POSITIVE},
}
OPTIONAL = ("epsilon_high", "delta", "dual_clip", "max_log_ratio", "max_completion_length")  # None: not there


class GRPOLossOutput(NamedTuple):
    """loss () differentiable; policy_loss () the weighted policy term alone; the rest (B, T) or packed (N,), 0 where masked. All but
    loss are detached."""

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
