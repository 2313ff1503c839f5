"""The GRPO objective of one token: its loss and the derivative with respect to the token's log-probability, in one visit.

csrc/objective.h in Triton, function by function and in its order; reference.py is the definition. Works on one token (the one pass) and on
a block of them alike. A C++ `Dual` is two values here, x and dx, and the parameters are arguments: Triton 3.2 takes no tuples.

Sources: PPO clip 1707.06347, its cap `delta` 2505.07291 and dual clip 1912.09729; CISPO 2506.13585; SAPO 2511.20347; KL estimators
Schulman 2020, the bias-corrected one 2512.02556.
"""
# mypy: disable-error-code="no-untyped-def"
# (no `from __future__ import annotations`: Triton's interpreter reads tl.constexpr from the annotation itself)

import triton.language as tl

from grpo_kernels.backends.triton.jit import device

# In the order of reference.py's OBJECTIVES and KL_ESTIMATORS.
CLIP, CISPO, SAPO, REINFORCE = (tl.constexpr(i) for i in range(4))
K3, K1, K2, ABS, K3_BIAS_CORRECTED = (tl.constexpr(i) for i in range(5))

FLT_MAX = tl.constexpr(3.4028234663852886e38)


@device
def is_infinite(x):
    return tl.abs(x) == float("inf")


# 0 where both are equal, also at -inf. NaN stays NaN.
@device
def difference(logp, other_logp):
    return tl.where(logp == other_logp, 0.0, logp - other_logp)


# exp overflows at 88: what goes into it is held within +-bound. At the bound the gradient passes, beyond it is 0. NaN stays NaN
# (a maximum would drop it).
@device
def hold(x, dx, bound):
    beyond = (x > bound) | (x < -bound)
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x)), tl.where(beyond, 0.0, dx)


# -min(ratio A, clip(ratio) A). A tie passes the whole gradient: only a strictly smaller clipped branch counts.
@device
def ppo_clip(ratio, dratio, advantage, ratio_min, ratio_max, delta, dual_clip):
    capped, dcapped = tl.where(ratio > delta, delta, ratio), tl.where(ratio > delta, 0.0, dratio)
    clipped = tl.where(ratio < ratio_min, ratio_min, tl.where(ratio > ratio_max, ratio_max, ratio))
    dclipped = tl.where((ratio < ratio_min) | (ratio > ratio_max), 0.0, dratio)
    smaller = clipped * advantage < capped * advantage
    loss, dloss = -tl.where(smaller, clipped, capped) * advantage, -tl.where(smaller, dclipped, dcapped) * advantage
    bound = -dual_clip * advantage
    bounded = (advantage < 0.0) & (bound < loss)
    return tl.where(bounded, bound, loss), tl.where(bounded, 0.0, dloss)


# -coefficient logp; 0 times -inf is 0.
@device
def weighted_logp(coefficient, logp):
    unlikely = (coefficient == 0.0) & is_infinite(logp)
    return tl.where(unlikely, 0.0, -coefficient * logp), -coefficient


@device
def cispo(ratio, advantage, logp, ratio_bound):
    return weighted_logp(tl.where(ratio > ratio_bound, ratio_bound, ratio) * advantage, logp)


# -A sigmoid(k (ratio - 1)) 4 / k, with s (1 - s) from e^-|x|, where neither factor cancels.
@device
def sapo(ratio, dratio, advantage, sapo_pos, sapo_neg):
    k = tl.where(advantage > 0.0, sapo_pos, sapo_neg)
    x = k * (ratio - 1.0)
    e = tl.exp(-tl.abs(x))
    sigmoid = tl.where(x > 0.0, 1.0, e) / (1.0 + e)
    return -advantage * sigmoid * 4.0 / k, -4.0 * (e / ((1.0 + e) * (1.0 + e))) * advantage * dratio


@device
def policy_term(
    ratio, dratio, advantage, logp, objective, ratio_min, ratio_max, ratio_bound, delta, dual_clip, sapo_pos, sapo_neg
):  # fmt: skip
    if objective == CISPO:
        value, grad = cispo(ratio, advantage, logp, ratio_bound)
    elif objective == SAPO:
        value, grad = sapo(ratio, dratio, advantage, sapo_pos, sapo_neg)
    elif objective == REINFORCE:
        value, grad = weighted_logp(advantage, logp)
    else:
        value, grad = ppo_clip(ratio, dratio, advantage, ratio_min, ratio_max, delta, dual_clip)
    return value, grad


# -1: below the clip range at a negative advantage, +1: above it at a positive one, which is where the gradient stops.
@device
def clip_side(ratio, advantage, objective, ratio_min, ratio_max, ratio_bound):
    below = (objective == CLIP) & (ratio < ratio_min) & (advantage < 0.0)
    above = (objective == CLIP) & (ratio > ratio_max) & (advantage > 0.0)
    beyond = (objective == CISPO) & (ratio > ratio_bound) & (advantage > 0.0)
    return tl.where(below, -1, tl.where(above | beyond, 1, 0))


# k3 = exp(d) - d - 1 >= 0 with d = ref_logp - logp. The plain form cancels near 0 (11 % off at d = 1e-6, negative at times).
@device
def kl_k3(x, dx):
    tail = 1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * (1 / 40320))))
    k3 = x * x * (0.5 + x * (1 / 6 + x * tail))
    e = tl.exp(x)
    near = tl.abs(x) < 0.5
    return tl.where(near, k3, (e - 1.0) - x), dx * tl.where(near, k3 + x, e - 1.0)


# ratio k3(d). Its gradient in closed form is ratio (logp - ref_logp): the product rule's two terms would cancel (8 % off at 1e-3).
@device
def kl_k3_bias_corrected(ratio, dratio, d, dd, max_log_ratio):
    held, dheld = hold(d, dd, max_log_ratio)
    k3, dk3 = kl_k3(held, dheld)
    value = ratio * k3
    grad = tl.where(dratio == 0.0, 0.0, dratio * -d)  # a held ratio has none, also where d is infinite
    grad = tl.where(grad > FLT_MAX, FLT_MAX, tl.where(grad < -FLT_MAX, -FLT_MAX, grad))
    return tl.where(value > FLT_MAX, FLT_MAX, value), grad


@device
def kl_estimate(ratio, dratio, d, dd, kl_estimator, max_log_ratio):
    if kl_estimator == K1:
        value, grad = -d, -dd
    elif kl_estimator == K2:
        value, grad = 0.5 * d * d, d * dd
    elif kl_estimator == ABS:
        value, grad = tl.abs(d), tl.where(d > 0.0, dd, tl.where(d < 0.0, -dd, 0.0))
    elif kl_estimator == K3_BIAS_CORRECTED:
        value, grad = kl_k3_bias_corrected(ratio, dratio, d, dd, max_log_ratio)
    else:
        held, dheld = hold(d, dd, max_log_ratio)
        value, grad = kl_k3(held, dheld)
    return value, grad


# 0 times an infinite term is 0: a token without weight adds nothing, whatever its log-probability.
@device
def times(weight, term):
    return tl.where((weight == 0.0) & is_infinite(term), 0.0, weight * term)


# Returns loss and policy_loss (weighted), dlogp = dloss / dlogp (dloss / dentropy is -entropy_weight), kl (before beta), clipped.
@device
def token_objective(
    logp, entropy, advantage, log_ratio, ref_logp, policy_weight, weight, entropy_weight, has_ref,
    objective, ratio_min, ratio_max, ratio_bound, delta, dual_clip, sapo_pos, sapo_neg, kl_estimator, max_log_ratio, beta,
):  # fmt: skip
    one = tl.full(weight.shape, 1.0, tl.float32)
    log_ratio, dlog_ratio = hold(log_ratio, one, max_log_ratio)
    rho = tl.exp(log_ratio)
    drho = rho * dlog_ratio
    policy, dpolicy = policy_term(
        rho, drho, advantage, logp, objective, ratio_min, ratio_max, ratio_bound, delta, dual_clip, sapo_pos, sapo_neg
    )
    kl, dkl = kl_estimate(rho, drho, -difference(logp, ref_logp), -one, kl_estimator, max_log_ratio)
    kl, dkl = tl.where(has_ref, kl, 0.0), tl.where(has_ref, dkl, 0.0)
    # Without a penalty the reference is only reported: a NaN of its must not reach the loss.
    penalty, dpenalty = tl.where(beta > 0.0, beta * kl, 0.0), tl.where(beta > 0.0, beta * dkl, 0.0)

    policy_loss = times(weight * policy_weight, policy)
    loss = policy_loss + times(weight, penalty)
    dlogp = weight * (policy_weight * dpolicy + dpenalty)
    loss = tl.where(entropy_weight != 0.0, loss - entropy_weight * entropy, loss)
    dlogp = tl.where(logp != logp, logp, dlogp)  # a degenerate row has a NaN gradient whatever its weight and advantage
    return loss, policy_loss, dlogp, kl, clip_side(rho, advantage, objective, ratio_min, ratio_max, ratio_bound)


# A null pointer is an absent input (an empty tensor has one); nothing is ever aliased to a dummy.
@device
def is_given(pointer):
    return pointer.to(tl.int64) != 0


# != 0: a scalar condition that the interpreter spreads over a block comes out as integers.
@device
def load_given(pointer, row, valid, other):
    return tl.load(pointer + row, mask=(valid & is_given(pointer)) != 0, other=other)


@device
def load_token(logp, row, valid, advantages, old_logps, ref_logps, policy_weights, weights, entropy_weights):
    advantage = load_given(advantages, row, valid, 0.0)
    old_logp = load_given(old_logps, row, valid, 0.0)
    log_ratio = difference(logp, tl.where(is_given(old_logps), old_logp, logp))  # without an old policy 0
    ref_logp = load_given(ref_logps, row, valid, 0.0)
    policy_weight = load_given(policy_weights, row, valid, 1.0)
    weight = load_given(weights, row, valid, 0.0)
    entropy_weight = load_given(entropy_weights, row, valid, 0.0)
    return advantage, log_ratio, ref_logp, policy_weight, weight, entropy_weight, is_given(ref_logps)
