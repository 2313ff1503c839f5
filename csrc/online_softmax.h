// Softmax statistics in one read. The running maximum is the reference of all exponentials; a pack of logits moves it once, so N
// logits cost N + 1 exponentials, and a pack is summed from 0 before it is added, which is also what keeps the sum exact.
//
// V is a SIMD vector on a CPU (each lane its own softmax, merged at the end of the row) and a float in a CUDA thread. What is
// included before this file provides for it (cpu/exponential.h, cuda/device.cuh): maximum(a, b) = a > b ? a : b, and
// Exponential<V>, called as exp(z, max, exponent): exp((z - max) / temperature), 0 for z = -inf, and the exponent, finite there too.
// It must subtract first, then scale: folding the product into one fma would lose a logit of 1e6 its fraction.
#pragma once

#include <cfloat>

#include "portable.h"

namespace grpo {
inline namespace GRPO_ISA {

// A sum that keeps what rounding took (Knuth's two-sum). Where one exponential is 1 and the others 1e-8 each, as in a row with p
// near 1, a plain sum would lose them all, and 1 - p with them.
template <class V>
struct ExactSum {
    V value{}, error{};

    GRPO_HOST_DEVICE void add(V x) {
        const V sum = value + x;
        const V virtual_x = sum - value;
        error += (value - (sum - virtual_x)) + (x - virtual_x);
        value = sum;
    }
};

template <class V>
struct OnlineSoftmax {
    V max = V{} - FLT_MAX;  // not -inf: (-inf) - (-inf) is NaN, and a row may open with a run of -inf
    ExactSum<V> sum;        // of exponentials against `max`
    ExactSum<V> weighted;   // of exponential times exponent. NaN once a logit was NaN or +inf, and no rescaling clears that.

    // Moves the reference up to `pack_max`, where that is higher. Rescaling by 1 changes no bit.
    GRPO_HOST_DEVICE void raise(V pack_max, const Exponential<V>& exp) {
        const V higher = maximum(pack_max, max);
        V exponent;
        const V factor = exp(max, higher, exponent);
        weighted = {factor * (weighted.value + exponent * sum.value), factor * (weighted.error + exponent * sum.error)};
        sum = {factor * sum.value, factor * sum.error};
        max = higher;
    }
};

}  // namespace GRPO_ISA
}  // namespace grpo
