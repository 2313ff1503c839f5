"""The README is part of the product: its Python blocks run as they stand, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_of_the_readme_run(block: str) -> None:
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), namespace)
    assert {"loss", "out", "backends"} & namespace.keys(), "a block that leaves nothing behind shows nothing"


def test_the_drop_in_example_is_short() -> None:
    assert len(BLOCKS[0].strip().splitlines()) <= 20


def test_make_targets_and_files_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for link in set(re.findall(r"\]\(([^)#:]+)\)", README)):
        assert (ROOT / link).exists(), link


def test_every_public_name_is_in_the_readme() -> None:
    import grpo_kernels

    missing = [name for name in grpo_kernels.__all__ if name not in README]
    assert not missing
