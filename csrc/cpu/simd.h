// A vector of floats as wide as the instruction set of this build has. The compiler's vector extension does the arithmetic, so the
// same text is SSE2, AVX2, AVX-512 and NEON; intrinsics stand only where it cannot: here a maximum with a defined answer to NaN.
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

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

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

// To an aligned address, past the caches. stream_end() orders these stores before whatever follows.
inline void stream(void* p, Bits v) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX2__)
    _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
#elif defined(__x86_64__)
    _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
#else
    store(p, v);
#endif
}
inline void stream_end() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
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
