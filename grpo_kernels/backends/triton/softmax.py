"""One row of logits, in two sweeps: statistics, then gradient. Every kernel over logits composes these two functions.

A program owns a row and walks it in tiles of [REPEAT, LANES, PACK] columns. A lane is a thread: PACK neighbouring columns are one 16-byte
load of its own, REPEAT such loads are in flight. So a lane keeps its own running softmax, a tile moves its maximum once (N + 1
exponentials for N logits), the loop holds no barrier and no exchange between threads, and lanes are merged once, at the end of the row.

The mapping of columns to lanes depends on these three numbers alone, never on the address or the number of rows: a row's log-probability
has the same bits whoever asks. Rows that are not 16-byte aligned have PACK = 1, another mapping.

tl.max drops NaN (and on Triton 3.2's interpreter does not): nothing here relies on it, NaN and +inf reach the sum of exponentials.
"""
# mypy: disable-error-code="no-untyped-def"
# (no `from __future__ import annotations`: Triton's interpreter reads tl.constexpr from the annotation itself)

import triton.language as tl

from grpo_kernels.backends.triton import jit
from grpo_kernels.backends.triton.jit import device, highest, total

LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # not -inf: (-inf) - (-inf) is NaN, and a row may open with a run of -inf
# Below it exp2 is 0. Finite, so that a logit of -inf contributes 0 to sums of products, not NaN.
LEAST_EXPONENT = tl.constexpr(-200.0)


# exp((z - max) / temperature) and its exponent to base 2, for scale = log2(e) / temperature. Subtract first, then scale: folding the
# product into the exponent would lose a logit of 1e6 its fraction. NaN passes.
@device
def exponential(z, row_max, scale):
    exponent = tl.maximum((z - row_max) * scale, LEAST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(exponent), exponent


# A sum that keeps what rounding took (Knuth's two-sum). Where one exponential is 1 and the others 1e-8 each, as in a row with p near 1,
# a plain sum would lose them all, and 1 - p with them.
@device
def exact_add(value, error, x):
    both = value + x
    virtual_x = both - value
    return both, error + ((value - (both - virtual_x)) + (x - virtual_x))


ROUND_BY_HAND = tl.constexpr(jit.INTERPRETED)  # Triton's interpreter cuts float32 off to bfloat16


@device
def rounded(x, pointer):
    dtype: tl.constexpr = pointer.dtype.element_ty
    if ROUND_BY_HAND and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        stored = tl.where(x != x, 0x7FC0, nearest_even).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        stored = x.to(dtype)
    return stored


@device
def tiles_of(vocab, REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr):
    return (vocab + REPEAT * LANES * PACK - 1) // (REPEAT * LANES * PACK)


# The columns of a tile [REPEAT, LANES, PACK], and which packs are inside the row: PACK divides its length.
@device
def tile_columns(tile, vocab, REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr):
    packs = (tile * REPEAT + tl.arange(0, REPEAT)[:, None, None]) * LANES + tl.arange(0, LANES)[None, :, None]
    return packs * PACK + tl.arange(0, PACK)[None, None, :], packs < vocab // PACK


# Statistics of a row: its maximum, log sum exp((z - max) / temperature), the logp of token_id, entropy, and the logit of token_id for a
# gradient that has overwritten it. NaN for a row that holds NaN or +inf, or nothing but -inf; logp also for an id outside the row.
@device
def row_stats(
    logits, vocab, token_id, temperature, KEEP: tl.constexpr, REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr
):  # fmt: skip
    scale = tl.div_rn(LOG2_E, temperature)
    nan = float("nan")
    chosen = tl.load(logits + token_id, mask=(token_id >= 0) & (token_id < vocab), other=nan).to(tl.float32)

    lane_max = tl.full([LANES], LOWEST, tl.float32)
    sums, sums_error = tl.full([LANES], 0.0, tl.float32), tl.full([LANES], 0.0, tl.float32)  # of exponentials against lane_max
    weighted, weighted_error = tl.full([LANES], 0.0, tl.float32), tl.full([LANES], 0.0, tl.float32)  # of exponential times exponent
    for tile in range(tiles_of(vocab, REPEAT, LANES, PACK)):
        columns, inside = tile_columns(tile, vocab, REPEAT, LANES, PACK)
        z = tl.load(logits + columns, mask=inside, other=-float("inf"), eviction_policy=KEEP).to(tl.float32)
        higher = tl.maximum(highest(highest(z, 2), 0), lane_max)
        factor, exponent = exponential(lane_max, higher, scale)
        weighted, weighted_error = factor * (weighted + exponent * sums), factor * (weighted_error + exponent * sums_error)
        sums, sums_error = factor * sums, factor * sums_error
        lane_max = higher

        exponentials, exponents = exponential(z, higher[None, :, None], scale)
        sums, sums_error = exact_add(sums, sums_error, total(total(exponentials, 2), 0))
        weighted, weighted_error = exact_add(weighted, weighted_error, total(total(exponentials * exponents, 2), 0))

    row_max = highest(lane_max, 0)
    factor, exponent = exponential(lane_max, row_max, scale)
    weighted, weighted_error = factor * (weighted + exponent * sums), factor * (weighted_error + exponent * sums_error)
    # In float64: through a tree of float32 sums over lanes the 1 of the maximum would lose digits of 1 - p at every level.
    row_sum = total((factor * sums).to(tl.float64) + factor * sums_error, 0).to(tl.float32)
    row_weighted = total(weighted.to(tl.float64) + weighted_error, 0).to(tl.float32)
    healthy = row_sum > 0.0
    log_sum = tl.where(healthy, tl.log(row_sum), nan)
    logp = tl.div_rn(chosen - row_max, temperature) - log_sum
    entropy = log_sum - LN_2 * tl.div_rn(row_weighted, row_sum)
    return row_max, log_sum, logp, entropy, chosen


# exp(x) - 1 for x <= 0: near 0, where p is near 1, the difference would have no digits left.
@device
def expm1(x):
    tail = 1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * (1 / 40320))))
    return tl.where(x > -0.5, x + x * x * (0.5 + x * (1 / 6 + x * tail)), tl.exp(x) - 1.0)


# dlogits_j = (a (1[j = y] - p_j) - b p_j (log p_j + H)) / temperature, with a = dloss / dlogp and b = dloss / dentropy.
# `dlogits` may be `logits`, for `chosen` was read before. Tiles in reverse: the sweep starts on what the first left in the caches.
@device
def row_grad(
    logits, dlogits, vocab, token_id, temperature, a, b, row_max, log_sum, entropy, chosen,
    REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    logp = tl.div_rn(chosen - row_max, temperature) - log_sum
    p = tl.exp(logp)
    entropy_term = tl.where(p > 0.0, b * p * (logp + entropy), 0.0)
    target = tl.div_rn(-a * expm1(logp) - entropy_term, temperature)

    # -(a + b (log p + H)) p / temperature = (base + slope x) 2^x, where x = (z - max) scale
    scale = tl.div_rn(LOG2_E, temperature)
    factor = tl.div_rn(tl.exp(-log_sum), temperature)
    base, slope = -(a + b * (entropy - log_sum)) * factor, -b * LN_2 * factor

    tl.debug_barrier()  # every thread has read what it needs of columns that others own
    tiles = tiles_of(vocab, REPEAT, LANES, PACK)
    for i in range(tiles):
        columns, inside = tile_columns(tiles - 1 - i, vocab, REPEAT, LANES, PACK)
        z = tl.load(logits + columns, mask=inside, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        exponentials, exponents = exponential(z, row_max, scale)
        dz = tl.fma(exponents, slope, base) * exponentials
        tl.store(dlogits + columns, rounded(dz, dlogits), mask=inside, cache_modifier=".cs")
    tl.debug_barrier()  # the owner of the target's column has written
    tl.store(dlogits + token_id, rounded(target, dlogits))


@device
def scale_row(row, vocab, factor, REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr):
    for tile in range(tiles_of(vocab, REPEAT, LANES, PACK)):
        columns, inside = tile_columns(tile, vocab, REPEAT, LANES, PACK)
        x = tl.load(row + columns, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(row + columns, rounded(x * factor, row), mask=inside, cache_modifier=".cs")


# With 0, or where the row is degenerate with NaN.
@device
def fill_row(row, vocab, degenerate, REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr):
    stored = tl.where(degenerate, float("nan"), 0.0).to(row.dtype.element_ty)
    for tile in range(tiles_of(vocab, REPEAT, LANES, PACK)):
        columns, inside = tile_columns(tile, vocab, REPEAT, LANES, PACK)
        tl.store(row + columns, stored, mask=inside, cache_modifier=".cs")
