"""Rewards -> advantages within groups (DeepSeekMath §4.1.2 and §4.1.3). A few thousand numbers at most: float64, two passes, one program
a group."""
# mypy: disable-error-code="no-untyped-def"
# (no `from __future__ import annotations`: Triton's interpreter reads tl.constexpr from the annotation itself)

import triton.language as tl

from grpo_kernels.backends.triton.jit import device, highest, kernel, lowest, total
from grpo_kernels.backends.triton.objective import is_given, load_given


# Values begin .. end - 1 of a group a block at a time, and their places. NaN, and in process supervision what is no step, is not real.
@device
def load_values(values, order, step_ends, time, k, end):
    valid = k < end
    index = tl.where(is_given(order), load_given(order, k, valid, 0), k)
    value = tl.load(values + index, mask=valid, other=0.0)
    step_end = load_given(step_ends, index, valid, 0)
    is_step = (step_end >= 0) & ((step_end < time) | (time < 0))
    return value, index, valid, valid & (value == value) & is_step


# Count, mean and deviation of the real values, and whether all are equal.
@device
def statistics(values, order, step_ends, time, begin, end, ddof, BLOCK: tl.constexpr):
    infinity = float("inf")
    counts, sums = tl.full([BLOCK], 0.0, tl.float64), tl.full([BLOCK], 0.0, tl.float64)
    least, most = tl.full([BLOCK], infinity, tl.float64), tl.full([BLOCK], -infinity, tl.float64)
    for k in range(begin, end, BLOCK):
        value, _, _, real = load_values(values, order, step_ends, time, k + tl.arange(0, BLOCK), end)
        counts += tl.where(real, 1.0, 0.0)
        sums += tl.where(real, value, 0.0)
        least = tl.minimum(least, tl.where(real, value, infinity))
        most = tl.maximum(most, tl.where(real, value, -infinity))
    count = total(counts, 0)
    mean = total(sums, 0) / tl.maximum(count, 1.0)
    squares = tl.full([BLOCK], 0.0, tl.float64)
    for k in range(begin, end, BLOCK):
        value, _, _, real = load_values(values, order, step_ends, time, k + tl.arange(0, BLOCK), end)
        squares += tl.where(real, (value - mean) * (value - mean), 0.0)
    deviation = tl.sqrt(total(squares, 0) / tl.maximum(count - ddof, 1.0))
    return count, mean, deviation, lowest(least, 0) == highest(most, 0)


@kernel
def batch_deviation(values, order, step_ends, time: tl.int64, count: tl.int64, ddof: tl.int32, deviation, BLOCK: tl.constexpr):
    _, _, found, _ = statistics(values, order, step_ends, time, count * 0, count, ddof, BLOCK)
    tl.store(deviation, found)


# `deviation`: null for each group's own. What is not real, and groups with nothing to compare (one value, or equals), get exactly 0.
@kernel
def normalise(
    values, order, offsets, step_ends, time: tl.int64, deviation, scales: tl.int32, leave_one_out: tl.int32, ddof: tl.int32,
    eps: tl.float32, out, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    begin, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    count, mean, own_deviation, all_equal = statistics(values, order, step_ends, time, begin, end, ddof, BLOCK)
    given = load_given(deviation, 0, group >= 0, 0.0)
    divisor = tl.where(scales != 0, tl.where(is_given(deviation), given, own_deviation) + eps, 1.0)
    # value - mean of the others = (value - mean) n / (n - 1)
    factor = tl.where(leave_one_out != 0, count / tl.maximum(count - 1.0, 1.0), 1.0)
    comparable = (count >= 2.0) & (all_equal == 0)
    for k in range(begin, end, BLOCK):
        value, index, valid, real = load_values(values, order, step_ends, time, k + tl.arange(0, BLOCK), end)
        advantage = tl.where(comparable, tl.where(real, (value - mean) * factor / divisor, 0.0), 0.0)
        tl.store(out + index, advantage.to(out.dtype.element_ty), mask=valid)


# A token gets the sum over the steps that end at it or later: the reverse cumulative sum of the normalised rewards (rows, steps).
@kernel
def sum_of_later_steps(normalised, step_ends, steps: tl.int32, time: tl.int64, blocks: tl.int32, out, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.full([BLOCK], 0.0, tl.float64)
    for step in range(steps):
        sums += tl.where(tl.load(step_ends + row * steps + step) >= t, tl.load(normalised + row * steps + step), 0.0)
    tl.store(out + row * time + t, sums.to(tl.float32), mask=t < time)
