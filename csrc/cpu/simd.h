// A vector of floats as wide as the instruction set of this build has. The compiler's vector extension does the arithmetic, so the
// same text is SSE2, AVX2, AVX-512 and NEON; intrinsics stand only where it cannot: a maximum with a defined answer to NaN, and
// scaling by a power of two.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "portable.h"

namespace grpo {
inline namespace GRPO_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));

// Unaligned: a row starts where it starts, and the mapping of columns to lanes must not depend on it.
template <class V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
inline void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

inline Vec broadcast(float x) { return Vec{} + x; }

// a > b ? a : b, so b where either is NaN.
inline Vec maximum(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
    return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}

// The smallest exponent that occurs: 2 to it is exactly 0 below. A logit of -inf is held here, so that 0 times it stays 0.
#if defined(__AVX512F__)
constexpr float kLowestExponent = -200.0f;  // 2^-200 underflows to 0
#else
constexpr float kLowestExponent = -127.0f;  // the exponent field of 2^-127 is 0, its fraction too: 0
#endif

// 2^x for kLowestExponent <= x <= 0; exactly 1 at 0. Minimax polynomials of 2^f over |f| <= 1/2 with p(0) = 1, relative error
// 1.1e-7 (degree 5) and 2.9e-6 (degree 4: enough where the result is rounded to 8 or 11 bits).
template <int degree = 5>
inline Vec fast_exp2(Vec x) {
#if defined(__AVX512F__)
    const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Vec shifted = x + 12582912.0f;  // 1.5 * 2^23: the low bits of the sum are x rounded to an integer
    const Vec n = shifted - 12582912.0f;
#endif
    const Vec f = x - n;
    Vec p;
    if constexpr (degree == 5) {
        p = f * 0.001326472731307149f + 0.009671512991189957f;
        p = p * f + 0.05550733581185341f;
        p = p * f + 0.24022242426872253f;
        p = p * f + 0.6931470036506653f;
    } else {
        static_assert(degree == 4);
        p = f * 0.009582852944731712f + 0.055906426161527634f;
        p = p * f + 0.24024099111557007f;
        p = p * f + 0.6931241750717163f;
    }
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return (Vec)((Bits)p + ((Bits)shifted << 23));
#endif
}

inline float highest(Vec v) {
    float m = v[0];
    for (int i = 1; i < kLanes; i++) m = v[i] > m ? v[i] : m;
    return m;
}

inline double total(Vec v) {
    double sum = 0.0;
    for (int i = 0; i < kLanes; i++) sum += double(v[i]);
    return sum;
}

}  // namespace GRPO_ISA
}  // namespace grpo
