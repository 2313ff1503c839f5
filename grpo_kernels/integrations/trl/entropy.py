"""TRL's entropy bonus: its coefficient in a step, what it logs, and the controller that adapts it (TRL 1.16)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["entropy_coefficient", "log_entropy_bonus"]


def entropy_coefficient(trainer: Any) -> float:
    """What the bonus is multiplied by in this step: 0 where the controller has measured an entropy above its target."""
    if not getattr(trainer, "_entropy_bonus_enabled", False):
        return 0.0
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
        return 0.0
    return float(trainer.entropy_coef)


def log_entropy_bonus(trainer: Any, policy_loss: Tensor, entropy: Tensor, mask: Tensor) -> None:
    """Logs the loss without the bonus and the coefficient; at the end of a step the controller moves the coefficient of the next one.

    policy_loss (): as TRL scales it. entropy, mask (B, T): the tokens that the bonus runs over.
    """
    args, accelerator = trainer.args, trainer.accelerator
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    logged["policy_loss"].append(accelerator.gather(policy_loss).nanmean().item())
    if not trainer.model.training:
        return
    if trainer.use_adaptive_entropy:
        window = torch.stack([(entropy * mask).sum(), mask.sum().to(entropy.dtype)])
        if trainer._entropy_window_stats is not None:
            window = window + trainer._entropy_window_stats
        trainer._entropy_window_stats = window
        if accelerator.sync_gradients:
            total, count = accelerator.reduce(window, reduction="sum").tolist()
            measured = total / max(count, 1.0)
            if measured <= args.entropy_target:
                trainer.entropy_coef = min(trainer.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
            else:
                trainer.entropy_coef = max(trainer.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
            trainer._last_world_entropy, trainer._entropy_window_stats = measured, None
    if accelerator.sync_gradients:
        logged["entropy_coef"].append(trainer.entropy_coef)
