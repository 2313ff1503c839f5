"""How often operators of ours run under some code, and on logits of which dtype."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Sweeps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "grpo_kernels":
            name = function.__name__.removesuffix(".default")
            self.counts[name] += 1
            # after the backend's name
            self.dtypes |= {args[1].dtype} if len(args) > 1 and isinstance(args[1], Tensor) and name.startswith(("log", "loss")) else set()
        return function(*args, **(kwargs or {}))
