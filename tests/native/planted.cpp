// Traffic that the counter has to see, compiled as the kernels are: without it, a counter that sees nothing would pass.

#include <cstdint>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED float planted_sweep(const float* row, int64_t vocab) {
    float sum = 0.0f;
    for (int64_t i = 0; i < vocab; i++) sum += row[i];
    return sum;
}

EXPORTED void planted_copy(float* to, const float* from, int64_t vocab) { std::memcpy(to, from, vocab * sizeof *to); }

// As fill_row of the kernels stores, from an aligned address on.
EXPORTED void planted_fill(float* row, int64_t vocab) {
#if defined(__x86_64__)
    for (int64_t i = 0; i + 4 <= vocab; i += 4) _mm_stream_si128(reinterpret_cast<__m128i*>(row + i), _mm_setzero_si128());
#else
    std::memset(row, 0, vocab / 4 * 4 * sizeof *row);
#endif
}
