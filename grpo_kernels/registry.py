"""What each name of the loss stands for, as data: loss types, levels of the ratio, KL estimators, and the options that each of them reads.

`options.py` validates by it, docs/losses.md is printed from it, and tests/test_options.py changes every option under every loss type to
see that it tells the truth.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BIAS_CORRECTED_K3", "KL_TERMS", "LEVELS", "LOSS_TYPES", "KLTerm", "Level", "LossType"]


class LossType(NamedTuple):
    """A = advantage, l = logp, rho = the ratio at its level, m = mask, n_i = sum_t m, B sequences, P = num_processes; capitals of
    ratios and weights are held constant in the gradient."""

    objective: str  # what the kernels call the policy term, one of reference.OBJECTIVES
    formula: str  # the policy term of a token
    reads: tuple[str, ...]  # the options, and old_logps, that act in it
    weight: str
    weight_reads: tuple[str, ...]
    source: str

    @property
    def global_count(self) -> str | None:
        """The option that counts over the whole step, which num_processes goes with; None: always local."""
        return next((name for name in self.weight_reads if name in ("num_items_in_batch", "num_sequences")), None)


class Level(NamedTuple):
    ratio: str
    gradient: str
    source: str


class KLTerm(NamedTuple):
    value: str  # of d = ref_logp - logp
    gradient: str  # with respect to logp
    descends: str  # in expectation over samples of the policy
    reads: tuple[str, ...]


_RATIO = ("old_logps", "importance_sampling_level", "max_log_ratio")
_CLIP = (
    "clip",
    "-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)",
    (*_RATIO, "epsilon", "epsilon_high", "delta", "dual_clip"),
)
_SEQUENCES = ("num_sequences", "num_processes", "loss_scale")
_MEANS = ("m / (B max(n_i, 1))", _SEQUENCES)
_ITEMS = ("P m / num_items_in_batch", ("num_items_in_batch", "num_processes", "loss_scale"))

LOSS_TYPES: dict[str, LossType] = {
    "grpo": LossType(*_CLIP, *_MEANS, "DeepSeekMath, arXiv 2402.03300, eq. 3"),
    "bnpo": LossType(*_CLIP, "m / max(sum m, 1), of this call alone", ("loss_scale",), "as TRL: the mean over this call's tokens"),
    "dr_grpo": LossType(*_CLIP, "m / (B max_completion_length)", (*_SEQUENCES, "max_completion_length"), "Dr. GRPO, arXiv 2503.20783"),
    "dapo": LossType(*_CLIP, *_ITEMS, "DAPO, arXiv 2503.14476, eq. 8"),
    "luspo": LossType(*_CLIP, "m / B", _SEQUENCES, "LUSPO, arXiv 2602.05261"),
    "cispo": LossType("cispo", "-min(RHO, epsilon_high) A l", (*_RATIO, "epsilon_high"), *_ITEMS, "MiniMax-M1, arXiv 2506.13585"),
    "sapo": LossType(
        "sapo",
        "-A sigmoid(k (rho - 1)) 4 / k, k = sapo_temperature_pos where A > 0, else sapo_temperature_neg",
        (*_RATIO, "sapo_temperature_pos", "sapo_temperature_neg"),
        *_MEANS,
        "SAPO, arXiv 2511.20347",
    ),
    "vespo": LossType(
        "reinforce",
        "-PHI A l, PHI = exp(lambda + k q - lambda e^q), q = sum_t m (l - l_old); k, lambda = vespo_*_pos where A >= 0, else vespo_*_neg",
        ("old_logps", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        *_ITEMS,
        "VESPO, arXiv 2602.10693",
    ),
    "reinforce": LossType("reinforce", "-A l", (), *_ITEMS, "REINFORCE: the plain policy gradient"),
}

LEVELS: dict[str, Level] = {
    "token": Level("exp(l - l_old)", "each token's own", "PPO, arXiv 1707.06347"),
    "sequence": Level(
        "exp(sum_t m (l - l_old) / max(n_i, 1)), one a sequence", "through every token of the sequence", "GSPO, arXiv 2507.18071"
    ),
    "sequence_token": Level("as sequence", "each token's own", "GSPO-token, arXiv 2507.18071"),
}

KL_TERMS: dict[str, KLTerm] = {
    "k3": KLTerm("e^d - d - 1", "1 - e^d", "KL(reference || policy)", ("max_log_ratio",)),
    "k1": KLTerm("-d", "1", "nothing: the gradient is 0", ()),
    "k2": KLTerm("d^2 / 2", "-d", "KL(policy || reference)", ()),
    "abs": KLTerm("abs(d)", "-sign(d)", "sum_y abs(policy - reference), twice the total variation", ()),
}
BIAS_CORRECTED_K3 = KLTerm(
    "RHO (e^d - d - 1)",
    "-rho d; at level sequence rho (1 - e^d), and rho k3 through its log-ratio",
    "KL(policy || reference), also under samples of the old policy",
    ("old_logps", "importance_sampling_level", "max_log_ratio"),
)
