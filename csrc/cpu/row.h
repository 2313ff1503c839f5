// One row of logits, in two sweeps: statistics, then gradient. Every entry point composes these, so a row's log-probability has
// the same bits whichever asked for it.
//
// A row is a sequence of packs of 64 vectors. A pack starts at a fixed column whatever the address, and is short enough that its
// second look (first its maximum, then exponentials) comes from the L1 cache. Only the last may be partial: it is padded with -inf.
//
// The one pass keeps the exponentials that the first sweep made, so that the second only multiplies: two thirds of the
// time of computing them again.
#pragma once

#include <cmath>

#include "cpu/exponential.h"
#include "cpu/storage.h"
#include "online_softmax.h"

namespace grpo {
inline namespace GRPO_ISA {

constexpr int kGroupVectors = kLanes == 16 ? 16 : 8;  // summed as a tree, in registers
constexpr int kGroup = kGroupVectors * kLanes;
constexpr int kPair = 2 * kLanes;
constexpr int kPack = 64 * kLanes;

// The hardware follows one stream of logits well, but loses it when exponentials and gradients are written beside: without this, a
// bfloat16 row waited 12 us of 60 for memory.
constexpr int kPrefetchBytes = 4096;
template <int bytes>
inline void prefetch(const void* p) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + kPrefetchBytes + i);
}

// Calls visit(pack, in, out, columns) for each pack. The last one is padded to whole groups in a buffer; of what visit writes there
// only the row's own columns are copied out. `out` may be `in`; either may be null.
template <class Storage, class Visit>
inline void for_each_pack(const typename Storage::Element* in, typename Storage::Element* out, int64_t vocab, Visit visit) {
    const int64_t whole = vocab / kPack;
    for (int64_t i = 0; i < whole; i++) visit(i, in ? in + i * kPack : nullptr, out ? out + i * kPack : nullptr, kPack);
    const int rest = int(vocab - whole * kPack);
    if (rest == 0) return;
    typename Storage::Element buffer[kPack];
    const int columns = (rest + kGroup - 1) / kGroup * kGroup;
    if (in) std::memcpy(buffer, in + whole * kPack, rest * sizeof *in);
    for (int i = in ? rest : 0; i < columns; i++) buffer[i] = Storage::kMinusInf;
    visit(whole, buffer, buffer, columns);
    if (out) std::memcpy(out + whole * kPack, buffer, rest * sizeof *out);
}

// Where a row's exponentials are kept between the sweeps, as floats in the order that its Storage loads, and the maxima that each
// pack took them against. float32: in the place of the gradient, but for the last pack, which is padded. 16-bit dtypes: in a scratch
// row of the thread's own, which stays in its L2 cache.
template <class Storage>
class Exponentials {
    using Element = typename Storage::Element;
    static constexpr bool kInPlace = sizeof(Element) == sizeof(float);
    static int64_t packs(int64_t vocab) { return vocab / kPack + 1; }

  public:
    static int64_t scratch_floats(int64_t vocab) { return packs(vocab) * kLanes + (kInPlace ? 1 : packs(vocab)) * kPack; }

    Exponentials(float* scratch, Element* dlogits, int64_t vocab) : count_(vocab / kPack), maxima_(scratch) {
        float* exponentials = scratch + packs(vocab) * kLanes;
        if constexpr (kInPlace) {
            whole_packs_ = dlogits;
            last_pack_ = exponentials;
        } else {
            whole_packs_ = exponentials;
            last_pack_ = exponentials + vocab / kPack * kPack;
        }
    }

    float* maxima(int64_t pack) const { return maxima_ + pack * kLanes; }
    float* pack(int64_t pack) const { return pack < count_ ? whole_packs_ + pack * kPack : last_pack_; }

  private:
    int64_t count_;  // of whole packs
    float *maxima_, *whole_packs_, *last_pack_;
};

// One pack into the running statistics; with `kept`, its exponentials go there. Not inlined, so that the loops have the registers to
// themselves and are there once for whole and padded packs.
template <class Storage, bool keeps>
[[gnu::noinline]] void push_pack(OnlineSoftmax<Vec>& row_softmax, const Exponential<Vec>& row_exp, const typename Storage::Element* in,
                                 int columns, int64_t pack, [[maybe_unused]] const Exponentials<Storage>* kept) {
    OnlineSoftmax<Vec> softmax = row_softmax;  // copies: a store to what is kept might alias the originals
    const Exponential<Vec> exp = row_exp;

    Vec a, b, max_a = softmax.max, max_b = softmax.max;
    for (int i = 0; i < columns; i += kPair) {
        Storage::load2(in + i, a, b);
        max_a = maximum(a, max_a);
        max_b = maximum(b, max_b);
    }
    softmax.raise(maximum(max_a, max_b), exp);

    [[maybe_unused]] float* out = nullptr;
    if constexpr (keeps) {
        store(kept->maxima(pack), softmax.max);
        out = kept->pack(pack);
    }
    Vec weighted_a{}, weighted_b{};
    for (int i = 0; i < columns; i += kGroup) {
        Vec e[kGroupVectors];
#pragma GCC unroll 16
        for (int k = 0; k < kGroupVectors; k += 2) {
            Vec x_a, x_b;
            Storage::load2(in + i + k * kLanes, a, b);
            prefetch<kPair * sizeof *in>(in + i + k * kLanes);
            e[k] = exp(a, softmax.max, x_a);
            e[k + 1] = exp(b, softmax.max, x_b);
            weighted_a += x_a * e[k];
            weighted_b += x_b * e[k + 1];
            if constexpr (keeps) Float32::store2(out + i + k * kLanes, e[k], e[k + 1]);
        }
#pragma GCC unroll 4
        for (int half = kGroupVectors / 2; half > 0; half /= 2)
#pragma GCC unroll 8
            for (int k = 0; k < half; k++) e[k] += e[k + half];
        softmax.sum.add(e[0]);
    }
    softmax.weighted.add(weighted_a + weighted_b);
    row_softmax = softmax;
}

struct RowStats {
    float max;
    float log_sum;  // of exp((z - max) / temperature); NaN for a degenerate row
    float logp, entropy;
    float chosen;  // the logit of token_id, for a gradient that has overwritten it
};

// NaN for a row that holds NaN or +inf, or nothing but -inf.
template <class Storage, bool keeps>
inline RowStats row_stats(const typename Storage::Element* logits, int64_t vocab, int64_t token_id, float temperature,
                          const Exponentials<Storage>* kept) {
    const bool valid = token_id >= 0 && token_id < vocab;
    const float nan = __builtin_nanf(""), chosen = valid ? read<Storage>(logits + token_id) : nan;
    const Exponential<Vec> exp(temperature);
    OnlineSoftmax<Vec> softmax;
    for_each_pack<Storage>(logits, nullptr, vocab, [&](int64_t pack, const auto* in, auto*, int columns) {
        push_pack<Storage, keeps>(softmax, exp, in, columns, pack, kept);
    });

    const float max = highest(softmax.max);
    softmax.raise(broadcast(max), exp);
    const double sum = total(softmax.sum.value) + total(softmax.sum.error);
    const double weighted = total(softmax.weighted.value) + total(softmax.weighted.error);
    if (!(sum > 0.0) || std::isnan(weighted)) return {max, nan, nan, nan, nan};
    const double log_sum = std::log(sum), entropy = log_sum - exp.nats * weighted / sum;
    const double logp = (double(chosen) - max) / temperature - log_sum;
    return {max, float(log_sum), float(logp), float(entropy), chosen};
}

// dlogits_j = (a (1[j = y] - p_j) - b p_j (log p_j + H)) / temperature, with a = dloss / dlogp and b = dloss / dentropy.
struct RowGrad {
    float a, b;
    float max, log_sum, entropy;
    float temperature;
    int64_t token_id;

    // -(a + b (log p + H)) p / temperature = (base + slope x) exp(x nats), where x nats = (z - max) / temperature
    float base() const { return float(-(a + b * (double(entropy) - log_sum)) * std::exp(-double(log_sum)) / temperature); }
    float slope(double nats) const { return float(-b * nats * std::exp(-double(log_sum)) / temperature); }

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
    const Exponential<Vec> exp(grad.temperature);
    const Vec max = broadcast(grad.max), base = broadcast(grad.base()), slope = broadcast(grad.slope(exp.nats));
    for_each_pack<Storage>(logits, dlogits, vocab, [&](int64_t, const auto* in, auto* out, int columns) {
        for (int i = 0; i < columns; i += kPair) {
            Vec a, b, x_a, x_b;
            Storage::load2(in + i, a, b);
            const Vec e_a = exp(a, max, x_a), e_b = exp(b, max, x_b);
            Storage::store2(out + i, e_a * (base + slope * x_a), e_b * (base + slope * x_b));
        }
    });
    write<Storage>(dlogits + grad.token_id, target);
}

// From the exponentials that row_stats kept, where b = 0. `chosen` is the target's logit, overwritten by now.
template <class Storage>
inline void row_grad(const Exponentials<Storage>& kept, typename Storage::Element* dlogits, int64_t vocab, float chosen,
                     const RowGrad& grad) {
    const Exponential<Vec> exp(grad.temperature);
    const Vec max = broadcast(grad.max), base = broadcast(grad.base());
    for_each_pack<Storage>(nullptr, dlogits, vocab, [&](int64_t pack, const auto*, auto* out, int columns) {
        Vec exponent;
        const Vec factor = base * exp(load<Vec>(kept.maxima(pack)), max, exponent);
        const float* in = kept.pack(pack);
        for (int i = 0; i < columns; i += kPair) {
            Vec a, b;
            Float32::load2(in + i, a, b);
            Storage::store2(out + i, a * factor, b * factor);
        }
    });
    write<Storage>(dlogits + grad.token_id, grad.at_target(chosen));
}

// A long row goes past the caches: nobody reads it soon, and plain stores would first read it from memory. A short one stays.
template <class Storage>
inline void fill_row(typename Storage::Element* row, int64_t vocab, typename Storage::Element value) {
    constexpr int64_t columns = kVectorBytes / sizeof *row;
    typename Storage::Element pattern[columns];
    for (auto& element : pattern) element = value;

    const bool is_long = vocab * int64_t(sizeof *row) >= 32768;
    int64_t i = 0;
    for (; is_long && i < vocab && reinterpret_cast<uintptr_t>(row + i) % kVectorBytes != 0; i++) row[i] = value;
    for (; i + columns <= vocab; i += columns) is_long ? stream(row + i, load<Bits>(pattern)) : store(row + i, load<Bits>(pattern));
    for (; i < vocab; i++) row[i] = value;
    stream_end();
}

}  // namespace GRPO_ISA
}  // namespace grpo
