"""Prints docs/losses.md from the registry that the code itself reads: `python docs/generate.py > docs/losses.md`.

The formulas, the table of options and the messages are the package's own, so that the page cannot say what the code does not do; which
option acts where is held by tests/test_options.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from grpo_kernels import fused_grpo_loss, grpo_loss
from grpo_kernels.options import CHOICES, LIMITS, OPTION_NAMES, OPTIONAL, ObjectiveParams
from grpo_kernels.registry import BIAS_CORRECTED_K3, KL_TERMS, LEVELS, LOSS_TYPES

REQUIRED: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 5.0}}
CELLS = {  # what has to be there before an option is read
    "yes": {},
    "beta": {"beta": 0.1, "kl_estimator": "k1"},
    "k3": {"beta": 0.1},
    "k3*": {"beta": 0.1, "kl_bias_correction": True},
    "entropy": {"entropy_coef": 0.1},
}


def main() -> None:
    print(PAGE.format(loss_types=loss_types(), options=options(), limits=limits(), levels=levels(), kl=kl(), raises=raises()), end="")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def loss_types() -> str:
    rows = ((f"`{name}`", f"`{t.formula}`", f"`{t.weight}`", t.source) for name, t in LOSS_TYPES.items())
    return table(("`loss_type`", "policy term of a token", "weight of a token", "source"), rows)


def options() -> str:
    names = ("old_logps", *(name for name in OPTION_NAMES if name != "loss_type"))
    rows = ((f"`{name}`", *(cell(name, loss_type) for loss_type in LOSS_TYPES)) for name in names)
    return table(("", *(f"`{name}`" for name in LOSS_TYPES)), rows)


def cell(name: str, loss_type: str) -> str:
    needed = {"loss_type": loss_type, **REQUIRED.get(loss_type, {})}
    for text, setting in CELLS.items():
        if name in ObjectiveParams(**needed, **setting).acting():
            return text
    if name in ("delta", "dual_clip"):
        try:
            ObjectiveParams(**{**needed, name: 2.0})
        except ValueError:
            return "raises"
    return "-"


def limits() -> str:
    def allowed(name: str) -> str:
        if name in CHOICES:
            return ", ".join(f'`"{choice}"`' for choice in CHOICES[name])
        if name in LIMITS:
            bound = LIMITS[name]
            return "any number" if not bound else f"> {bound['above']}" if "above" in bound else f">= {bound['least']}"
        others = {"kl_bias_correction": "`True`, `False`", "num_processes": "an integer >= 1"}
        return others.get(name, "a number or a 0-d tensor; <= 0 counts as 1; `None`: this call's")

    rows = ((f"`{n}`", f"`{getattr(ObjectiveParams, n)!r}`", allowed(n) + ", `None`" * (n in OPTIONAL)) for n in OPTION_NAMES)
    return table(("option", "default", "allowed"), rows)


def levels() -> str:
    rows = ((f"`{name}`", f"`{level.ratio}`", level.gradient, level.source) for name, level in LEVELS.items())
    return table(("`importance_sampling_level`", "value of rho", "its gradient", "source"), rows)


def kl() -> str:
    terms = {**{f"`{name}`": term for name, term in KL_TERMS.items()}, "`k3`, `kl_bias_correction`": BIAS_CORRECTED_K3}
    rows = ((name, f"`{term.value}`", f"`{term.gradient}`", term.descends) for name, term in terms.items())
    return table(("`kl_estimator`", "K", "dK / dl", "as a penalty it descends"), rows)


def raises() -> str:
    """Each refused call, and what the package answers."""
    logits, ids, logps, advantages = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2), torch.ones(1)

    def message(**call: Any) -> str:
        try:
            if "one_pass" in call:
                fused_grpo_loss(logits, ids, advantages, **call)
            else:
                grpo_loss(logps, advantages, **call)
        except ValueError as error:
            return str(error)
        raise AssertionError(f"{call} is accepted")

    return table(("call", "`ValueError`"), ((", ".join(f"`{k}={v!r}`" for k, v in call.items()), message(**call)) for call in REFUSED))


REFUSED: list[dict[str, Any]] = [
    {"loss_type": "sapo", "delta": 2.0},
    {"loss_type": "reinforce", "dual_clip": 3.0},
    {"loss_type": "cispo"},
    {"loss_type": "dr_grpo"},
    {"num_processes": 8},
    {"loss_type": "dapo", "num_processes": 8},
    {"beta": 0.04},
    {"kl_estimator": "k1", "kl_bias_correction": True},
    {"entropy_coef": 0.01},
    {"importance_sampling_level": "sequence", "one_pass": True},
    {"loss_type": "vespo", "one_pass": True},
]

PAGE = """\
# Loss types, levels, KL estimators and their options

Printed by `python docs/generate.py` from the package's own registry (`grpo_kernels/registry.py`); do not edit. A test changes every
option under every loss type and sees loss or gradient move exactly where this page says so. Coming from another trainer:
[migration.md](migration.md).

    loss = sum_it w_it (f_it L_it + beta K_it) - entropy_coef sum_it u_it H_it

with w the weight, L the policy term, f the product of `importance_weights` and `policy_weights`, K the KL estimate and H the entropy of
token t of sequence i. l is the token's log-probability, l_old that under the policy that sampled (without `old_logps` it is l itself:
rho is exactly 1 and the gradient still flows), d = l_ref - l, A the advantage, m the mask, n_i the tokens of sequence i, B the
sequences, P = `num_processes`. Capital RHO, PHI are held constant in the gradient.

## Loss types

{loss_types}

On top of the clipped term: `delta` puts min(rho, delta) in place of the first rho (two-sided clip, arXiv 2505.07291); `dual_clip` c
makes it at most -c A where A < 0 (arXiv 1912.09729). At a tie, as at a ratio exactly on a clip edge, the full gradient passes.

GSPO is `grpo` at level `sequence`, with its paper's epsilon of about 3e-4: 0.2 never clips a mean over tokens. `luspo` is meant for
level `sequence`. `vespo` sums log-ratios held within +-20 and holds the sum within log 1e-8 and 20; it folds `importance_weights` into
q (one ratio a sequence counts once) where the others multiply by them.

## Weights

| | meaning |
|---|---|
| `num_items_in_batch` | active tokens of the whole optimisation step: all micro-batches and all ranks, undivided. `None`: this call's |
| `num_sequences` | sequences of the whole step, in place of B. `None`: this call's |
| `num_processes` | ranks whose gradients the trainer averages; it multiplies w wherever one of these counts is in it |
| `max_completion_length` | what `dr_grpo` divides by: the generation limit, never the padded length |
| `loss_scale` | multiplies w and u; 1 / gradient accumulation belongs here |
| `token_weights` | your own w, times the mask: then none of the above is required or applied, the entropy bonus follows it |

With the counts, splitting a batch into micro-batches or over ranks changes nothing; `bnpo` alone depends on the split. A sequence
without an active token adds 0 and still counts in B. Without any active token the loss is 0 and so is every gradient. DAPO's and
CISPO's papers normalise over a prompt's answers, here (as in TRL) it is over the batch. Dr. GRPO's paper also has
`group_advantages(..., scale_rewards="none")`.

`entropy_aggregation`: u is w (`"loss"`), or `loss_scale` m / max(sum m, 1) of this call (`"token_mean"`, TRL's); for `bnpo` the two are
one.

## Which options act

{options}

yes: acts. beta: acts where `beta` > 0. k3: acts where `beta` > 0 with estimator `k3`; k3\\*: and with `kl_bias_correction` alone.
entropy: acts where `entropy_coef` is not 0. -: accepted, validated and ignored, down to the last bit. raises: see below. With
`token_weights` the rows of counts, lengths and scales are ignored under every loss type. `kl_bias_correction` also brings `old_logps`,
the level and `max_log_ratio` into the KL term, whatever the loss type.

{limits}

These ranges hold under every loss type, also where the option does nothing. `epsilon_high=None` means epsilon. TRL's defaults differ in
two: `loss_type` is `"dapo"` there, and the bias-corrected KL (`use_bias_correction_kl`) is on since 1.16.

## Levels of the ratio

{levels}

Every loss type takes every level. `reinforce` and `vespo` have no such ratio in their policy term: there the level matters to the
bias-corrected KL alone.

**Two sweeps.** At level `token` a token's gradient follows from its own row of logits, so loss and gradient can come from one visit
(`one_pass`). At `sequence`, `sequence_token` and for `vespo` it needs the log-probs of the whole sequence first: all rows are read once
for them, then once more for the gradient, as by default at level `token`. Therefore `one_pass` raises there.

## KL estimators

{kl}

The right column is the expectation of the gradient over samples of the current policy (a test compares it with the closed form). So
`k1` as a penalty only adds noise, and `k3`, although its *value* is unbiased for KL(policy || reference), descends the other direction;
`k2` and the bias-corrected `k3` descend KL(policy || reference). The output field `kl` is K before beta, filled whenever `ref_logps` is
given, also at `beta=0`; the policy's factors f do not multiply the KL term.

**The sign.** With r = policy / reference, k3 is 1/r - 1 + log r (DeepSeekMath eq. 4), never negative. One widely read summary of GRPO
prints "log r - (r - 1)", which is never positive and is not the estimator.

**Bias correction** (DeepSeek-V3.2, arXiv 2512.02556) multiplies k3 by the ratio at the chosen level: unclipped, and before `delta`.

**Overflow.** What is exponentiated, log rho (at sequence levels the mean over tokens) and the d of `k3`, is held within +-80;
`max_log_ratio` lowers both bounds. At exactly the bound the gradient passes, beyond it it is 0. `k1`, `k2` and `abs` are never held.

## What raises, and why

{raises}

Advantages, old and reference log-probs and weights that require grad raise too: they are constants of the loss, detach them.
"""

if __name__ == "__main__":
    main()
