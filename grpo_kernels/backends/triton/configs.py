"""How a row is split over the threads of its program: a fixed table, by architecture, dtype and length of a row.

Nothing is tuned at run time: the kernels write what they read, and a split chosen by a clock would change bits from run to run. One entry
serves every kernel over logits, so that they agree to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

__all__ = ["Tile", "forced_block", "tile_for"]

VECTOR_BYTES = 16  # the widest load of a thread


class Tile(NamedTuple):
    """Columns that a program visits at a time: [repeat, lanes, pack], one lane a thread."""

    repeat: int
    lanes: int
    pack: int

    @property
    def warps(self) -> int:
        return max(1, self.lanes // 32)


class Split(NamedTuple):
    warps: int
    vectors: int  # 16-byte loads in flight a thread


# architecture (compute capability; or "interpreter") -> dtype -> (longest row, split), shortest first.
LONGEST = (1 << 31) - 1
Splits = tuple[tuple[int, Split], ...]
# A short row in one warp: 16 would idle. Not yet measured.
# A long row in 16 warps with 4 loads each: 32 KB in flight keep an SM busy that has one row in work, as the registers of the one pass allow
# no more; with so few rows in work, its second sweep finds them in the L2 cache. Not yet measured.
GPU: Splits = ((1024, Split(warps=1, vectors=1)), (LONGEST, Split(warps=16, vectors=4)))
# In the interpreter a tile costs about 2 ms whatever it holds: as few as the caches of a CPU allow. A row of 151,936, forward: 21 ms so, 97
# in the GPU's tiles (float32, one core of a busy machine).
INTERPRETER: Splits = ((1024, Split(warps=8, vectors=1)), (LONGEST, Split(warps=64, vectors=4)))
TABLE: dict[int | str, dict[torch.dtype, Splits]] = {
    80: {torch.float32: GPU, torch.bfloat16: GPU, torch.float16: GPU},
    90: {torch.float32: GPU, torch.bfloat16: GPU, torch.float16: GPU},
    100: {torch.float32: GPU, torch.bfloat16: GPU, torch.float16: GPU},
    "interpreter": {torch.float32: INTERPRETER, torch.bfloat16: INTERPRETER, torch.float16: INTERPRETER},
}

_forced_block: int | None = None


def tile_for(architecture: int | str, dtype: torch.dtype, vocab: int, aligned: bool) -> Tile:
    """The tile for rows of that length. `aligned`: every row starts at a multiple of 16 bytes and is one long; else columns are loaded one
    by one."""
    if not isinstance(architecture, str):  # the table's nearest that is not newer
        architecture = max((a for a in TABLE if not isinstance(a, str) and a <= architecture), default=80)
    per_vector = VECTOR_BYTES // dtype.itemsize
    split = next(split for longest, split in TABLE[architecture][dtype] if vocab <= longest)
    block = _forced_block or split.warps * 32 * split.vectors * per_vector
    repeat = split.vectors * (1 if aligned else per_vector)
    pack = per_vector if aligned else 1
    if _forced_block is not None:
        repeat = min(repeat, max(1, block // pack // 2))
    return Tile(repeat, max(1, block // (repeat * pack)), pack)


@contextlib.contextmanager
def forced_block(block: int) -> Iterator[None]:
    """Tiles of that many columns (a power of two), for tests: short rows then have several."""
    global _forced_block
    before, _forced_block = _forced_block, block
    try:
        yield
    finally:
        _forced_block = before
