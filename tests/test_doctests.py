"""The examples in the docstrings of the package run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import grpo_kernels

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(grpo_kernels.__path__, "grpo_kernels.")
    if not name.endswith(("__main__", "_C")) and ".integrations" not in name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_function_has_an_example() -> None:
    functions = [getattr(grpo_kernels, name) for name in grpo_kernels.__all__]
    without = [f.__name__ for f in functions if callable(f) and not isinstance(f, type) and ">>>" not in (f.__doc__ or "")]
    assert without == []
