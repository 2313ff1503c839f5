// One row of logits, in two sweeps: statistics, then gradient. Every entry point composes these, so a row's log-probability has
// the same bits whichever asked for it.
//
// A row is a sequence of packs of 2^6 vectors. A pack starts at a fixed column whatever the address, and is short enough that its
// second look (maximum first, then exponentials) comes from the L1 cache. Only the last may be partial: it is padded with -inf.
//
// float32 gradients are as wide as the exponentials, so the first sweep leaves those where the gradient will stand, and the second
// only multiplies them. Each pack keeps the maxima that its exponentials were taken against.
#pragma once

#include <cmath>

#include "cpu/storage.h"
#include "online_softmax.h"

namespace grpo {
inline namespace GRPO_ISA {

constexpr int kPack = 64 * kLanes;
constexpr int kGroup = 8 * kLanes;
constexpr int kPair = 2 * kLanes;

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

inline int64_t packs(int64_t vocab) { return (vocab + kPack - 1) / kPack; }

// Calls visit(index, in, out, columns) for each pack. The last one is padded to whole groups in a buffer; of what visit writes there
// only the row's own columns are copied out. `out` may be `in`, or null.
template <class Storage, class Visit>
inline void for_each_pack(const typename Storage::Element* in, typename Storage::Element* out, int64_t vocab, Visit visit) {
    const int64_t whole = vocab / kPack;
    for (int64_t i = 0; i < whole; i++) visit(i, in + i * kPack, out ? out + i * kPack : nullptr, kPack);
    const int rest = int(vocab - whole * kPack);
    if (rest == 0) return;
    typename Storage::Element buffer[kPack];
    const int columns = (rest + kGroup - 1) / kGroup * kGroup;
    std::memcpy(buffer, in + whole * kPack, rest * sizeof *in);
    for (int i = rest; i < columns; i++) buffer[i] = Storage::kMinusInf;
    visit(whole, buffer, buffer, columns);
    if (out) std::memcpy(out + whole * kPack, buffer, rest * sizeof *out);
}

struct RowStats {
    float max;
    double log_sum;  // of exp((z - max) / temperature); NaN for a degenerate row
    float logp, entropy;
    float chosen;  // the logit of token_id, for a gradient that has overwritten it
};

struct KeepNothing {
    static constexpr bool kExponentials = false;
};
struct KeepExponentials {  // in `out`, with each pack's maxima in `maxima`, a vector a pack
    static constexpr bool kExponentials = true;
    float* out;
    float* maxima;
};

// NaN for a row that holds NaN or +inf, or nothing but -inf.
template <class Storage, class Keep>
inline RowStats row_stats(const typename Storage::Element* logits, int64_t vocab, int64_t token_id, float temperature, Keep keep) {
    const bool valid = token_id >= 0 && token_id < vocab;
    const float chosen = valid ? read<Storage>(logits + token_id) : 0.0f;  // before anything is written over it
    const Vec scale = broadcast(float(kLog2e / double(temperature)));
    OnlineSoftmax<Vec> softmax;

    typename Storage::Element* out = nullptr;
    if constexpr (Keep::kExponentials) out = keep.out;
    for_each_pack<Storage>(logits, out, vocab, [&](int64_t pack, const auto* in, [[maybe_unused]] auto* kept, int columns) {
        Vec a, b, max_a = softmax.max, max_b = softmax.max;
        for (int i = 0; i < columns; i += kPair) {
            Storage::load2(in + i, a, b);
            max_a = maximum(a, max_a);
            max_b = maximum(b, max_b);
        }
        softmax.raise(maximum(max_a, max_b), scale);
        if constexpr (Keep::kExponentials) store(keep.maxima + pack * kLanes, softmax.max);

        for (int i = 0; i < columns; i += kGroup) {
            Vec e[8], weighted{};
            for (int k = 0; k < 8; k += 2) {
                Storage::load2(in + i + k * kLanes, a, b);
                const Vec t_a = exponent(a, softmax.max, scale), t_b = exponent(b, softmax.max, scale);
                e[k] = fast_exp2(t_a);
                e[k + 1] = fast_exp2(t_b);
                weighted += t_a * e[k];
                weighted += t_b * e[k + 1];
                if constexpr (Keep::kExponentials) Storage::store2(kept + i + k * kLanes, e[k], e[k + 1]);
            }
            softmax.add(((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7])), weighted);
        }
    });

    const float max = highest(softmax.max);
    softmax.raise(broadcast(max), scale);
    const double sum = total(softmax.sum.value) + total(softmax.sum.error);
    const double weighted = total(softmax.weighted.value) + total(softmax.weighted.error);
    if (!(sum > 0.0) || std::isnan(weighted)) {
        const float nan = __builtin_nanf("");
        return {max, nan, nan, nan, nan};
    }
    const double log_sum = std::log(sum), entropy = log_sum - kLn2 * weighted / sum;
    const float logp = valid ? float((double(chosen) - max) / temperature - log_sum) : __builtin_nanf("");
    return {max, log_sum, logp, float(entropy), chosen};
}

// dlogits_j = (a (1[j = y] - p_j) - b p_j (log p_j + H)) / temperature, with a = dloss / dlogp and b = dloss / dentropy.
struct RowGrad {
    float a, b;
    float max, log_sum, entropy;
    float temperature;
    int64_t token_id;

    // -(a + b (log p + H)) p / temperature = (base + slope t) 2^t
    float base() const { return float(-(a + b * (double(entropy) - log_sum)) * std::exp(-double(log_sum)) / temperature); }
    float slope() const { return float(-b * kLn2 * std::exp(-double(log_sum)) / temperature); }
    float scale() const { return float(kLog2e / double(temperature)); }

    // 1 - p by expm1: near p = 1 the difference would have no digits left.
    float at_target(float logit) const {
        const double logp = (double(logit) - max) / temperature - log_sum, p = std::exp(logp);
        const double entropy_term = p > 0.0 ? b * p * (logp + entropy) : 0.0;
        return float((-a * std::expm1(logp) - entropy_term) / temperature);
    }
};

// From the logits. `dlogits` may be `logits`.
template <class Storage>
inline void row_grad(const typename Storage::Element* logits, typename Storage::Element* dlogits, int64_t vocab, const RowGrad& grad) {
    const float target = grad.at_target(read<Storage>(logits + grad.token_id));
    const Vec max = broadcast(grad.max), scale = broadcast(grad.scale()), base = broadcast(grad.base()), slope = broadcast(grad.slope());
    // A polynomial of degree 4 is exact enough where the result is rounded to 16 bits.
    constexpr int degree = sizeof(typename Storage::Element) == 2 ? 4 : 5;
    for_each_pack<Storage>(logits, dlogits, vocab, [&](int64_t, const auto* in, auto* out, int columns) {
        for (int i = 0; i < columns; i += kPair) {
            Vec a, b;
            Storage::load2(in + i, a, b);
            const Vec t_a = exponent(a, max, scale), t_b = exponent(b, max, scale);
            Storage::store2(out + i, fast_exp2<degree>(t_a) * (base + slope * t_a), fast_exp2<degree>(t_b) * (base + slope * t_b));
        }
    });
    write<Storage>(dlogits + grad.token_id, target);
}

// From the exponentials that row_stats kept in `dlogits`; b = 0. `chosen` is the target's logit, which they overwrote.
inline void row_grad_from_exponentials(float* dlogits, const float* maxima, int64_t vocab, float chosen, const RowGrad& grad) {
    const Vec max = broadcast(grad.max), scale = broadcast(grad.scale()), base = broadcast(grad.base());
    for_each_pack<Float32>(dlogits, dlogits, vocab, [&](int64_t pack, const float* in, float* out, int columns) {
        const Vec factor = base * fast_exp2(exponent(load<Vec>(maxima + pack * kLanes), max, scale));
        for (int i = 0; i < columns; i += kPair) {
            Vec a, b;
            Float32::load2(in + i, a, b);
            Float32::store2(out + i, a * factor, b * factor);
        }
    });
    write<Float32>(dlogits + grad.token_id, grad.at_target(chosen));
}

template <class Storage>
inline void fill_row(typename Storage::Element* row, int64_t vocab, typename Storage::Element value) {
    for (int64_t i = 0; i < vocab; i++) row[i] = value;
}

}  // namespace GRPO_ISA
}  // namespace grpo
