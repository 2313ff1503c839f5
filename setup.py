"""Builds grpo_kernels._C with CMake and ninja. Everything that is not the build stands in pyproject.toml.

torch is never imported here: the module links nothing of it, so one wheel serves every torch and a build environment needs none.
Asking for metadata runs no line of the CMake part.

A wheel is built in an empty temporary folder. Nothing left in the source tree by another Python, compiler or commit (build/, an
in-place module) can reach it. Only a build in place (editable installs) keeps its objects, in build/inplace, to be quick; that
folder is emptied when anything that configured it changes.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent

CXX_VARIABLES = ("CXX", "CXXFLAGS", "LDFLAGS")
# what cmake/*.cmake and CMake read
CUDA_VARIABLES = ("GRPO_KERNELS_CUDA", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAFLAGS", "CUDAHOSTCXX", "CUDAARCHS", "TORCH_CUDA_ARCH_LIST")


class BuildInTemporaryFolder(build):
    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="grpo-kernels-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


class BuildWithCMake(build_ext):
    def run(self) -> None:
        self.cmake_folder = ROOT / "build" / "inplace" if self.inplace else Path(self.build_temp)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        folder, configure = self.cmake_folder, self._configure_command()
        made_by = folder / "made-by.txt"
        if not made_by.exists() or made_by.read_text() != _identity(configure):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            made_by.write_text(_identity(configure))

        # cmake itself reads CMAKE_BUILD_PARALLEL_LEVEL; MAX_JOBS is torch's word for the same thing.
        jobs = str(self.parallel or os.environ.get("MAX_JOBS", ""))
        _run(configure)
        _run([configure[0], "--build", str(folder), *(["--parallel", jobs] if jobs else [])])

        module = Path(self.get_ext_fullpath(ext.name))
        module.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / module.name, module)  # raises where CMake made a module for another Python, or none

    def _configure_command(self) -> list[str]:
        try:
            import pybind11
        except ImportError:
            raise CompileError("pybind11 is needed to build without build isolation: pip install setuptools cmake ninja pybind11") from None
        return [
            _tool("cmake"),
            *("-S", str(ROOT), "-B", str(self.cmake_folder), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),  # last, so that the user's word wins
        ]


def _tool(name: str) -> str:
    """Path of cmake or ninja: of the Python package where it is installed (a virtual environment need not be on PATH), else on PATH."""
    try:
        package = __import__(name)
        folder = getattr(package, "CMAKE_BIN_DIR", None) or package.BIN_DIR
    except (ImportError, AttributeError):
        folder = None
    path = shutil.which(name, path=folder) or shutil.which(name)
    if path is None:
        raise CompileError(f"{name} is needed to build without build isolation: pip install setuptools cmake ninja pybind11")
    return path


def _identity(configure: list[str]) -> str:
    """Everything that decides what a build folder holds, beside the sources, which ninja watches."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, ("c++", "g++", "clang++")), "")]
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    except OSError:
        version = ""
    flags = [f"{name}={os.environ.get(name, '')}" for name in (*CXX_VARIABLES, *CUDA_VARIABLES)]
    return "\n".join([sys.version, version, *flags, str(shutil.which("nvcc")), *configure])


def _run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    if subprocess.run(command).returncode != 0:
        raise CompileError(f"grpo_kernels._C was not built: the lines above, after '{Path(command[0]).name} {command[1]} ...', say why")


setup(
    ext_modules=[Extension("grpo_kernels._C", sources=[])],
    cmdclass={"build": BuildInTemporaryFolder, "build_ext": BuildWithCMake},
)
