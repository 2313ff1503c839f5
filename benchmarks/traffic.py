"""Bytes counted in the open: what the operators that ran read and write of tensors as large as the logits.

A count, not a measurement: exact, the same on every machine, and it sees the hidden copy that a time does not explain. It takes each
operator for itself, as if nothing stayed in a cache between two. Compiled code shows it no operators.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Our operators take results as arguments: (reads, writes) of the logits' bytes. scale_ leaves at once where the factor is 1, as here.
OURS = {
    "logprobs_forward": (1, 0),
    "logprobs_backward": (1, 1),
    "logprobs_backward_": (1, 1),
    "loss_and_grad": (1, 1),
    "loss_and_grad_": (1, 1),
    "scale_": (0, 0),
}
# Elements named by an index. Autograd adds them up in place, out of place only under a mode like this one: not counted.
TOUCH_FEW = ("gather", "scatter_", "scatter_add", "scatter_add_")
FROM_NOTHING = ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "full", "full_like", "fill_", "zero_")
ALLOCATE = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class Traffic(TorchDispatchMode):
    """`with Traffic(logits) as traffic: ...`; then `traffic.bytes`."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits_bytes = logits.nbytes
        self.smallest = logits[0].numel() // 2  # TRL works on one sequence at a time; nothing per token comes near
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace == "grpo_kernels":
            self.bytes += sum(OURS.get(name, (0, 0))) * self.logits_bytes
        elif not (func.is_view or name in ALLOCATE or name in TOUCH_FEW or name in ("detach", "set_")):
            inputs = [] if name in FROM_NOTHING else tree_leaves((args, kwargs))
            self.bytes += sum(self._size(x) for x in (*inputs, *tree_leaves(result)))
        return result

    def _size(self, x: Any) -> int:
        """Bytes of a large tensor; one that is expanded has no more than its storage."""
        if not isinstance(x, Tensor) or x.numel() < self.smallest:
            return 0
        return min(x.nbytes, x.untyped_storage().nbytes())
