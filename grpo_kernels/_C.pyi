"""Types of the native module (csrc/bindings.cpp). An address is 0 where a tensor is absent."""

from collections.abc import Sequence
from typing import TypeAlias

Address: TypeAlias = int
Addresses: TypeAlias = Sequence[int]  # in the order of the members of the struct in csrc/kernels.h or csrc/objective.h
Shape: TypeAlias = tuple[int, int, int, int]  # dtype code, batch, time, vocab
Rows: TypeAlias = tuple[int, int, int]  # address, strides over batch and time in elements

interface: int

def isa() -> str: ...
def isas() -> tuple[str, ...]: ...
def cuda_archs() -> tuple[int, ...]: ...
def logprobs_forward(shape: Shape, logits: Rows, targets: Addresses, outputs: Addresses, num_threads: int, /) -> None: ...
def objective(
    rows: int,
    logps: Address,
    entropy: Address,
    inputs: Addresses,
    active: Address,
    params: Sequence[float],
    outputs: Addresses,
    num_threads: int,
    /,
) -> None: ...
def logprobs_backward(
    shape: Shape,
    logits: Rows,
    targets: Addresses,
    saved: Addresses,
    dlogps: Address,
    dentropy: Address,
    dlogits: Rows,
    num_threads: int,
    /,
) -> None: ...
def loss_and_grad(
    shape: Shape,
    logits: Rows,
    targets: Addresses,
    inputs: Addresses,
    params: Sequence[float],
    row_outputs: Addresses,
    token_outputs: Addresses,
    dlogits: Rows,
    num_threads: int,
    /,
) -> None: ...
def scale(shape: Shape, dlogits: Rows, factor: Address, num_threads: int, /) -> None: ...
def group_advantages(
    values: Address,
    order: Address,
    offsets: Address,
    count: int,
    groups: int,
    scale: int,
    baseline: int,
    ddof: int,
    eps: float,
    out: Address,
    /,
) -> None: ...
def process_advantages(
    values: Address,
    order: Address,
    offsets: Address,
    count: int,
    groups: int,
    scale: int,
    baseline: int,
    ddof: int,
    eps: float,
    step_ends: Address,
    batch: int,
    steps: int,
    time: int,
    out: Address,
    /,
) -> None: ...
