"""Types of the native module (csrc/bindings.cpp). An address is 0 where a tensor is absent."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, type_check_only

Address: TypeAlias = int
Addresses: TypeAlias = Sequence[int]  # in the order of the members of the struct in csrc/kernels.h or csrc/objective.h
Shape: TypeAlias = tuple[int, int, int, int]  # dtype code, batch, time, vocab
Rows: TypeAlias = tuple[int, int, int]  # address, strides over batch and time in elements

@type_check_only
class Kernels(Protocol):
    """A face of the kernels. `where` to run is a number of threads on the CPU, (device, stream) under CUDA."""

    def logprobs_forward(self, shape: Shape, logits: Rows, targets: Addresses, outputs: Addresses, where: object, /) -> None: ...
    def objective(
        self,
        rows: int,
        logps: Address,
        entropy: Address,
        inputs: Addresses,
        active: Address,
        params: Sequence[float],
        outputs: Addresses,
        where: object,
        /,
    ) -> None: ...
    def logprobs_backward(
        self,
        shape: Shape,
        logits: Rows,
        targets: Addresses,
        saved: Addresses,
        dlogps: Address,
        dentropy: Address,
        dlogits: Rows,
        where: object,
        /,
    ) -> None: ...
    def loss_and_grad(
        self,
        shape: Shape,
        logits: Rows,
        targets: Addresses,
        inputs: Addresses,
        params: Sequence[float],
        row_outputs: Addresses,
        token_outputs: Addresses,
        dlogits: Rows,
        where: object,
        /,
    ) -> None: ...
    def scale(self, shape: Shape, dlogits: Rows, factor: Address, where: object, /) -> None: ...
    def group_advantages(
        self,
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
        where: object,
        /,
    ) -> None: ...
    def process_advantages(
        self,
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
        normalised: Address,  # scratch, as many doubles as values
        out: Address,
        where: object,
        /,
    ) -> None: ...

@type_check_only
class CudaKernels(Kernels, Protocol):
    toolkit: str  # version of nvcc
    def force_split(self, split: int, /) -> None: ...

interface: int
cpu: Kernels
cuda: CudaKernels  # missing in a build without CUDA

def isa() -> str: ...
def isas() -> tuple[str, ...]: ...
def cuda_archs() -> tuple[int, ...]: ...
