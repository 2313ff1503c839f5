"""Every launch of the Triton backend without a GPU: which kernel, with what argument types and constants. Needs no interpreter either.

`compiles` says how many compiles a run on a GPU would make, `sources` is what an ahead-of-time build compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.triton import TritonBackend

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
SCALARS = {"int32": "i32", "int64": "i64", "float32": "fp32", "fp32": "fp32", "float64": "fp64", "fp64": "fp64"}
PARAMS = [0.0, 0.2, 0.2, float("inf"), float("inf"), 1.0, 1.05, 0.0, 80.0, 0.04]


class Launch(NamedTuple):
    """What Triton's compile cache is keyed on, as no argument is specialised: triton.compiler.ASTSource(kernel, signature, constants)."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]  # argument -> type, "constexpr" for constants
    constants: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class Recorder(TritonBackend):
    """The backend on a GPU of some architecture, with the kernels left out."""

    def __init__(self, architecture: int | str) -> None:
        super().__init__("cuda", architecture)
        self.launches: list[Launch] = []

    def queue(self, kernel, programs, arguments, constants, options, like) -> None:
        parameters = kernel.fn.__annotations__
        names = kernel.arg_names
        assert len(names) == len(arguments) + len(constants), f"{kernel.fn.__name__}: {len(arguments)} arguments for {names}"
        signature = [
            (name, TYPES[value.dtype] if isinstance(value, Tensor) else SCALARS[str(parameters[name]).removeprefix("triton.language.")])
            for name, value in zip(names, arguments)
        ]
        constexprs = [(name, "constexpr") for name in constants]
        self.launches.append(Launch(kernel, (*signature, *constexprs), tuple(constants.items()), tuple(options.items())))


def launches(
    architecture: int | str,
    dtype: torch.dtype,
    *,
    shape: tuple[int, int, int] = (1, 2, 151936),
    aligned: bool = True,
    optional: bool = True,
    params: list[float] = PARAMS,
) -> list[Launch]:
    """One launch of every kernel, over logits of that shape. `optional`: whether the optional inputs are given."""
    backend = Recorder(architecture)
    batch, time, vocab = shape
    flat = torch.empty(batch * time * vocab + 1, dtype=dtype, device="cpu")
    logits = flat[0 if aligned else 1 :][: batch * time * vocab].view(shape)

    def token(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(batch, time, dtype=dtype)

    def given(x: Tensor) -> Tensor | None:
        return x if optional else None

    ids, active, temperature = token(torch.int64), given(token(torch.uint8)), token()
    inputs = (token(), given(token()), given(token()), given(token()), token(), given(token()))
    stats, loss = (token(), token(), token(), token()), (token(), token())
    metrics = (token(), token(torch.int8))
    backend.logprobs_forward(logits, ids, active, temperature, *stats)
    backend.objective(token(), given(token()), *inputs, active, params, *loss, token(), *metrics)
    backend.logprobs_backward(logits, ids, active, temperature, *stats[1:], token(), given(token()), logits)
    backend.loss_and_grad(logits, ids, active, temperature, *inputs, params, token(), token(), *loss, *metrics, logits)
    backend.scale(logits, torch.ones(()))
    return backend.launches


def advantage_launches(architecture: int | str) -> list[Launch]:
    """Every kernel of group_advantages: outcome and process supervision."""
    backend = Recorder(architecture)
    values, offsets = torch.zeros(4, dtype=torch.float64), torch.tensor([0, 2, 4])
    for steps, out in ((None, torch.empty(4)), (torch.zeros(2, 2, dtype=torch.int64), torch.empty(2, 5))):
        backend.group_advantages(values, None, offsets, "batch", "mean", 1, 1e-4, steps, out)
    return backend.launches


def source(launch: Launch) -> Any:
    """The launch as triton.compile takes it, on Triton 3.2 and on later ones."""
    from triton.compiler import ASTSource

    create: Callable[..., Any] = ASTSource
    constants = dict(launch.constants)
    try:
        return create(fn=launch.kernel, signature=dict(launch.signature), constexprs=constants)
    except TypeError:
        signature = {name: kind for name, kind in launch.signature if kind != "constexpr"}
        return create(fn=launch.kernel, signature=signature, constants=constants)
