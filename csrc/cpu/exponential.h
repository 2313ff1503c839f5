// exp((z - max) / temperature) for z <= max, the one transcendental of these kernels, and the larger half of their time.
//
// 2^t is split as 2^n 2^(k / size) 2^f. Where a register holds a table of 2^(k / size) and can be indexed, |f| is so small that a
// polynomial of degree 2 or 3 does; elsewhere the table is one entry long and the degree 5. Relative error 1e-7 in each case, and
// exactly 1 at z = max: a log-probability is never above 0.
//
// The exponent goes to the caller too, for the entropy, in the unit that costs nothing here. It is held at 2^-127, of which the
// bit pattern below is exactly 0, so that -inf contributes 0 to every sum of products. NaN passes.
#pragma once

#include "cpu/simd.h"

namespace grpo {
inline namespace GRPO_ISA {

template <class V>
struct Exponential;

#if defined(__AVX2__)

#if defined(__AVX512F__)
constexpr int kTableBits = 5;
#else
constexpr int kTableBits = 3;
#endif

// Bits of 2^(k / size) as a float, less what the index adds when it is shifted into the exponent's place with n.
struct PowerTable {
    alignas(64) uint32_t bits[1 << kTableBits];

    constexpr PowerTable() : bits() {
        const double ratio = kTableBits == 5 ? 1.0218971486541166 : 1.0905077326652577;  // 2^(1 / size)
        double power = 1.0;
        for (uint32_t k = 0; k < (1u << kTableBits); k++, power *= ratio)
            bits[k] = 0x3f800000u + uint32_t((power - 1.0) * 8388608.0 + 0.5) - (k << (23 - kTableBits));
    }
};
constexpr PowerTable kPowers;

template <>
struct Exponential<Vec> {
    explicit Exponential(double temperature)
        : nats(1.0 / temperature), scale(broadcast(float(kLog2e / temperature))), lowest(broadcast(float(-127.0 * kLn2 * temperature))) {}

    // The exponent in units of `nats` is z - max.
    Vec operator()(Vec z, Vec max, Vec& exponent) const {
        constexpr float kShift = 1.5f * (1 << (23 - kTableBits));  // its sum with t has t in its low bits, rounded to 1 / size
        exponent = maximum(lowest, z - max);
        const Vec shifted = exponent * scale + kShift;
        const Vec f = exponent * scale - (shifted - kShift);
        const Vec power = (Vec)(lookup((Bits)shifted) + ((Bits)shifted << (23 - kTableBits)));
#if defined(__AVX512F__)
        const Vec p = f * 0.24022649228572845f + 0.6931573152542114f;
#else
        const Vec p = (f * 0.0554962232708931f + 0.2402576357126236f) * f + 0.6931472420692444f;
#endif
        return power * (p * f) + power;
    }

    double nats;
    Vec scale;

  private:
    Vec lowest;
#if defined(__AVX512F__)
    Bits low = load<Bits>(kPowers.bits), high = load<Bits>(kPowers.bits + kLanes);
    Bits lookup(Bits index) const { return (Bits)_mm512_permutex2var_epi32((__m512i)low, (__m512i)index, (__m512i)high); }
#else
    Bits table = load<Bits>(kPowers.bits);
    Bits lookup(Bits index) const { return (Bits)_mm256_permutevar8x32_epi32((__m256i)table, (__m256i)index); }
#endif
};

#else

template <>
struct Exponential<Vec> {
    explicit Exponential(double temperature) : nats(kLn2), scale(broadcast(float(kLog2e / temperature))) {}

    // The exponent in units of `nats` is t, to base 2.
    Vec operator()(Vec z, Vec max, Vec& exponent) const {
        constexpr float kShift = 1.5f * (1 << 23);  // its sum with t has t in its low bits, rounded to an integer
        exponent = maximum(broadcast(-127.0f), (z - max) * scale);
        const Vec shifted = exponent + kShift;
        const Vec f = exponent - (shifted - kShift);
        Vec p = f * 0.001326472731307149f + 0.009671512991189957f;
        p = p * f + 0.05550733581185341f;
        p = p * f + 0.24022242426872253f;
        p = p * f + 0.6931470036506653f;
        p = p * f + 1.0f;
        return (Vec)((Bits)p + ((Bits)shifted << 23));
    }

    double nats;

  private:
    Vec scale;
};

#endif

}  // namespace GRPO_ISA
}  // namespace grpo
