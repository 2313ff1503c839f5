"""The entry points over rows and tokens: one program a row, composed of row_stats, token_objective and row_grad.

Every argument but the tile's shape is a run-time value that nothing specialises on: one compile for a dtype and a tile, whatever the
lengths, strides, addresses, options, and whichever optional inputs are there. csrc/cpu/rows.cpp holds the same compositions.
"""
# mypy: disable-error-code="no-untyped-def"
# (no `from __future__ import annotations`: Triton's interpreter reads tl.constexpr from the annotation itself)

import triton.language as tl

from grpo_kernels.backends.triton.jit import device, kernel
from grpo_kernels.backends.triton.objective import load_given, load_token, token_objective
from grpo_kernels.backends.triton.softmax import fill_row, row_grad, row_stats, scale_row


# Where a row starts. PACK > 1 promises that it is 16-byte aligned. 64 bits: 14,135 rows of 151,936 pass 2^31.
@device
def row_at(logits, row, time, batch_stride, time_stride, PACK: tl.constexpr):
    batch = row // time
    start = logits + (batch.to(tl.int64) * batch_stride + (row - batch * time).to(tl.int64) * time_stride)
    if PACK > 1:
        start = tl.multiple_of(start, 16)
    return start


# An inactive row is read nowhere.
@device
def is_active(active, row):
    return load_given(active, row, row >= 0, 1) != 0


# Whether a row has to be swept for its gradient; else it is all 0, or all NaN.
@device
def has_gradient(a, b, degenerate):
    return ((a != 0.0) | (b != 0.0)) & (degenerate == 0)


@kernel
def logprobs_forward(
    logits, batch_stride: tl.int64, time_stride: tl.int64, time: tl.int32, vocab: tl.int32, token_ids, active, temperature,
    logps, row_max, log_sum, entropy,
    REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    m, s, logp, h = 0.0, 0.0, 0.0, 0.0
    if is_active(active, row):
        z = row_at(logits, row, time, batch_stride, time_stride, PACK)
        token_id, tau = tl.load(token_ids + row), tl.load(temperature + row)
        m, s, logp, h, _ = row_stats(z, vocab, token_id, tau, "", REPEAT, LANES, PACK)
    tl.store(logps + row, logp)
    tl.store(row_max + row, m)
    tl.store(log_sum + row, s)
    tl.store(entropy + row, h)


@kernel
def logprobs_backward(
    logits, batch_stride: tl.int64, time_stride: tl.int64, time: tl.int32, vocab: tl.int32, token_ids, active, temperature,
    row_max, log_sum, entropy, dlogps, dentropy, dlogits, d_batch_stride: tl.int64, d_time_stride: tl.int64,
    REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wanted = is_active(active, row)
    token_id, tau = tl.load(token_ids + row, mask=wanted, other=0), tl.load(temperature + row, mask=wanted, other=1.0)
    m, s = tl.load(row_max + row, mask=wanted, other=0.0), tl.load(log_sum + row, mask=wanted, other=0.0)
    h = tl.load(entropy + row, mask=wanted, other=0.0)
    a, b = tl.load(dlogps + row, mask=wanted, other=0.0), load_given(dentropy, row, wanted, 0.0)
    degenerate = (s != s) | (a != a) | (b != b) | (token_id < 0) | (token_id >= vocab)

    dz = row_at(dlogits, row, time, d_batch_stride, d_time_stride, PACK)
    if has_gradient(a, b, degenerate):
        z = row_at(logits, row, time, batch_stride, time_stride, PACK)
        chosen = tl.load(z + token_id).to(tl.float32)
        row_grad(z, dz, vocab, token_id, tau, a, b, m, s, h, chosen, REPEAT, LANES, PACK)
    else:
        fill_row(dz, vocab, degenerate, REPEAT, LANES, PACK)


@kernel
def loss_and_grad(
    logits, batch_stride: tl.int64, time_stride: tl.int64, time: tl.int32, vocab: tl.int32, token_ids, active, temperature,
    advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights,
    objective_kind: tl.int32, ratio_min: tl.float32, ratio_max: tl.float32, ratio_bound: tl.float32, delta: tl.float32,
    dual_clip: tl.float32, sapo_pos: tl.float32, sapo_neg: tl.float32, kl_estimator: tl.int32, max_log_ratio: tl.float32,
    beta: tl.float32,
    logps, entropy, loss, policy_loss, kl, clipped, dlogits, d_batch_stride: tl.int64, d_time_stride: tl.int64,
    REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    z = row_at(logits, row, time, batch_stride, time_stride, PACK)
    wanted = is_active(active, row)
    token_id, tau = tl.load(token_ids + row, mask=wanted, other=0), tl.load(temperature + row, mask=wanted, other=1.0)
    zero = tl.full([], 0.0, tl.float32)
    m, s, logp, h, chosen, a, b = zero, zero, zero, zero, zero, zero, zero
    token_loss, token_policy_loss, token_kl, side = zero, zero, zero, 0
    if wanted:
        m, s, logp, h, chosen = row_stats(z, vocab, token_id, tau, "evict_last", REPEAT, LANES, PACK)
        advantage, log_ratio, ref_logp, policy_weight, weight, entropy_weight, has_ref = load_token(
            logp, row, wanted, advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights
        )
        token_loss, token_policy_loss, a, token_kl, side = token_objective(
            logp, h, advantage, log_ratio, ref_logp, policy_weight, weight, entropy_weight, has_ref,
            objective_kind, ratio_min, ratio_max, ratio_bound, delta, dual_clip, sapo_pos, sapo_neg, kl_estimator, max_log_ratio, beta,
        )  # fmt: skip
        b = -entropy_weight
    tl.store(logps + row, logp)
    tl.store(entropy + row, h)
    tl.store(loss + row, token_loss)
    tl.store(policy_loss + row, token_policy_loss)
    tl.store(kl + row, token_kl)
    tl.store(clipped + row, side)

    degenerate = (logp != logp) | (a != a) | (b != b)
    dz = row_at(dlogits, row, time, d_batch_stride, d_time_stride, PACK)
    if has_gradient(a, b, degenerate):
        row_grad(z, dz, vocab, token_id, tau, a, b, m, s, h, chosen, REPEAT, LANES, PACK)
    else:
        fill_row(dz, vocab, degenerate, REPEAT, LANES, PACK)


@kernel
def objective(
    logps, entropy, advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights, active, rows: tl.int64,
    objective_kind: tl.int32, ratio_min: tl.float32, ratio_max: tl.float32, ratio_bound: tl.float32, delta: tl.float32,
    dual_clip: tl.float32, sapo_pos: tl.float32, sapo_neg: tl.float32, kl_estimator: tl.int32, max_log_ratio: tl.float32,
    beta: tl.float32,
    loss, policy_loss, dlogps, kl, clipped,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = row < rows
    wanted = valid & (load_given(active, row, valid, 1) != 0)
    logp = tl.load(logps + row, mask=wanted, other=0.0)
    h = load_given(entropy, row, wanted, 0.0)
    advantage, log_ratio, ref_logp, policy_weight, weight, entropy_weight, has_ref = load_token(
        logp, row, wanted, advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights
    )
    token_loss, token_policy_loss, dlogp, token_kl, side = token_objective(
        logp, h, advantage, log_ratio, ref_logp, policy_weight, weight, entropy_weight, has_ref,
        objective_kind, ratio_min, ratio_max, ratio_bound, delta, dual_clip, sapo_pos, sapo_neg, kl_estimator, max_log_ratio, beta,
    )  # fmt: skip
    tl.store(loss + row, tl.where(wanted, token_loss, 0.0), mask=valid)
    tl.store(policy_loss + row, tl.where(wanted, token_policy_loss, 0.0), mask=valid)
    tl.store(dlogps + row, tl.where(wanted, dlogp, 0.0), mask=valid)
    tl.store(kl + row, tl.where(wanted, token_kl, 0.0), mask=valid)
    tl.store(clipped + row, tl.where(wanted, side, 0), mask=valid)


@kernel
def scale(
    dlogits, batch_stride: tl.int64, time_stride: tl.int64, time: tl.int32, vocab: tl.int32, factor,
    REPEAT: tl.constexpr, LANES: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        row = row_at(dlogits, tl.program_id(0), time, batch_stride, time_stride, PACK)
        scale_row(row, vocab, by, REPEAT, LANES, PACK)
