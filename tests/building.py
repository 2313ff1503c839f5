"""What the tests of packaging share: commands away from the checkout's influence, sdists, wheels, environments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE = f"grpo_kernels/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "grpo_kernels/__init__.py").read_text(), flags=re.MULTILINE)[1]
UNOPTIMISED = "-DCMAKE_CXX_FLAGS_RELEASE=-O0"
NO_NVCC = "/no/such/nvcc"


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command away from the checkout's influence and returns it with stdout and stderr together in `stdout`."""
    theirs = ("PYTHON", "CMAKE_", "MAX_JOBS", "GRPO_KERNELS_", "TORCH_CUDA", "CUDAARCHS")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**inherited, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800
    )


def checked(process: subprocess.CompletedProcess[str]) -> str:
    assert process.returncode == 0, process.stdout
    return process.stdout


def unwrapped(log: str) -> str:
    """CMake breaks its lines."""
    return " ".join(log.split())


def build_wheel(source: Path, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Without isolation, with the tools of this environment and no network; without nvcc, unless `env` says otherwise."""
    options = ("--verbose", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--wheel-dir", out)
    defaults = {"CMAKE_ARGS": UNOPTIMISED, "CUDACXX": NO_NVCC}
    return run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=out.parent, **{**defaults, **env})


def make_environment(folder: Path, wanted: Callable[[str], bool]) -> Path:
    """A virtual environment that shares those packages of this one whose files are wanted. Returns its python."""
    checked(run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent))
    site = site_packages(folder)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if wanted(path.name) and path.name != "__pycache__":
            (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


def site_packages(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def not_ours(name: str) -> bool:
    return "grpo" not in name.lower()


def build_sdist(out: Path) -> Path:
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    checked(run(sys.executable, "-c", build, cwd=ROOT, PATH=""))
    return next(out.glob("grpo_kernels-*.tar.gz"))


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / sdist.name.removesuffix(".tar.gz")
