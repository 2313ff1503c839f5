"""Every launch of the Triton backend without a GPU: what Triton would look up in its compile cache, and compile if it is not there.

Triton's own binding of arguments says what that is, so an ahead-of-time build of these launches compiles what a GPU would run. Not to be
used under TRITON_INTERPRET=1, where there is nothing to compile: tests call it in a process of its own.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.triton import TritonBackend

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PARAMS = (0.0, 0.2, 0.2, math.inf, math.inf, 1.0, 1.05, 0.0, 80.0, 0.04)  # ObjectiveParams.for_kernels()


class Launch(NamedTuple):
    kernel: Any  # triton.JITFunction
    types: tuple[str, ...]  # of the arguments that are no constants, in order: "*bf16", "i64", ...
    specialisations: tuple[str, ...]  # what Triton saw in their values ("D": a multiple of 16, "1"); has to be empty
    constants: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class Recorder(TritonBackend):
    """The backend on a GPU of some architecture, with the running of kernels left out."""

    def __init__(self, architecture: int) -> None:
        super().__init__("cuda", architecture)
        self.launches: list[Launch] = []

    def queue(self, kernel, programs, arguments, constants, options, like) -> None:  # type: ignore[no-untyped-def]
        types, seen = bind(kernel, arguments, constants, self.architecture)
        self.launches.append(Launch(kernel, types, seen, tuple(constants.items()), tuple(options.items())))


def bind(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, int], architecture: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Types and specialisations of arguments, by Triton's own binder."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(target(architecture)))
    _, key, *_ = binder(*arguments, **constants)
    if isinstance(key, list):  # since Triton 3.3: (type, specialisation) of each
        typed = [(kind, seen) for kind, seen in key if kind != "constexpr"]
        return tuple(kind for kind, _ in typed), tuple(seen for _, seen in typed if seen)
    return tuple(key[: len(arguments)]), tuple(key[len(arguments) :])


def target(architecture: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", architecture, 32)


def source(launch: Launch) -> Any:
    """The launch as triton.compile takes it."""
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    signature, constants = dict(zip(names, launch.types)), dict(launch.constants)
    try:
        return ASTSource(fn=launch.kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    except TypeError:  # before Triton 3.3
        return ASTSource(fn=launch.kernel, signature=signature, constants=constants)


def row_launches(
    architecture: int,
    dtype: torch.dtype,
    *,
    shape: tuple[int, int, int] = (1, 2, 151936),
    aligned: bool = True,
    optional: bool = True,
    params: tuple[float, ...] = PARAMS,
    device: str = "cpu",
) -> list[Launch]:
    """One launch of every kernel over rows and tokens. `optional`: whether the optional inputs are given."""
    backend = Recorder(architecture)
    batch, time, vocab = shape
    flat = torch.empty(batch * time * vocab + 1, dtype=dtype, device=device)
    logits = flat[0 if aligned else 1 :][: batch * time * vocab].view(shape)

    def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, time, dtype=dtype, device=device)

    def given(x: Tensor) -> Tensor | None:
        return x if optional else None

    ids, active, temperature = tokens(torch.int64), given(tokens(torch.uint8)), tokens()
    inputs = (tokens(), given(tokens()), given(tokens()), given(tokens()), tokens(), given(tokens()))
    numbers = [float(x) for x in params]
    stats, loss, metrics = (tokens(), tokens(), tokens()), (tokens(), tokens()), (tokens(), tokens(torch.int8))
    backend.logprobs_forward(logits, ids, active, temperature, tokens(), *stats)
    backend.objective(tokens(), given(tokens()), *inputs, active, numbers, *loss, tokens(), *metrics)
    backend.logprobs_backward(logits, ids, active, temperature, *stats, tokens(), given(tokens()), logits)
    backend.loss_and_grad(logits, ids, active, temperature, *inputs, numbers, tokens(), tokens(), *loss, *metrics, logits)
    backend.scale(logits, torch.empty((), device=device))
    return backend.launches


def advantage_launches(
    architecture: int, *, groups: int = 2, generations: int = 3, steps: int = 2, time: int = 5, optional: bool = True
) -> list[Launch]:
    """Every kernel of group_advantages: outcome and process supervision. `optional`: whether values come in an order of their own."""
    backend = Recorder(architecture)
    for count, step_ends in ((1, None), (steps, torch.zeros(groups * generations, steps, dtype=torch.int64))):
        values = torch.zeros(groups * generations * count, dtype=torch.float64)
        order = torch.arange(len(values)) if optional else None
        offsets = torch.arange(groups + 1) * generations * count
        out = torch.empty(len(values) if step_ends is None else (groups * generations, time))
        for scale in ("group", "batch"):
            backend.group_advantages(values, order, offsets, scale, "mean", 1, 1e-4, step_ends, out)
    return backend.launches


def all_launches(architecture: int, vocab: int = 151936) -> dict[tuple[str, str, str], Launch]:
    """(kernel, dtype, alignment class) -> what is compiled for it. Kernels that read no logits have neither, but for the dtype that
    `normalise` writes."""
    found = {}
    for dtype in DTYPES:
        for aligned in (True, False):
            for launch in row_launches(architecture, dtype, shape=(1, 2, vocab), aligned=aligned):
                rows = "LANES" in dict(launch.constants)
                key = (str(dtype).removeprefix("torch."), "aligned" if aligned else "unaligned") if rows else ("", "")
                found[(launch.name, *key)] = launch
    for launch in advantage_launches(architecture):
        found[launch.name, launch.types[-1].lstrip("*") if launch.name == "normalise" else "", ""] = launch
    return found
