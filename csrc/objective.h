// The GRPO objective of one token: its loss and the derivative with respect to the token's log-probability, in one visit.
// One text for the CPU and for CUDA; reference.py is the definition and triton/objective.py the translation. Everything about
// reinforcement learning is here; everything about the vocabulary is in the row kernels, which meet it through two numbers a row.
//
// Sources: PPO clip 1707.06347, its cap `delta` 2505.07291 and dual clip 1912.09729; CISPO 2506.13585; SAPO 2511.20347; KL estimators
// Schulman 2020, the bias-corrected one 2512.02556.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "portable.h"

namespace grpo {

// In the order of reference.py's OBJECTIVES and KL_ESTIMATORS.
enum class Objective { kClip, kCispo, kSapo, kReinforce };
enum class KlEstimator { kK3, kK1, kK2, kAbs, kK3BiasCorrected };

// Plain data, the same type in every build; the functions below are each build's own (portable.h says why).
struct ObjectiveParams {
    Objective objective;
    float ratio_min, ratio_max;  // 1 - epsilon, 1 + epsilon_high
    float ratio_bound;           // cispo's: epsilon_high itself
    float delta;                 // upper cap of the ratio; inf: none
    float dual_clip;             // bound of the loss at negative advantages, times -advantage; inf: none
    float sapo_pos, sapo_neg;    // sapo's steepness at positive and at other advantages
    KlEstimator kl_estimator;
    float max_log_ratio;  // what is exponentiated is held within this
    float beta;           // weight of the KL penalty
};

// The per-token tensors, row by row. A null pointer is an absent input; nothing is ever aliased to a dummy.
struct TokenInputs {
    const float* advantages;
    const float* old_logps;        // null: on-policy, log-ratio exactly 0
    const float* ref_logps;        // null: no reference, kl 0
    const float* policy_weights;   // null: 1
    const float* weights;          // mask and normaliser in one
    const float* entropy_weights;  // null: 0
};

struct TokenOutputs {
    float* loss;
    float* policy_loss;
    float* dlogps;  // null in the one pass, where the gradient goes on to the logits at once
    float* kl;
    int8_t* clipped;
};

inline namespace GRPO_ISA {

struct Token {
    float logp, entropy;
    float advantage;
    float log_ratio;  // logp - old_logp; 0 without an old policy
    float ref_logp;   // read only where has_ref
    float policy_weight, weight, entropy_weight;
    bool has_ref;
};

struct TokenLoss {
    float loss, policy_loss;  // weighted
    float dlogp;              // dloss / dlogp; dloss / dentropy is -entropy_weight
    float kl;                 // before beta
    int8_t clipped;
};

// A value and its derivative with respect to the log-probability.
struct Dual {
    float value, grad;
};

// 0 where both are equal, also at -inf. NaN stays NaN.
GRPO_HOST_DEVICE inline float difference(float logp, float other_logp) { return logp == other_logp ? 0.0f : logp - other_logp; }

// exp overflows at 88: what goes into it is held within +-bound. At the bound the gradient passes, beyond it is 0. NaN stays NaN
// (fmin and fmax would drop it).
GRPO_HOST_DEVICE inline Dual hold(Dual x, float bound) {
    const bool beyond = x.value > bound || x.value < -bound;
    return {x.value > bound ? bound : x.value < -bound ? -bound : x.value, beyond ? 0.0f : x.grad};
}

// -min(ratio A, clip(ratio) A). A tie passes the whole gradient: only a strictly smaller clipped branch counts.
GRPO_HOST_DEVICE inline Dual ppo_clip(Dual ratio, float advantage, const ObjectiveParams& p) {
    const Dual capped = ratio.value > p.delta ? Dual{p.delta, 0.0f} : ratio;
    const Dual clipped = ratio.value < p.ratio_min ? Dual{p.ratio_min, 0.0f} : ratio.value > p.ratio_max ? Dual{p.ratio_max, 0.0f} : ratio;
    const Dual chosen = clipped.value * advantage < capped.value * advantage ? clipped : capped;
    const Dual loss = {-chosen.value * advantage, -chosen.grad * advantage};
    const float bound = -p.dual_clip * advantage;
    return advantage < 0.0f && bound < loss.value ? Dual{bound, 0.0f} : loss;
}

// -coefficient logp; 0 times -inf is 0.
GRPO_HOST_DEVICE inline Dual weighted_logp(float coefficient, float logp) {
    const bool unlikely = coefficient == 0.0f && std::isinf(logp);
    return {unlikely ? 0.0f : -coefficient * logp, -coefficient};
}

GRPO_HOST_DEVICE inline Dual cispo(float ratio, float advantage, float logp, const ObjectiveParams& p) {
    return weighted_logp((ratio > p.ratio_bound ? p.ratio_bound : ratio) * advantage, logp);
}

// -A sigmoid(k (ratio - 1)) 4 / k, with s (1 - s) from e^-|x|, where neither factor cancels.
GRPO_HOST_DEVICE inline Dual sapo(Dual ratio, float advantage, const ObjectiveParams& p) {
    const float k = advantage > 0.0f ? p.sapo_pos : p.sapo_neg;
    const float x = k * (ratio.value - 1.0f), e = std::exp(-std::fabs(x));
    const float sigmoid = (x > 0.0f ? 1.0f : e) / (1.0f + e);
    return {-advantage * sigmoid * 4.0f / k, -4.0f * (e / ((1.0f + e) * (1.0f + e))) * advantage * ratio.grad};
}

GRPO_HOST_DEVICE inline Dual policy_term(Dual ratio, float advantage, float logp, const ObjectiveParams& p) {
    switch (p.objective) {
        case Objective::kCispo:
            return cispo(ratio.value, advantage, logp, p);
        case Objective::kSapo:
            return sapo(ratio, advantage, p);
        case Objective::kReinforce:
            return weighted_logp(advantage, logp);
        default:
            return ppo_clip(ratio, advantage, p);
    }
}

// -1: below the clip range at a negative advantage, +1: above it at a positive one, which is where the gradient stops.
GRPO_HOST_DEVICE inline int8_t clip_side(float ratio, float advantage, const ObjectiveParams& p) {
    if (p.objective == Objective::kClip && ratio < p.ratio_min && advantage < 0.0f) return -1;
    if (p.objective == Objective::kClip && ratio > p.ratio_max && advantage > 0.0f) return 1;
    return p.objective == Objective::kCispo && ratio > p.ratio_bound && advantage > 0.0f ? 1 : 0;
}

// k3 = exp(d) - d - 1 >= 0 with d = ref_logp - logp. The plain form cancels near 0 (11 % off at d = 1e-6, negative at times).
GRPO_HOST_DEVICE inline Dual kl_k3(Dual d) {
    if (std::fabs(d.value) < 0.5f) {
        const float x = d.value;
        const float tail = 1 / 24.f + x * (1 / 120.f + x * (1 / 720.f + x * (1 / 5040.f + x * (1 / 40320.f))));
        const float k3 = x * x * (0.5f + x * (1 / 6.f + x * tail));
        return {k3, d.grad * (k3 + x)};
    }
    const float e = std::exp(d.value);
    return {(e - 1.0f) - d.value, d.grad * (e - 1.0f)};
}

// ratio k3(d). Its gradient in closed form is ratio (logp - ref_logp): the product rule's two terms would cancel (8 % off at 1e-3).
GRPO_HOST_DEVICE inline Dual kl_k3_bias_corrected(Dual ratio, Dual d, float max_log_ratio) {
    const float value = ratio.value * kl_k3(hold(d, max_log_ratio)).value;
    const float grad = ratio.grad == 0.0f ? 0.0f : ratio.grad * -d.value;  // a held ratio has none, also where d is infinite
    return {value > FLT_MAX ? FLT_MAX : value, grad > FLT_MAX ? FLT_MAX : grad < -FLT_MAX ? -FLT_MAX : grad};
}

GRPO_HOST_DEVICE inline Dual kl_estimate(Dual ratio, Dual d, const ObjectiveParams& p) {
    switch (p.kl_estimator) {
        case KlEstimator::kK1:
            return {-d.value, -d.grad};
        case KlEstimator::kK2:
            return {0.5f * d.value * d.value, d.value * d.grad};
        case KlEstimator::kAbs:
            return {std::fabs(d.value), d.value > 0.0f ? d.grad : d.value < 0.0f ? -d.grad : 0.0f};
        case KlEstimator::kK3BiasCorrected:
            return kl_k3_bias_corrected(ratio, d, p.max_log_ratio);
        default:
            return kl_k3(hold(d, p.max_log_ratio));
    }
}

// 0 times an infinite term is 0: a token without weight adds nothing, whatever its log-probability.
GRPO_HOST_DEVICE inline float times(float weight, float term) { return weight == 0.0f && std::isinf(term) ? 0.0f : weight * term; }

GRPO_HOST_DEVICE inline TokenLoss token_objective(const Token& t, const ObjectiveParams& p) {
    const Dual log_ratio = hold({t.log_ratio, 1.0f}, p.max_log_ratio);
    const float rho = std::exp(log_ratio.value);
    const Dual ratio = {rho, rho * log_ratio.grad};
    const Dual policy = policy_term(ratio, t.advantage, t.logp, p);
    const Dual kl = t.has_ref ? kl_estimate(ratio, {-difference(t.logp, t.ref_logp), -1.0f}, p) : Dual{0.0f, 0.0f};
    // Without a penalty the reference is only reported: a NaN of its must not reach the loss.
    const Dual penalty = p.beta > 0.0f ? Dual{p.beta * kl.value, p.beta * kl.grad} : Dual{0.0f, 0.0f};

    TokenLoss out;
    out.policy_loss = times(t.weight * t.policy_weight, policy.value);
    out.loss = out.policy_loss + times(t.weight, penalty.value);
    out.dlogp = t.weight * (t.policy_weight * policy.grad + penalty.grad);
    if (t.entropy_weight != 0.0f) out.loss -= t.entropy_weight * t.entropy;
    if (std::isnan(t.logp)) out.dlogp = t.logp;  // a degenerate row has a NaN gradient whatever its weight and advantage
    out.kl = kl.value;
    out.clipped = clip_side(ratio.value, t.advantage, p);
    return out;
}

GRPO_HOST_DEVICE inline Token load_token(const TokenInputs& in, int64_t row, float logp, float entropy) {
    Token t;
    t.logp = logp;
    t.entropy = entropy;
    t.advantage = in.advantages[row];
    t.log_ratio = difference(logp, in.old_logps ? in.old_logps[row] : logp);
    t.has_ref = in.ref_logps != nullptr;
    t.ref_logp = in.ref_logps ? in.ref_logps[row] : 0.0f;
    t.policy_weight = in.policy_weights ? in.policy_weights[row] : 1.0f;
    t.weight = in.weights[row];
    t.entropy_weight = in.entropy_weights ? in.entropy_weights[row] : 0.0f;
    return t;
}

// Whether a token can have a gradient, as far as that is known before its log-probability.
GRPO_HOST_DEVICE inline bool may_have_gradient(const TokenInputs& in, int64_t row, const ObjectiveParams& p) {
    const bool policy = in.advantages[row] != 0.0f && (!in.policy_weights || in.policy_weights[row] != 0.0f);
    return in.weights[row] != 0.0f && (policy || p.beta > 0.0f);
}

GRPO_HOST_DEVICE inline void store_token(const TokenOutputs& out, int64_t row, const TokenLoss& t) {
    out.loss[row] = t.loss;
    out.policy_loss[row] = t.policy_loss;
    if (out.dlogps) out.dlogps[row] = t.dlogp;
    out.kl[row] = t.kl;
    out.clipped[row] = t.clipped;
}

}  // namespace GRPO_ISA
}  // namespace grpo
