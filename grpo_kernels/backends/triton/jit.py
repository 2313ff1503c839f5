"""triton.jit as these kernels need it: nothing specialises, and Triton's interpreter gets through a row in milliseconds.

The interpreter patches the whole language anew for every jitted function that is called within a kernel, Triton's own `tl.sum` among
them: 1 to 2 ms each, a hundred times a row. So there, and only there, what a kernel calls is plain Python.
"""
# mypy: disable-error-code="no-untyped-def"
# (no `from __future__ import annotations`: the interpreter reads tl.constexpr from the annotation itself)

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def kernel(function: Callable[..., None]) -> Any:
    """An entry point. Neither the value of an argument nor its alignment makes a compile of its own."""
    parameters = inspect.signature(function).parameters.values()
    return triton.jit(function, do_not_specialize=[p.name for p in parameters if p.annotation is not tl.constexpr])


@kernel
def _nothing():
    pass


INTERPRETED = not isinstance(_nothing, triton.JITFunction)  # TRITON_INTERPRET=1 is read by triton.jit


def device(function: Callable[..., Any]) -> Any:
    """What kernels call."""
    return function if INTERPRETED else triton.jit(function)


if INTERPRETED:

    def highest(x, axis):
        return tl.reduce(x, axis, tl.standard._elementwise_max)

    def lowest(x, axis):
        return tl.reduce(x, axis, tl.standard._elementwise_min)

    def total(x, axis):
        return tl.reduce(x, axis, tl.standard._sum_combine)

else:
    highest, lowest, total = tl.max, tl.min, tl.sum
