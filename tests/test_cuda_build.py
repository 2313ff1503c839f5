"""The promises about the CUDA kernels in a wheel: when they are inside, for which GPUs, and what is said when they are not.

`make test` installs a wheel with CUDA kernels, built by the nvcc of the system or by the one of nvcc.txt: that one is looked at. Another
is a minute or two of nvcc, and left to `make test-all`.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from building import MODULE, ROOT, build_sdist, build_wheel, checked, make_environment, not_ours, run, site_packages, unpack, unwrapped
from grpo_kernels.backends import native

NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
CHOSEN = [name for name in ("GRPO_KERNELS_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDAARCHS", "CMAKE_ARGS") if os.environ.get(name)]

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def cmake() -> str:
    import cmake as package

    return str(Path(package.CMAKE_BIN_DIR) / "cmake")


def script(name: str, tmp_path: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """One of cmake/*.cmake by itself, which needs no compiler."""
    return run(cmake(), *options, "-P", ROOT / "cmake" / name, cwd=tmp_path, **env)


# --- For which GPUs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "env", "expected"),
    [
        (["-DTOOLKIT_VERSION=12.6"], {}, "80-real;90"),
        (["-DTOOLKIT_VERSION=12.8"], {}, "80-real;90-real;100"),
        (["-DTOOLKIT_VERSION=13.0"], {}, "80-real;90-real;100"),
        ([], {"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}, "80-real;90"),
        ([], {"TORCH_CUDA_ARCH_LIST": "8.6 9.0a 10.0a+PTX"}, "86-real;90a-real;100a"),
        ([], {"TORCH_CUDA_ARCH_LIST": "7.5 8.0 12.0"}, "80-real;120-real"),
        ([], {"TORCH_CUDA_ARCH_LIST": "9.0", "CUDAARCHS": "90a-real"}, "90a-real"),
        (["-DCMAKE_CUDA_ARCHITECTURES=86;89"], {"TORCH_CUDA_ARCH_LIST": "9.0", "CUDAARCHS": "80"}, "86;89"),
    ],
)
def test_the_users_architectures_win(options: list[str], env: dict[str, str], expected: str, tmp_path: Path) -> None:
    said = checked(script("architectures.cmake", tmp_path, *options, **env))
    assert f"CUDA architectures: {expected}\n" in said
    assert ("7.5 is left out, the CUDA kernels need 8.0 or newer" in said) == ("7.5" in env.get("TORCH_CUDA_ARCH_LIST", ""))


@pytest.mark.parametrize(
    ("architectures", "said"), [("Hopper", "expected versions such as '8.0;9.0a;10.0+PTX', got 'Hopper'"), ("7.0", "nothing from 8.0 on")]
)
def test_architectures_that_cannot_be_are_refused(architectures: str, said: str, tmp_path: Path) -> None:
    process = script("architectures.cmake", tmp_path, TORCH_CUDA_ARCH_LIST=architectures)
    assert process.returncode != 0 and said in unwrapped(process.stdout), process.stdout


def readme_commands() -> list[tuple[dict[str, str], str]]:
    """Every `NAME=value ... pip install ...` of README's Install, as (variables, command)."""
    install = (ROOT / "README.md").read_text().split("## Install")[1].split("\n## ")[0]
    lines = re.findall(r"^((?:[A-Z_]+=\S+ )+)(pip install [^#\n]+)", install, flags=re.MULTILINE)
    return [(dict(pair.split("=", 1) for pair in variables.split()), command.strip()) for variables, command in lines]


@needs_nvcc
@pytest.mark.parametrize(("variables", "command"), readme_commands())
def test_commands_of_the_readme_configure_what_they_say(variables: dict[str, str], command: str, tmp_path: Path) -> None:
    """As far as CMake's -P goes: no compiler runs. The build that they begin is tested below, for one architecture."""
    options = shlex.split(variables.get("CMAKE_ARGS", ""))
    said = checked(script("architectures.cmake", tmp_path, "-DTOOLKIT_VERSION=13.0", *options, **variables))
    one = "TORCH_CUDA_ARCH_LIST" in variables or options
    assert f"CUDA architectures: {'90-real' if one else '80-real;90-real;100'}\n" in said
    assert set(variables) <= {"MAX_JOBS", "CMAKE_ARGS", "GRPO_KERNELS_CUDA", "TORCH_CUDA_ARCH_LIST"} and command.endswith(" .")


@needs_nvcc
def test_configuring_asks_no_gpu_and_takes_torchs_list(tmp_path: Path) -> None:
    import pybind11

    options = ("-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", "-DGRPO_KERNELS_CUDA=ON")
    log = checked(
        run(cmake(), *options, f"-DPython_EXECUTABLE={sys.executable}", cwd=tmp_path, TORCH_CUDA_ARCH_LIST="8.0 9.0a+PTX", CUDACXX=NVCC)
    )
    assert "CUDA architectures: 80-real;90a\n" in log
    rules = (tmp_path / "build/build.ninja").read_text()
    assert set(re.findall(r"arch=(compute_\w+),code=\[([\w,]+)\]", rules)) == {
        ("compute_80", "sm_80"),
        ("compute_90a", "compute_90a,sm_90a"),
    }
    assert "-lineinfo" in rules and "fast_math" not in rules and "cudart_static" in rules


# --- Which nvcc ---------------------------------------------------------------------------------------------------------------------

FIND = """
include({root}/cmake/toolkit.cmake)
find_toolkit()
message("nvcc=${{TOOLKIT_NVCC}} version=${{TOOLKIT_VERSION}} why=${{TOOLKIT_MISSING}}")
foreach(folder IN LISTS TOOLKIT_INCLUDE)
  message("include=${{folder}}")
endforeach()
"""


def find(tmp_path: Path, python: str | Path = sys.executable, **env: str) -> str:
    (tmp_path / "find.cmake").write_text(FIND.format(root=ROOT))
    return checked(run(cmake(), f"-DPython_EXECUTABLE={python}", "-P", tmp_path / "find.cmake", cwd=tmp_path, **env))


@pytest.fixture
def path_without_nvcc(tmp_path: Path) -> str:
    if Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("/usr/local/cuda is looked at wherever PATH leads")
    (tmp_path / "bin").mkdir()
    return str(tmp_path / "bin")


def test_without_any_nvcc_it_says_where_it_looked(path_without_nvcc: str, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment", lambda name: False)
    said = find(tmp_path, python, PATH=path_without_nvcc, CUDACXX="", CUDA_HOME="", CUDA_PATH="")
    assert "nvcc= " in said and "nvcc was not found on PATH, in CUDACXX or CUDA_HOME, nor as the Python package nvidia-cuda-nvcc" in said


@needs_nvcc
def test_the_nvcc_of_cuda_home_or_of_a_python_package_is_found(path_without_nvcc: str, tmp_path: Path) -> None:
    home = Path(NVCC).resolve().parents[1]
    package = home.parent
    if package.name != "nvidia":
        pytest.skip("nvcc is no Python package here")
    nothing = {"PATH": path_without_nvcc, "CUDACXX": "", "CUDA_PATH": ""}
    assert f"nvcc={home}/bin/nvcc version=" in find(tmp_path, **nothing, CUDA_HOME=str(home))
    python = make_environment(tmp_path / "environment", lambda name: False)
    (site_packages(tmp_path / "environment") / "nvidia").symlink_to(package)
    said = find(tmp_path, python, **nothing, CUDA_HOME="")
    assert re.search(r"nvcc=\S+/nvidia/cu13/bin/nvcc version=13\.", said), said


@needs_nvcc
def test_the_headers_of_the_toolkit_are_found(tmp_path: Path) -> None:
    folders = re.findall(r"include=(.*)", find(tmp_path, CUDACXX=NVCC))
    for header in ("cuda_fp16.h", "cuda_bf16.h", "driver_types.h", "nv/target"):
        assert any((Path(folder) / header).exists() for folder in folders), (header, folders)


def test_an_nvcc_that_is_too_old_makes_a_cpu_wheel_and_is_named(tmp_path: Path) -> None:
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.3, V12.3.107\n")
    old.chmod(0o755)
    said = unwrapped(script("cuda.cmake", tmp_path, CUDACXX=str(old)).stdout)
    assert f"This build is for CPUs only, without CUDA kernels: {old} is of CUDA 12.3, and 12.4 or newer is needed." in said
    process = script("cuda.cmake", tmp_path, CUDACXX=str(old), GRPO_KERNELS_CUDA="ON")
    assert process.returncode != 0 and f"GRPO_KERNELS_CUDA is ON, but {old} is of CUDA 12.3" in unwrapped(process.stdout)


# --- What is inside -----------------------------------------------------------------------------------------------------------------


def cubins(module: Path) -> tuple[set[str], set[str]]:
    """The machine code and the PTX in a module: ({"sm_80", ...}, {"sm_100"})."""
    tool = Path(importlib.import_module("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    listed = [checked(run(tool, option, module, cwd=module.parent)) for option in ("--list-elf", "--list-ptx")]
    elf, ptx = (set(re.findall(r"\.(sm_\w+)\.", text)) for text in listed)
    return elf, ptx


@needs_nvcc
def test_the_installed_wheel_has_cuda_kernels() -> None:
    native_module = importlib.import_module("grpo_kernels._C")
    module = Path(native_module.__file__)
    if module.parent == ROOT / "grpo_kernels" or CHOSEN:
        pytest.skip(f"built in place, or as told by {' '.join(CHOSEN)}")
    assert native_module.cuda_archs() == (80, 90, 100)
    assert cubins(module) == ({"sm_80", "sm_90", "sm_100"}, {"sm_100"})


@needs_nvcc
@pytest.mark.slow  # nvcc, for one architecture
def test_wheel_for_one_architecture(tmp_path: Path) -> None:
    source = unpack(build_sdist(tmp_path), tmp_path / "elsewhere")
    (variables,) = [v for v, command in readme_commands() if "--no-build-isolation" in command]
    log = checked(build_wheel(source, tmp_path / "out", CUDACXX=NVCC, **variables))
    assert f"CUDA kernels by {NVCC}" in unwrapped(log)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    python = make_environment(tmp_path / "environment", not_ours)
    zipfile.ZipFile(wheel).extractall(site_packages(tmp_path / "environment"))
    assert cubins(site_packages(tmp_path / "environment") / MODULE) == ({"sm_90"}, set())
    report = checked(run(python, "-m", "grpo_kernels", cwd=tmp_path))
    assert re.search(r"^cuda archs in wheel +90 by nvcc \d+\.\d+$", report, flags=re.MULTILINE), report
    assert re.search(r"^backend cpu +available$", report, flags=re.MULTILINE), report


# --- What is said where they cannot run -----------------------------------------------------------------------------------------------


def test_backend_cuda_says_why_it_is_not_available() -> None:
    archs = importlib.import_module("grpo_kernels._C").cuda_archs()
    if archs and torch.version.cuda and torch.cuda.is_available():
        pytest.skip("it may be available here")
    reason = "no CUDA kernels" if not archs else "built without CUDA" if torch.version.cuda is None else "no CUDA device"
    with pytest.raises(RuntimeError, match=reason):
        native.load("cuda")


@pytest.mark.parametrize(
    ("archs", "capabilities", "toolkit", "driver", "reason"),
    [
        ((80, 90), [(7, 5)], "13.0", 13000, "the newest device is sm_75; the CUDA kernels of this build need sm_80 or newer"),
        ((90,), [(8, 0), (8, 6)], "13.0", 13000, "the newest device is sm_86; .* need sm_90 or newer"),
        ((80,), [(9, 0)], "13.0", 12040, "the driver serves CUDA 12.4 and this build was made by nvcc 13.0: .* nvcc 12.x"),
        ((80,), [(7, 0), (8, 0)], "12.4", 12020, None),
        ((80,), [(12, 0)], "12.8", 13010, None),
    ],
)
def test_devices_and_drivers_that_are_too_old_are_told(
    archs: tuple[int, ...], capabilities: list[tuple[int, int]], toolkit: str, driver: int, reason: str | None
) -> None:
    said = native.too_old(archs, capabilities, toolkit, driver)
    assert re.search(reason, said or "") if reason else said is None


@pytest.mark.parametrize(("path", "reason"), [("nowhere/_cuda_on_host.so", "No such file"), ("conftest.py", "invalid ELF header")])
def test_a_module_for_tests_that_is_none_is_refused(path: str, reason: str) -> None:
    code = "from grpo_kernels import available_backends as a; print(a()['cuda_on_host'])"
    said = checked(run(sys.executable, "-c", code, cwd=Path(__file__).parent, GRPO_KERNELS_CUDA_ON_HOST=str(Path(__file__).parent / path)))
    assert re.search(reason, said), said
