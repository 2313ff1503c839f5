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


# architecture (compute capability, "interpreter") -> dtype -> (longest row, split), shortest first. Every entry: not yet measured.
LONGEST = 1 << 31
SHORT = (1024, Split(warps=1, vectors=1))  # a program of 16 warps would idle
# 16 warps with 4 loads each have 32 KB in flight, what one SM needs to be busy alone: with few rows at once in work, the second sweep of
# the one pass finds its row in the L2 cache.
LONG = (LONGEST, Split(warps=16, vectors=4))
ROWS = (SHORT, LONG)
TABLE: dict[int | str, dict[torch.dtype, tuple[tuple[int, Split], ...]]] = {
    80: {torch.float32: ROWS, torch.bfloat16: ROWS, torch.float16: ROWS},
    90: {torch.float32: ROWS, torch.bfloat16: ROWS, torch.float16: ROWS},
    100: {torch.float32: ROWS, torch.bfloat16: ROWS, torch.float16: ROWS},
    "interpreter": {torch.float32: ROWS, torch.bfloat16: ROWS, torch.float16: ROWS},
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
