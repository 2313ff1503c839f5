"""The promises about building and installing: what a wheel and an sdist hold, what a failed build says, what a broken install says.

The sources are packed once into an sdist, unpacked elsewhere, littered with what other builds might have left there, and built once
into a wheel; most tests look at that wheel. It is compiled without optimisation and CUDA, to be quick: what it computes is tested
elsewhere.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE = f"grpo_kernels/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "grpo_kernels/__init__.py").read_text(), flags=re.MULTILINE)[1]
UNOPTIMISED = "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DGRPO_KERNELS_CUDA=OFF"

# One process runs this file (pytest -n --dist loadfile), so that what is built is built once.


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command away from the checkout's influence and returns it with stdout and stderr together in `stdout`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CMAKE_", "MAX_JOBS"))}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**inherited, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600
    )


def checked(process: subprocess.CompletedProcess[str]) -> str:
    assert process.returncode == 0, process.stdout
    return process.stdout


def build_wheel(source: Path, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Without isolation, with the tools of this environment and no network."""
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--wheel-dir", out)
    return run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=out.parent, **{"CMAKE_ARGS": UNOPTIMISED, **env})


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


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    checked(run(sys.executable, "-c", build, cwd=ROOT, PATH=""))
    return next(out.glob("grpo_kernels-*.tar.gz"))


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / sdist.name.removesuffix(".tar.gz")


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
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel") / "out"
    checked(build_wheel(source, out))
    return next(out.glob("*.whl"))


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
    assert {"csrc/bindings.cpp", "CMakeLists.txt"} <= tracked
    assert tracked - held == set()
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_wheel_holds_the_sources_and_one_native_module_and_nothing_left_by_other_builds(wheel: Path) -> None:
    packages = {"grpo_kernels": ROOT / "grpo_kernels", "grpo_trainer": ROOT / "python/grpo_trainer"}
    sources = {f"{name}/{path.relative_to(folder)}" for name, folder in packages.items() for path in folder.rglob("*.py")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == sources | {MODULE, "grpo_kernels/py.typed", "grpo_kernels/_C.pyi"}
    assert zipfile.ZipFile(wheel).read(MODULE).startswith(b"\x7fELF")


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
    ],
)
def test_build_says_plainly_what_is_missing_and_makes_no_wheel(missing: dict[str, str], said: str, source: Path, tmp_path: Path) -> None:
    process = build_wheel(source, tmp_path / "out", **missing)
    assert process.returncode != 0
    assert said in process.stdout and "grpo_kernels._C was not built" in process.stdout, process.stdout
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
    checked(run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path, CMAKE_ARGS=UNOPTIMISED))
    show = "import grpo_kernels, grpo_trainer; from grpo_kernels import _C; print(_C.__file__, _C.isa(), grpo_trainer.__file__)"
    module, isa, trainer = checked(run(python, "-c", show, cwd=tmp_path)).split()
    assert Path(module) == editable / MODULE and isa
    assert Path(trainer) == editable / "python/grpo_trainer/__init__.py"
    assert (editable / "build/inplace/CMakeCache.txt").read_text() != "left by another build"


def test_native_module_links_no_torch(wheel: Path, tmp_path: Path) -> None:
    if shutil.which("ldd") is None or shutil.which("nm") is None:
        pytest.skip("ldd or nm is missing")
    zipfile.ZipFile(wheel).extract(MODULE, tmp_path)
    needed = checked(run("ldd", tmp_path / MODULE, cwd=tmp_path))
    assert "libgomp" in needed or "libomp" in needed
    assert not re.search(r"lib(torch|c10|cuda)|not found", needed), needed
    symbols = checked(run("nm", "-D", "--defined-only", tmp_path / MODULE, cwd=tmp_path)).split()
    assert "PyInit__C" in symbols
    symbols = checked(run("nm", "-D", "--demangle", tmp_path / MODULE, cwd=tmp_path))
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
    checked(run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path, CMAKE_ARGS=UNOPTIMISED))
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
    checked(run(python, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path / "out", source, cwd=tmp_path, CMAKE_ARGS=UNOPTIMISED))
    (wheel,) = (tmp_path / "out").glob(f"grpo_kernels-{VERSION}-cp3{minor}-cp3{minor}-*.whl")
    modules = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(modules) == 1 and f"cpython-3{minor}-" in modules[0]
