"""Holds the arrows of CONTRIBUTING.md: who may import whom. Read from the sources, so that an import inside a function counts too.

A module that is in no row fails: a new room is put on the map before it is used.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# module -> what it may import of this package. Siblings are in no row of each other.
ARROWS: dict[str, set[str]] = {
    "grpo_kernels": {"loss", "linear", "fuse", "head", "logprobs", "options", "advantages", "corrections", "metrics", "packed", "backends"},
    "__main__": {"grpo_kernels", "_C"},
    "loss": {"batch", "logprobs", "one_pass", "packed", "options", "checks", "rows"},
    "linear": {"batch", "whole", "chunked", "products", "logprobs", "objective", "packed", "options", "checks", "rows", "ops"},
    "whole": {"batch", "chunked", "products", "objective", "sequence", "options", "rows", "backends"},
    "chunked": {"products", "ops", "backends"},
    "products": set(),
    "fuse": {"head", "logprobs", "options"},
    "head": set(),
    "batch": {"objective", "sequence", "weights", "options", "checks", "rows", "ops"},
    "one_pass": {"objective", "options", "rows", "ops"},
    "logprobs": {"ops", "checks", "rows"},
    "objective": {"ops", "options", "reference"},
    "sequence": {"options", "reference", "rows"},
    "weights": {"checks", "rows"},
    "advantages": {"ops", "checks", "rows"},
    "corrections": {"packed", "checks", "rows"},
    "metrics": {"options", "packed", "checks"},
    "packed": {"ops", "checks", "rows"},
    "scores": {"ops", "checks", "rows"},
    "options": {"checks", "reference", "registry"},
    "registry": set(),
    "checks": {"rows"},
    "rows": set(),
    "reference": set(),
    "ops": {"backends"},
    "integrations": set(),
    "integrations.verl": {"grpo_kernels", "scores"},
    "integrations.verl_external": {"integrations.verl"},
    "integrations.trl": {"integrations.trl.config", "integrations.trl.trainer"},
    "integrations.trl.trainer": {
        "grpo_kernels",
        "integrations.trl.config",
        "integrations.trl.entropy",
        "integrations.trl.heads",
        "integrations.trl.metrics",
    },
    "integrations.trl.config": {"grpo_kernels", "integrations.trl.entropy"},
    "integrations.trl.metrics": {"grpo_kernels", "integrations.trl.config"},
    "integrations.trl.heads": {"grpo_kernels"},
    "integrations.trl.entropy": set(),
    "backends": {"backends.eager", "backends.native", "backends.triton"},
    "backends.eager": {"reference"},
    "backends.native": {"_C"},
    "backends.triton": {f"backends.triton.{name}" for name in ("configs", "jit", "kernels", "advantages")},
    "backends.triton.configs": set(),
    "backends.triton.jit": set(),
    "backends.triton.objective": {"backends.triton.jit"},
    "backends.triton.softmax": {"backends.triton.jit"},
    "backends.triton.kernels": {f"backends.triton.{name}" for name in ("jit", "objective", "softmax")},
    "backends.triton.advantages": {"backends.triton.jit", "backends.triton.objective"},
}


def module_name(path: Path, package: Path) -> str:
    """`backends.eager` for backends/eager.py, `backends` for its __init__.py, `grpo_kernels` for the top one."""
    parts = path.relative_to(package).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts) or package.name


def imports(source: str, package: str = "grpo_kernels") -> set[str]:
    """Modules of `package` that a source text imports, without the package's name; the package itself as its name.

    `from grpo_kernels import ops` counts as `ops`, `from grpo_kernels import fused_grpo_loss` as `grpo_kernels`.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute, so that this test reads them"
            names = [node.module or ""]
            if names[0].split(".")[0] == package:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                modules = {name for name in inner if is_module(name)}
                names = sorted(modules) if modules == inner else [*names, *sorted(modules)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__", "import_module"):
            names = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        else:
            continue
        found |= {name.removeprefix(f"{package}.") for name in names if name.split(".")[0] == package}
    return found


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists() or name == "grpo_kernels._C"


def forbidden(module: str, source: str) -> list[str]:
    """Arrows of this source that are not on the map."""
    assert module in ARROWS, f"{module} is not on the map: give it a row in ARROWS and in CONTRIBUTING.md"
    allowed = ARROWS[module] | {module}
    return [f"{module} -> {target}" for target in sorted(imports(source)) if target not in allowed]


def test_arrows_of_the_package_point_down() -> None:
    package = ROOT / "grpo_kernels"
    arrows = [arrow for path in sorted(package.rglob("*.py")) for arrow in forbidden(module_name(path, package), path.read_text())]
    assert arrows == []


def test_the_map_for_people_has_every_module() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "grpo_kernels").rglob("*.py")}
    assert {name for name in modules if f"| `{name}` |" not in contributing} == set()


def test_the_map_has_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ARROWS):
        ready = {module for module, targets in ARROWS.items() if module not in done and targets & ARROWS.keys() <= done}
        assert ready, f"a cycle among {sorted(ARROWS.keys() - done)}"
        done |= ready


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("logprobs", "from grpo_kernels.objective import ObjectiveParams"),
        ("weights", "from grpo_kernels import logprobs"),
        ("ops", "import grpo_kernels.loss"),
        ("reference", "def f():\n    from grpo_kernels import ops"),
        ("loss", "from grpo_kernels import _C"),
        ("backends.eager", "import importlib\nimportlib.import_module('grpo_kernels.backends.native')"),
        ("checks", "from grpo_kernels import fused_grpo_loss"),
    ],
)
def test_an_arrow_that_points_up_or_sideways_is_found(module: str, source: str) -> None:
    assert len(forbidden(module, source)) == 1


def test_the_reference_imports_only_torch() -> None:
    tree = ast.parse((ROOT / "grpo_kernels/reference.py").read_text())
    roots = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    roots |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots <= {"__future__", "torch", "math", "typing", "collections", "dataclasses"}


def test_only_backends_take_addresses_of_tensors() -> None:
    """`native` hands them to `_C`, `triton` asks whether they are multiples of 16."""
    package = ROOT / "grpo_kernels"
    users = {module_name(path, package) for path in package.rglob("*.py") if ".data_ptr()" in path.read_text()}
    assert users == {"backends.native", "backends.triton"}


def modules_of_integration(path: Path) -> set[str]:
    """What an integration may import from beside the package's public names: the modules of its own row."""
    return {f"grpo_kernels.{name}" for name in ARROWS[module_name(path, ROOT / "grpo_kernels")] - {"grpo_kernels"}}


def test_trainers_use_public_names_only() -> None:
    """The minimal trainer, and the integrations but for what their rows on the map name."""
    public = set()
    for node in ast.walk(ast.parse((ROOT / "grpo_kernels/__init__.py").read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = set(ast.literal_eval(node.value)) | {"__version__"}
    assert "fused_grpo_loss" in public
    sources = {path: set[str]() for path in sorted((ROOT / "python/grpo_trainer").rglob("*.py"))}
    integrations = {path: modules_of_integration(path) for path in sorted((ROOT / "grpo_kernels/integrations").rglob("*.py"))}
    assert sources and integrations
    for path, others in {**sources, **integrations}.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_kernels") and node.module not in others:
                assert node.module == "grpo_kernels" and {alias.name for alias in node.names} <= public, f"{path}:{node.lineno}"
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("grpo_kernels.") for alias in node.names), f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "grpo_kernels":
                assert node.attr in public, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("pattern", "folders"),
    [
        ("*.h", {""}),  # the shared headers know no device
        ("bindings.cpp", {"", "host"}),  # the bindings see the faces, not what is behind them
        ("cpu/*", {"", "cpu"}),
        ("cuda/*", {"", "cuda", "host"}),  # host: in place of CUDA's own headers, where no nvcc compiles
        ("host/*", {"", "host", "cuda"}),  # cuda: the names of its barriers
    ],
)
def test_arrows_of_the_native_sources_point_down(pattern: str, folders: set[str]) -> None:
    sources = sorted((ROOT / "csrc").glob(pattern))
    assert sources
    for path in sources:
        for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), flags=re.MULTILINE):
            assert (ROOT / "csrc" / included).exists(), f"{path.name} names {included} by another path than from csrc/"
            assert included.rpartition("/")[0] in folders, f"{path.name} -> {included}"
