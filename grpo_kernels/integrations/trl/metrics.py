"""What TRL logs of a step, under its names and with its values, from our outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from grpo_kernels import grpo_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_kernels import GRPOLossOutput
    from grpo_kernels.integrations.trl.config import Semantics

__all__ = ["log_step"]

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def log_step(trainer: Any, version: Semantics, inputs: dict[str, Tensor], mask: Tensor, output: GRPOLossOutput) -> None:
    """KL, entropy and clip fractions; one transfer to the host for all of them."""
    advantages = inputs["advantages"]
    level = trainer.importance_sampling_level if advantages.dim() == 1 else "token"  # with advantages a token, TRL counts tokens
    ranks = dist.group.WORLD if version.global_metrics and trainer.accelerator.num_processes > 1 else None
    output = output._replace(clipped=_after_delta(trainer, output.clipped, advantages))
    values = grpo_metrics(output, mask, importance_sampling_level=level, group=ranks)
    if not version.global_metrics:
        values["clip_ratio/low_min"], values["clip_ratio/high_max"] = values["clip_ratio/low_mean"], values["clip_ratio/high_mean"]
        of_ranks = trainer.accelerator.gather(torch.stack(list(values.values()))).view(-1, len(values))
        reduce = {"clip_ratio/low_min": torch.amin, "clip_ratio/high_max": torch.amax}
        values = {name: reduce.get(name, torch.mean)(of_ranks[:, i], 0) for i, name in enumerate(values)}

    numbers = dict(zip(values, torch.stack(list(values.values())).tolist()))
    names = {"entropy": "entropy"}
    if trainer.beta != 0:
        names["kl"] = "kl"
    if trainer.loss_type in CLIPPED:
        names |= {name: name for name in numbers if name.startswith("clip_ratio/")}
    elif trainer.loss_type == "cispo":
        names["clip_ratio/high_mean"] = "cispo_clip_ratio"
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    for ours, theirs in names.items():
        logged[theirs].append(numbers[ours])
    if trainer.loss_type == "vespo":
        logged["vespo/phi_seq_mean"].append(_mean_phi(trainer, version, inputs, mask, output))


def _after_delta(trainer: Any, clipped: Tensor, advantages: Tensor) -> Tensor:
    """TRL counts the ratio after its cap, we count it before: they differ where the cap lies below an edge of the clip."""
    delta = trainer.args.delta
    if delta is None or trainer.loss_type not in CLIPPED:
        return clipped
    if delta <= 1 + trainer.epsilon_high:
        clipped = clipped.clamp(max=0)
    if delta < 1 - trainer.epsilon_low:
        clipped = torch.where((advantages if advantages.dim() == 2 else advantages[:, None]) < 0, -1, clipped).to(torch.int8)
    return clipped


def _mean_phi(trainer: Any, version: Semantics, inputs: dict[str, Tensor], mask: Tensor, output: GRPOLossOutput) -> float:
    """The mean of vespo's weights, which are made inside the loss here: by TRL's own function once more, (B, T) numbers."""
    args, advantages = trainer.args, inputs["advantages"]
    phi = trainer.get_gamma_weights(
        advantages=advantages if advantages.dim() == 2 else advantages[:, None],
        log_ratio_per_token=output.logps - inputs.get("old_per_token_logps", output.logps),
        mask=mask,
        importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
        k_pos=args.vespo_k_pos,
        lambda_pos=args.vespo_lambda_pos,
        k_neg=args.vespo_k_neg,
        lambda_neg=args.vespo_lambda_neg,
    )
    if not version.global_metrics:
        return trainer.accelerator.gather(phi).nanmean().item()
    weight = torch.ones_like(phi) if phi.shape[1] == 1 else mask
    total, count = trainer.accelerator.reduce(torch.stack([(phi * weight).sum(), weight.sum().float()]), reduction="sum")
    return (total / count.clamp(min=1)).item()
