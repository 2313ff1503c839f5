"""docs/ is part of the product: the reference page is what the registry prints now, examples run as they stand, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_kernels
from grpo_kernels.options import OPTION_NAMES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [(page.name, block) for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)]


def test_the_reference_page_is_what_the_registry_prints() -> None:
    printed = subprocess.run([sys.executable, ROOT / "docs/generate.py"], capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs/losses.md").read_text() == printed, "python docs/generate.py > docs/losses.md"


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_python_blocks_run(page: str, block: str) -> None:
    exec(compile(block, page, "exec"), {"__name__": page})


def test_ppo_has_an_example() -> None:
    assert "ppo.md" in dict(BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for call in re.findall(r"`((?:fused_)?grpo_\w+|\w+_advantages|\w+_logprobs\w*|\w+_mask|truncated_\w+)\(", text):
        assert call in grpo_kernels.__all__, call


@pytest.mark.parametrize("trainer", ["TRL", "verl", "OpenRLHF", "Liger"])
def test_the_migration_tables_name_what_exists(trainer: str) -> None:
    """The last column of each row: an option or argument of ours in code quotes, if it has one."""
    text = (ROOT / "docs/migration.md").read_text()
    section = re.search(rf"^## From {trainer}.*?(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    assert section
    known = {*OPTION_NAMES, *grpo_kernels.__all__, *arguments()}
    rows = [row for row in section[0].splitlines() if row.startswith("| `")]
    assert len(rows) >= 10
    for row in rows:
        ours = row.rstrip("| ").split(" | ")[1]
        for name in re.findall(r"`(\w+)", ours):
            assert name in known, f"{name} in {row}"


def arguments() -> set[str]:
    import inspect

    functions = [getattr(grpo_kernels, name) for name in grpo_kernels.__all__]
    return {name for function in functions if inspect.isfunction(function) for name in inspect.signature(function).parameters}
