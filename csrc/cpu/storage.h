// How each dtype is stored: two vectors of floats at a time, so that 16-bit elements fill a whole load. Kernels are templates over
// these, and know no dtype.
#pragma once

#include "cpu/simd.h"
#include "kernels.h"

namespace grpo {
inline namespace GRPO_ISA {

struct Float32 {
    using Element = float;
    static constexpr Element kMinusInf = -__builtin_inff(), kNan = __builtin_nanf("");

    static void load2(const Element* p, Vec& a, Vec& b) {
        a = load<Vec>(p);
        b = load<Vec>(p + kLanes);
    }
    static void store2(Element* p, Vec a, Vec b) {
        store(p, a);
        store(p + kLanes, b);
    }
};

// A word of two bfloat16 holds the even column in its low half and the odd one in its high half: a shift and a mask make floats of
// them, with no shuffle.
struct BFloat16 {
    using Element = uint16_t;
    static constexpr Element kMinusInf = 0xff80, kNan = 0x7fc0;

    static void load2(const Element* p, Vec& even, Vec& odd) {
        const Bits words = load<Bits>(p);
        even = (Vec)(words << 16);
        odd = (Vec)(words & 0xffff0000u);
    }
    static void store2(Element* p, Vec even, Vec odd) { store(p, (rounded((Bits)even) >> 16) | (rounded((Bits)odd) & 0xffff0000u)); }

  private:
    // To nearest, ties to even, in the high half.
    static Bits rounded(Bits x) { return x + 0x7fffu + ((x >> 16) & 1u); }
};

struct Float16 {
    using Element = uint16_t;
    static constexpr Element kMinusInf = 0xfc00, kNan = 0x7e00;

#if defined(__AVX512F__)
    static void load2(const Element* p, Vec& a, Vec& b) {
        a = (Vec)_mm512_cvtph_ps(load<__m256i>(p));
        b = (Vec)_mm512_cvtph_ps(load<__m256i>(p + kLanes));
    }
    static void store2(Element* p, Vec a, Vec b) {
        store(p, _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT));
        store(p + kLanes, _mm512_cvtps_ph((__m512)b, _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(__F16C__)
    static void load2(const Element* p, Vec& a, Vec& b) {
        a = (Vec)_mm256_cvtph_ps(load<__m128i>(p));
        b = (Vec)_mm256_cvtph_ps(load<__m128i>(p + kLanes));
    }
    static void store2(Element* p, Vec a, Vec b) {
        store(p, _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT));
        store(p + kLanes, _mm256_cvtps_ph((__m256)b, _MM_FROUND_TO_NEAREST_INT));
    }
#else
    static void load2(const Element* p, Vec& even, Vec& odd) {
        const Bits words = load<Bits>(p);
        even = widened(words & 0xffffu);
        odd = widened(words >> 16);
    }
    static void store2(Element* p, Vec even, Vec odd) { store(p, narrowed((Bits)even) | (narrowed((Bits)odd) << 16)); }

  private:
    static Vec widened(Bits half) {
        const Bits sign = (half & 0x8000u) << 16;
        Bits x = (half & 0x7fffu) << 13;
        const Bits field = x & 0x0f800000u;
        const Bits special = (Bits)(field == 0x0f800000u);  // inf, NaN
        const Bits tiny = (Bits)(field == 0u);              // 0, subnormal: 2^-14 is put on top as the hidden bit and taken off again
        x += (112u << 23) + (special & (112u << 23)) + (tiny & (1u << 23));
        return (Vec)((Bits)((Vec)x - (Vec)(tiny & (113u << 23))) | sign);
    }
    static Bits narrowed(Bits x) {
        const Bits sign = (x >> 16) & 0x8000u;
        x &= 0x7fffffffu;
        const Bits normal = (x - (112u << 23) + 0xfffu + ((x >> 13) & 1u)) >> 13;
        const Bits subnormal = (Bits)((Vec)x + 0.5f) - (126u << 23);  // the sum's last bit is 2^-24, a subnormal's unit
        const Bits is_subnormal = (Bits)(x < (113u << 23)), is_inf = (Bits)(x >= 0x477ff000u), is_nan = (Bits)(x > 0x7f800000u);
        const Bits finite = (is_subnormal & subnormal) | (~is_subnormal & normal);
        return sign | (~is_inf & finite) | (is_inf & (0x7c00u | (is_nan & 0x200u)));
    }
#endif
};

// One element, through the same conversion as all others.
template <class Storage>
inline float read(const typename Storage::Element* p) {
    typename Storage::Element pair[2 * kLanes] = {*p};
    Vec a, b;
    Storage::load2(pair, a, b);
    return a[0];
}

template <class Storage>
inline void write(typename Storage::Element* p, float x) {
    typename Storage::Element pair[2 * kLanes];
    Storage::store2(pair, broadcast(x), Vec{});
    *p = pair[0];
}

// Calls body with the storage of `dtype`.
template <class Body>
inline void with_storage(DType dtype, Body body) {
    switch (dtype) {
        case DType::float32:
            return body(Float32{});
        case DType::bfloat16:
            return body(BFloat16{});
        case DType::float16:
            return body(Float16{});
    }
}

}  // namespace GRPO_ISA
}  // namespace grpo
