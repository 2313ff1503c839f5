// How each dtype is stored: so many columns make a vector of 16 bytes, the widest load that there is. Kernels are templates over these,
// and know no dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.cuh"

namespace grpo {
inline namespace GRPO_ISA {

struct Float32 {
    using Element = uint32_t;  // the bits
    static constexpr int kColumns = 4;
    static constexpr Element kMinusInf = 0xff800000u, kNan = 0x7fc00000u;

    __device__ static void unpack(uint32_t word, float* values) { values[0] = __uint_as_float(word); }
    __device__ static uint32_t pack(const float* values) { return __float_as_uint(values[0]); }
};

// Both 16-bit dtypes: a word has the even column in its low half.
struct BFloat16 {
    using Element = uint16_t;
    static constexpr int kColumns = 8;
    static constexpr Element kMinusInf = 0xff80, kNan = 0x7fc0;

    __device__ static void unpack(uint32_t word, float* values) {
        values[0] = __uint_as_float(word << 16);
        values[1] = __uint_as_float(word & 0xffff0000u);
    }
    __device__ static uint32_t pack(const float* values) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[0], values[1]);
        uint32_t word;
        memcpy(&word, &pair, sizeof word);
        return word;
    }
};

struct Float16 {
    using Element = uint16_t;
    static constexpr int kColumns = 8;
    static constexpr Element kMinusInf = 0xfc00, kNan = 0x7e00;

    __device__ static void unpack(uint32_t word, float* values) {
        __half2 pair;
        memcpy(static_cast<void*>(&pair), &word, sizeof pair);
        const float2 both = __half22float2(pair);
        values[0] = both.x;
        values[1] = both.y;
    }
    __device__ static uint32_t pack(const float* values) {
        const __half2 pair = __floats2half2_rn(values[0], values[1]);
        uint32_t word;
        memcpy(&word, &pair, sizeof word);
        return word;
    }
};

template <class Storage>
__device__ float value_of(typename Storage::Element bits) {
    float values[2];
    Storage::unpack(bits, values);
    return values[0];
}

template <class Storage>
__device__ typename Storage::Element bits_of(float value) {
    const float values[2] = {value, 0.0f};
    return typename Storage::Element(Storage::pack(values));
}

// Calls body(Storage()) for the dtype.
template <class Body>
void with_storage(DType dtype, Body body) {
    switch (dtype) {
        case DType::bfloat16:
            return body(BFloat16());
        case DType::float16:
            return body(Float16());
        default:
            return body(Float32());
    }
}

}  // namespace GRPO_ISA
}  // namespace grpo
