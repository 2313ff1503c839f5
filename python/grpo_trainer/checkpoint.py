"""Exact resume: everything that decides what a run does next, in a folder that is either complete or not there.

A checkpoint is taken between steps of the loop, when no completion and no gradient is half used. A run that is killed later, wherever it
is in a step, repeats that step from here with the same bits: the same problems, random numbers, weights and optimiser moments.
The folder is a model folder as well: --model and from_pretrained load it.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch

STATE = "trainer.pt"


def save(
    folder: Path,
    keep: int,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    progress: dict[str, Any],
) -> Path:
    """Writes `folder`/step-<progress["step"]> and deletes all but the newest `keep`; a kill at any moment leaves the older ones usable."""
    step = progress["step"]
    final, draft = folder / f"step-{step:06d}", folder / f"draft-{step:06d}"
    for path in folder.glob("draft-*"):
        shutil.rmtree(path)
    draft.mkdir(parents=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    state = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "random": random_state(), "progress": progress}
    torch.save(state, draft / STATE)
    for path in [*draft.iterdir(), draft]:  # on the disk before the name says that it is complete
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    if final.exists():
        shutil.rmtree(final)
    draft.rename(final)
    for path in complete(folder)[:-keep]:
        shutil.rmtree(path)
    return final


def complete(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path | None:
    return next(reversed(complete(folder)), None)


def restore(path: Path, optimizer: torch.optim.Optimizer, schedule: Any) -> dict[str, Any]:
    """Puts back everything but the model, which is loaded from `path` as any model is; returns `progress`."""
    state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    set_random_state(state["random"])
    return state["progress"]


def random_state() -> dict[str, Any]:
    """Of every generator that sampling, a task or a reward function may draw from."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, numpy.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def set_seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
