"""A function on every rank of a real process group on this machine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_every_rank(size: int, folder: Path, act: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    """act(rank, gloo group)'s results, in forked children (which need not import torch again)."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(rank, size, folder, act)) for rank in range(size)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    for child in children:
        child.kill()
    failed = [path.read_text() for path in folder.glob("*.error")]
    assert not failed and all(child.exitcode == 0 for child in children), "\n".join(failed) or "a rank hung or died"
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def _child(rank: int, size: int, folder: Path, act: Callable[[int, dist.ProcessGroup], Any]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"file://{folder}/meeting", timeout=timedelta(seconds=30), rank=rank, world_size=size)
        assert dist.group.WORLD is not None
        torch.save(act(rank, dist.group.WORLD), folder / f"{rank}.pt")
        dist.barrier()
    except Exception as error:
        (folder / f"{rank}.error").write_text(f"rank {rank}: {error!r}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
