"""The promises about building and installing: what a wheel and an sdist hold, what a failed build says, what a broken install says.

The sources are packed once into an sdist, unpacked elsewhere, littered with what other builds might have left there, and built once
into a wheel; most tests look at that wheel. It is compiled without optimisation, to be quick, and without CUDA:
test_cuda_build.py looks at that.
"""

from __future__ import annotations

import importlib
import platform
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from building import (
    MODULE,
    NO_NVCC,
    ROOT,
    UNOPTIMISED,
    VERSION,
    build_sdist,
    build_wheel,
    checked,
    make_environment,
    not_ours,
    run,
    site_packages,
    unpack,
    unwrapped,
)  # fmt: skip

# One process runs this file (pytest -n --dist loadfile), so that what is built is built once.


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def source(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist unpacked elsewhere, with the leavings of another Python, another compiler and an older commit in it."""
    source = unpack(sdist, tmp_path_factory.mktemp("elsewhere"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in (
        f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/grpo_kernels/left_by_an_older_commit.py",
        f"build/lib/grpo_kernels/_C{suffix}",
        "build/inplace/CMakeCache.txt",
        "build/inplace/made-by.txt",
        f"build/inplace/_C{suffix}",
        f"grpo_kernels/_C{suffix}",
        "grpo_kernels/_C.cpython-38-x86_64-linux-gnu.so",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("left by another build")
    return source


@pytest.fixture(scope="session")
def wheel_and_log(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("wheel") / "out"
    log = checked(build_wheel(source, out))
    return next(out.glob("*.whl")), log


@pytest.fixture(scope="session")
def wheel(wheel_and_log: tuple[Path, str]) -> Path:
    return wheel_and_log[0]


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The wheel's files in an environment that has everything else. Returns its python; the package lies in site_packages(...)."""
    python = make_environment(tmp_path / "environment", not_ours)
    zipfile.ZipFile(wheel).extractall(site_packages(tmp_path / "environment"))
    return python


def metadata_of(text: str) -> Message:
    return Parser().parsestr(text)


def test_sdist_holds_every_tracked_file(sdist: Path) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = set(checked(run("git", "ls-files", cwd=ROOT)).splitlines())
    tracked = {name for name in tracked if (ROOT / name).exists()}
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/bindings.cpp", "csrc/cuda/rows.cu", "csrc/cuda/row.cuh", "CMakeLists.txt", "cmake/cuda.cmake", "nvcc.txt"} <= tracked
    assert tracked - held == set()
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_wheel_holds_the_sources_and_one_native_module_and_nothing_left_by_other_builds(wheel: Path) -> None:
    packages = {"grpo_kernels": ROOT / "grpo_kernels", "grpo_trainer": ROOT / "python/grpo_trainer"}
    sources = {f"{name}/{path.relative_to(folder)}" for name, folder in packages.items() for path in folder.rglob("*.py")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == sources | {MODULE, "grpo_kernels/py.typed", "grpo_kernels/_C.pyi"}
    assert zipfile.ZipFile(wheel).read(MODULE).startswith(b"\x7fELF")


def test_build_without_nvcc_says_in_one_sentence_that_the_wheel_is_for_cpus(wheel_and_log: tuple[Path, str]) -> None:
    sentence = f"This build is for CPUs only, without CUDA kernels: there is no {NO_NVCC}, which CUDACXX or CMAKE_CUDA_COMPILER names."
    assert sentence in unwrapped(wheel_and_log[1])


def test_wheel_is_for_this_python_and_platform(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-{re.sub('[-.]', '_', sysconfig.get_platform())}"
    assert wheel.name == f"grpo_kernels-{VERSION}-{tag}.whl"


def test_wheel_metadata(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    info = f"grpo_kernels-{VERSION}.dist-info"
    metadata = metadata_of(files.read(f"{info}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("grpo-kernels", VERSION, ">=3.10")
    assert metadata["License-Expression"] == "Apache-2.0" and f"{info}/licenses/LICENSE" in files.namelist()
    assert {"triton", "trainer", "bench", "test", "flash-attn", "trl", "dev"} == set(metadata.get_all("Provides-Extra"))
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert required == ["torch>=2.6", "numpy>=1.23.2"]
    assert "grpo-train = grpo_trainer.__main__:main" in files.read(f"{info}/entry_points.txt").decode()


def test_metadata_needs_neither_cmake_nor_torch(source: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment", lambda name: name.startswith(("setuptools", "_distutils_hack", "distutils-")))
    for name in ("cmake", "ninja", "pybind11", "torch"):
        assert run(python, "-c", f"import {name}", cwd=tmp_path).returncode != 0
    ask = f"from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    checked(run(python, "-c", ask, cwd=source, PATH=""))
    metadata = metadata_of((tmp_path / f"grpo_kernels-{VERSION}.dist-info/METADATA").read_text())
    assert metadata["Version"] == VERSION


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"PATH": "", "CXX": ""}, "No C++ compiler was found"),
        ({"CXX": "/no/such/compiler"}, "No C++ compiler was found"),
        ({"CMAKE_ARGS": "-DPython_INCLUDE_DIR=/no/such/folder"}, "Python.h"),
        ({"CMAKE_ARGS": "-DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON"}, "cannot build OpenMP loops"),
        ({"GRPO_KERNELS_CUDA": "ON"}, f"GRPO_KERNELS_CUDA is ON, but there is no {NO_NVCC}, which CUDACXX"),
        ({"GRPO_KERNELS_CUDA": "perhaps"}, "GRPO_KERNELS_CUDA: expected AUTO, ON or OFF, got 'perhaps'."),
    ],
)
def test_build_says_plainly_what_is_missing_and_makes_no_wheel(missing: dict[str, str], said: str, source: Path, tmp_path: Path) -> None:
    process = build_wheel(source, tmp_path / "out", **missing)
    assert process.returncode != 0
    assert said in unwrapped(process.stdout) and "grpo_kernels._C was not built" in process.stdout, process.stdout
    assert not list(tmp_path.rglob("*.whl"))


def test_source_that_does_not_compile_makes_no_wheel_and_max_jobs_is_respected(sdist: Path, tmp_path: Path) -> None:
    source = unpack(sdist, tmp_path)
    with (source / "csrc/bindings.cpp").open("a") as file:
        file.write("\n#error broken on purpose\n")
    process = build_wheel(source, tmp_path / "out", MAX_JOBS="1")
    assert process.returncode != 0 and "broken on purpose" in process.stdout
    assert re.search(r"--build \S+ --parallel 1\n", process.stdout)
    assert not list(tmp_path.rglob("*.whl"))


def test_editable_install_builds_afresh_in_place_and_runs(source: Path, tmp_path: Path) -> None:
    editable = tmp_path / "source"
    shutil.copytree(source, editable)
    python = make_environment(tmp_path / "environment", not_ours)
    install = ("install", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--editable", editable)
    checked(run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path, CMAKE_ARGS=UNOPTIMISED, CUDACXX=NO_NVCC))
    show = "import grpo_kernels, grpo_trainer; from grpo_kernels import _C; print(_C.__file__, _C.isa(), grpo_trainer.__file__)"
    module, isa, trainer = checked(run(python, "-c", show, cwd=tmp_path)).split()
    assert Path(module) == editable / MODULE and isa
    assert Path(trainer) == editable / "python/grpo_trainer/__init__.py"
    assert (editable / "build/inplace/CMakeCache.txt").read_text() != "left by another build"


@pytest.mark.parametrize("which", ["built here", "installed"])
def test_native_module_links_no_torch_and_no_cuda(which: str, wheel: Path, tmp_path: Path) -> None:
    if shutil.which("ldd") is None or shutil.which("nm") is None:
        pytest.skip("ldd or nm is missing")
    if which == "installed":
        module = Path(importlib.import_module("grpo_kernels._C").__file__)
    else:
        module = Path(zipfile.ZipFile(wheel).extract(MODULE, tmp_path))
    needed = checked(run("ldd", module, cwd=tmp_path))
    assert "libgomp" in needed or "libomp" in needed
    assert not re.search(r"lib(torch|c10|cuda)|not found", needed), needed
    symbols = checked(run("nm", "-D", "--defined-only", module, cwd=tmp_path))
    assert "PyInit__C" in symbols.split()
    assert not re.search(r" (cuda|cu[A-Z]|__cuda)", symbols), "torch's copy of the runtime could answer instead"
    symbols = checked(run("nm", "-D", "--demangle", module, cwd=tmp_path))
    assert not re.search(r"torch|c10::|at::", symbols), symbols


def test_environment_report_names_what_a_bug_report_needs(installed: Path, tmp_path: Path) -> None:
    report = checked(run(installed, "-m", "grpo_kernels", cwd=tmp_path, GRPO_KERNELS_ISA="baseline" if on_x86() else ""))
    lines = dict(line.split(maxsplit=1) for line in report.splitlines())
    assert lines["grpo_kernels"] == f"{VERSION} in {site_packages(tmp_path / 'environment') / 'grpo_kernels'}"
    assert lines["python"] == sys.version
    for name in ("torch", "numpy", "triton", "transformers", "platform", "cpu"):
        assert name in lines, report
    assert re.search(r"^instruction set +(baseline|portable) of ", report, flags=re.MULTILINE), report
    assert re.search(r"^cuda archs in wheel +none$", report, flags=re.MULTILINE), report
    assert re.search(r"^backend torch +available\nbackend cpu +available$", report, flags=re.MULTILINE), report


def on_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda module: module.unlink(), "_C"),
        (lambda module: module.write_bytes(module.read_bytes()[:40]), "too short"),
        (lambda module: module.write_bytes(b"not a library" * 1000), "invalid ELF header"),
    ],
    ids=["missing", "cut short", "no library"],
)
def test_broken_native_module_is_reported_with_its_reason(
    damage: Callable[[Path], object], reason: str, installed: Path, tmp_path: Path
) -> None:
    damage(site_packages(tmp_path / "environment") / MODULE)
    show = "import grpo_kernels; print(grpo_kernels.available_backends()['cpu'])"
    state = checked(run(installed, "-c", show, cwd=tmp_path))
    assert "available" not in state and reason in state
    report = checked(run(installed, "-m", "grpo_kernels", cwd=tmp_path))
    assert re.search(rf"^native module +\w*Error: .*{reason}", report, flags=re.MULTILINE), report
    assert re.search(rf"^backend cpu +\w*Error: .*{reason}", report, flags=re.MULTILINE), report


def test_import_without_torch_is_one_clear_sentence(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment", lambda name: name.startswith("numpy"))
    zipfile.ZipFile(wheel).extractall(site_packages(tmp_path / "environment"))
    process = run(python, "-c", "import grpo_kernels", cwd=tmp_path)
    last = process.stdout.splitlines()[-1]
    assert process.returncode != 0
    assert last.startswith(("ImportError: ", "ModuleNotFoundError: ")) and "install torch" in last, process.stdout


@pytest.mark.slow  # needs a network, for the isolated build environment
def test_install_from_a_git_address_with_build_isolation(tmp_path: Path) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    python = make_environment(tmp_path / "environment", not_ours)
    install = ("install", "--no-deps", "--no-cache-dir", f"git+{ROOT.as_uri()}")
    checked(run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path, CMAKE_ARGS=UNOPTIMISED, CUDACXX=NO_NVCC))
    report = checked(run(python, "-m", "grpo_kernels", cwd=tmp_path))
    assert re.search(r"^backend cpu +available$", report, flags=re.MULTILINE), report


@pytest.mark.slow  # needs a network, and the other Pythons
@pytest.mark.parametrize("minor", [10, 12, 13])
def test_wheel_builds_with_other_pythons(minor: int, source: Path, tmp_path: Path) -> None:
    python = f"python3.{minor}"
    if shutil.which(python) is None or run(python, "-c", "import ensurepip", cwd=tmp_path).returncode != 0:
        pytest.skip(f"no working {python}")
    checked(run(python, "-m", "venv", tmp_path / "environment", cwd=tmp_path))
    python = tmp_path / "environment/bin/python"
    build = ("wheel", "--no-deps", "-w", tmp_path / "out", source)
    checked(run(python, "-m", "pip", *build, cwd=tmp_path, CMAKE_ARGS=UNOPTIMISED, CUDACXX=NO_NVCC))
    (wheel,) = (tmp_path / "out").glob(f"grpo_kernels-{VERSION}-cp3{minor}-cp3{minor}-*.whl")
    modules = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(modules) == 1 and f"cpython-3{minor}-" in modules[0]
