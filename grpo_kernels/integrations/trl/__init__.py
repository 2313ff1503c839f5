"""TRL's GRPOTrainer on these kernels: same configuration, same metrics, logits never in memory.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer    # in place of trl.GRPOTrainer

or, where a script of somebody else's names the trainer, `patch_trl()` before it is imported; or `FusedGRPOMixin` in front of a subclass of
yours. What TRL's options become, and where numbers differ, is in docs/trainers.md.
"""

from __future__ import annotations

import sys
from typing import Any

from grpo_kernels.integrations.trl.config import SUPPORTED_VERSIONS, semantics
from grpo_kernels.integrations.trl.trainer import FusedGRPOMixin

__all__ = ["SUPPORTED_VERSIONS", "FusedGRPOMixin", "FusedGRPOTrainer", "patch_trl", "unpatch_trl"]


def __getattr__(name: str) -> Any:
    """FusedGRPOTrainer, made when it is first asked for: TRL takes seconds to import."""
    if name != "FusedGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import trl

    semantics(trl.__version__)
    from trl.trainer.grpo_trainer import GRPOTrainer

    class FusedGRPOTrainer(FusedGRPOMixin, GRPOTrainer):
        __doc__ = FusedGRPOMixin.__doc__
        __module__ = __name__

    globals()[name] = FusedGRPOTrainer
    return FusedGRPOTrainer


def patch_trl() -> None:
    """Let the name GRPOTrainer mean FusedGRPOTrainer, in TRL and wherever it was imported. Calling it again changes nothing.

    Subclasses of GRPOTrainer that exist already, TRL's own experimental ones among them, stay as they are: those take `FusedGRPOMixin`.

    Raises:
        RuntimeError: a version of TRL that is not supported.
        ImportError: TRL is not installed.
    """
    import trl

    fused = sys.modules[__name__].FusedGRPOTrainer
    original = fused.__mro__[2]
    trl.GRPOTrainer  # noqa: B018  TRL imports its trainers when they are asked for
    for module in list(sys.modules.values()):
        if module is not None and not getattr(module, "__name__", "").startswith("grpo_kernels"):
            for name in [name for name, value in list(vars(module).items()) if value is original]:
                setattr(module, name, fused)
                _patched.append((module, name, original))


def unpatch_trl() -> None:
    """Give back the names that were taken; what was imported in between keeps what it got."""
    while _patched:
        setattr(*_patched.pop())


_patched: list[tuple[Any, str, Any]] = []
