"""`python -m grpo_kernels`: what a bug report needs. It works, and says why, where the native module is missing or broken."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import torch

from grpo_kernels import __version__, available_backends


def report() -> str:
    """The environment report, one `name  value` a line.

    >>> report().splitlines()[0].startswith("grpo_kernels")
    True
    """
    lines = [("grpo_kernels", f"{__version__} in {Path(__file__).resolve().parent}"), ("python", sys.version)]
    lines += [(name, _version(name)) for name in ("torch", "numpy", "triton", "transformers")]
    lines += [("platform", platform.platform()), ("cpu", f"{_cpu_model()}, {os.cpu_count()} logical cores")]
    lines += [*_native_module(), ("torch threads", str(torch.get_num_threads())), *_gpus()]
    lines += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(("GRPO_KERNELS_", "OMP_", "TRITON_"))]
    lines += [(f"backend {name}", state) for name, state in available_backends().items()]
    return "\n".join(f"{name:<22} {value}" for name, value in lines)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _native_module() -> list[tuple[str, str]]:
    try:
        native = importlib.import_module("grpo_kernels._C")
        archs = native.cuda_archs()
        return [
            ("instruction set", f"{native.isa()} of {', '.join(native.isas())}"),
            ("cuda archs in wheel", f"{', '.join(map(str, archs))} by nvcc {native.cuda.toolkit}" if archs else "none"),
        ]
    except Exception as error:  # whatever is wrong with it is what the report is for
        return [("native module", f"{type(error).__name__}: {error}")]


def _gpus() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [
            ("gpu", f"none usable (torch was built for CUDA {torch.version.cuda})" if torch.version.cuda else "none (a CPU build of torch)")
        ]
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(f"gpu {index}", f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB") for index, p in enumerate(properties)]


if __name__ == "__main__":
    print(report())
