"""Puts the tensors of a whole test run on the device of its backends, so that no test names one.

What a test makes is made there by default. Random numbers are drawn on the CPU and moved: tests hand over generators of the CPU, and an
input is the same on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import backends


def device_of(names: Sequence[str]) -> str:
    """ "cuda" where one of these backends takes tensors there and nowhere else."""
    for name in names:
        try:
            if backends.get(name, torch.device("cuda"), torch.float32).device == "cuda":
                return "cuda"
        except (RuntimeError, ValueError):  # not available, or for another device: the fixture `backend` says so
            continue
    return "cpu"


@contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Whatever is made without a device is made on this one."""
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        *((torch, name, _drawn) for name in ("rand", "randn", "randint", "randperm")),
        *((Tensor, name, _filled) for name in ("uniform_", "normal_")),
    ]
    originals = [getattr(owner, name) for owner, name, _ in patches]
    torch.set_default_device(device)
    for (owner, name, patch), original in zip(patches, originals):
        setattr(owner, name, patch(original))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(patches, originals):
            setattr(owner, name, original)
        torch.set_default_device(None)


def _drawn(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is not None:
            return draw(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        values = draw(*args, **{**kwargs, "device": "cpu"}).to(torch.get_default_device())
        return values.requires_grad_(requires_grad)

    return drawn


def _filled(fill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(fill)
    def filled(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("generator") is None:
            return fill(self, *args, **kwargs)
        return self.copy_(fill(torch.empty_like(self, device="cpu"), *args, **kwargs))

    return filled
