// Softmax statistics in one read. The running maximum is the reference of all exponentials; a pack of logits moves it once, so N
// logits cost N + 1 exponentials, and a pack is summed from 0 before it is added, which is also what keeps the sum exact.
//
// V is a SIMD vector on a CPU (each lane its own softmax, merged at the end of the row) and a float in a CUDA thread. What is
// included before this file provides for it: maximum(a, b) = a > b ? a : b, fast_exp2(x), and kLowestExponent, an exponent whose
// fast_exp2 is exactly 0 (cpu/simd.h, cuda/device.cuh).
//
// Exponents are (z - max) * scale with scale = log2(e) / temperature: subtract first, then scale. Folding the product into one fma
// would lose a logit of 1e6 its fraction.
#pragma once

#include <cfloat>

#include "portable.h"

namespace grpo {
inline namespace GRPO_ISA {

// Held above kLowestExponent so that -inf gives 0 here and in every product with it; NaN passes (also inf - inf, a row that holds
// +inf), and from here reaches `weighted`, which no rescaling can clear.
template <class V>
GRPO_HOST_DEVICE inline V exponent(V z, V max, V scale) {
    return maximum(V{} + kLowestExponent, (z - max) * scale);
}

// A sum that keeps what rounding took (Knuth's two-sum): 150 packs added to one large term would lose 1e-5 otherwise.
template <class V>
struct ExactSum {
    V value{}, error{};

    GRPO_HOST_DEVICE void add(V x) {
        const V sum = value + x;
        const V virtual_x = sum - value;
        error += (value - (sum - virtual_x)) + (x - virtual_x);
        value = sum;
    }
    GRPO_HOST_DEVICE void scale(V factor) {
        value *= factor;
        error *= factor;
    }
};

template <class V>
struct OnlineSoftmax {
    V max = V{} - FLT_MAX;  // not -inf: (-inf) - (-inf) is NaN, and a row may open with a run of -inf
    ExactSum<V> sum;        // of 2^t, t the exponents of all logits so far
    ExactSum<V> weighted;   // of t 2^t; entropy = log(sum) - log(2) weighted / sum

    // Moves the reference up to `pack_max`, where that is higher. Rescaling by 1 changes no bit.
    GRPO_HOST_DEVICE void raise(V pack_max, V scale) {
        const V higher = maximum(pack_max, max);
        const V t = exponent(max, higher, scale);
        const V factor = fast_exp2(t);
        weighted.value += t * sum.value;
        weighted.error += t * sum.error;
        weighted.scale(factor);
        sum.scale(factor);
        max = higher;
    }

    // Adds a pack whose exponentials were taken against `max`.
    GRPO_HOST_DEVICE void add(V pack_sum, V pack_weighted) {
        sum.add(pack_sum);
        weighted.add(pack_weighted);
    }
};

}  // namespace GRPO_ISA
}  // namespace grpo
