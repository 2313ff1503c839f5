// What the kernels are written in: the exponential, shuffles, barriers, shared memory, and the launch. Everything here has a twin for the
// CPU (host/cuda_on_host.h), so that g++ compiles the same kernels for tests: inline PTX only beside its twin, shared memory only through
// Shared (a `__shared__` variable would be a local of every thread there), launches only through launch().
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define GRPO_UNROLL _Pragma("unroll")
#else
#include "host/cuda_on_host.h"
#define GRPO_UNROLL _Pragma("GCC unroll 16")
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/barriers.h"
#include "kernels.h"
#include "portable.h"

namespace grpo {
inline namespace GRPO_ISA {

constexpr int kWarp = 32;

__device__ inline int lane() { return int(threadIdx.x) % kWarp; }
__device__ inline int warp() { return int(threadIdx.x) / kWarp; }
__device__ inline int warps() { return int(blockDim.x) / kWarp; }

// --- Arithmetic --------------------------------------------------------------------------------------------------------------------

// 2^x by the special function unit: within 2 units in the last place, exactly 1 at 0, and 0 below 2^-126, where anything else would take
// three more instructions a logit. The twin is off by as much, or tests on a CPU would vouch for too much.
__device__ inline float exp2_approximate(float x) {
#if defined(__CUDACC__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    const float y = std::exp2(x);
    if (std::isnan(x) || x == 0.0f) return y;
    if (y < 0x1p-125f) return y < 0x1p-126f ? 0.0f : y;
    const int units = int(__float_as_uint(x) * 2654435761u >> 30) - 2;  // as if by chance: -2, -1, 1 or 2
    return __uint_as_float(__float_as_uint(y) + unsigned(units < 0 ? units : units + 1));
#endif
}

// The larger one, NaN where either is: one instruction, where `a > b ? a : b` takes two.
__device__ inline float maximum_or_nan(float a, float b) {
#if defined(__CUDACC__)
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return std::isnan(a) || a > b ? a : b;
#endif
}

// The running maximum may pass over a NaN: the sums keep it.
__device__ inline float maximum(float a, float b) { return fmaxf(a, b); }

template <class V>
struct Exponential;

// exp((z - max) / temperature), and the exponent to base 2, in units of `kNats`. It is held at -127, where the exponential is exactly 0:
// -inf adds 0 to every sum of products.
template <>
struct Exponential<float> {
    static constexpr float kNats = 0.693147180559945309f;
    float scale;

    __device__ explicit Exponential(float temperature) : scale(1.442695040888963407f / temperature) {}

    __device__ float operator()(float z, float max, float& exponent) const {
        exponent = maximum_or_nan((z - max) * scale, -127.0f);
        return exp2_approximate(exponent);
    }
};

// --- Threads among each other --------------------------------------------------------------------------------------------------------

// What the lane at (lane ^ mask) brought.
template <class T>
__device__ T shuffle_xor(const T& value, int mask) {
#if defined(__CUDACC__)
    static_assert(sizeof(T) % 4 == 0, "whole words");
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof value);
    GRPO_UNROLL
    for (auto& word : words) word = __shfl_xor_sync(0xffffffffu, word, mask);
    T result;
    memcpy(&result, words, sizeof result);
    return result;
#else
    return __shfl_xor_sync(0xffffffffu, value, mask);
#endif
}

// Whether a test wants the kernels without this barrier (cuda/barriers.h).
__device__ inline bool is_dropped([[maybe_unused]] Barrier barrier) {
#if defined(GRPO_DROP_BARRIER)
    return int(barrier) == GRPO_DROP_BARRIER;
#elif !defined(__CUDACC__)
    return host::is_dropped(int(barrier));
#else
    return false;
#endif
}

__device__ inline void block_barrier(Barrier barrier) {
    if (!is_dropped(barrier)) __syncthreads();
}

// The two halves of a barrier of all blocks of a cluster (sm_90 on): what was written before arriving is seen after waiting. A relaxed one
// only says that this thread has come so far; it waits for no memory.
enum class Order { release, relaxed };

template <Order order = Order::release>
__device__ void cluster_arrive([[maybe_unused]] Barrier barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (!is_dropped(barrier)) order == Order::relaxed ? __cluster_barrier_arrive_relaxed() : __cluster_barrier_arrive();
#endif
}

__device__ inline void cluster_wait([[maybe_unused]] Barrier barrier) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (!is_dropped(barrier)) __cluster_barrier_wait();
#endif
}

// An array in the block's dynamic shared memory, from a byte offset on. No access goes round it: on a CPU it carries the race check.
template <class T>
class Shared {
  public:
    __device__ explicit Shared(size_t offset) {
#if defined(__CUDACC__)
        extern __shared__ __align__(16) unsigned char memory[];
#else
        unsigned char* memory = host::shared_memory();
#endif
        data_ = reinterpret_cast<T*>(memory + offset);
    }

    __device__ T read(int i) const {
#if !defined(__CUDACC__)
        host::shared_access(data_ + i, sizeof(T), false);
#endif
        return data_[i];
    }

    __device__ void write(int i, const T& value) const {
#if !defined(__CUDACC__)
        host::shared_access(data_ + i, sizeof(T), true);
#endif
        data_[i] = value;
    }

    // The same array of another block of the cluster.
    __device__ Shared of_block([[maybe_unused]] int rank) const {
        Shared other = *this;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        other.data_ = static_cast<T*>(__cluster_map_shared_rank(data_, unsigned(rank)));
#endif
        return other;
    }

  private:
    T* data_;
};

// --- The launch ----------------------------------------------------------------------------------------------------------------------

inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // or the next launch would be blamed for it
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check(cudaGetDevice(&previous_), "cudaGetDevice");
        if (device != previous_) check(cudaSetDevice(device), "cudaSetDevice");
        changed_ = device != previous_;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    int previous_ = 0;
    bool changed_ = false;
};

struct Grid {
    int64_t blocks;
    int threads;
    int cluster = 1;
    size_t shared_bytes = 0;
};

// Queues the kernel, or throws an error that names it. No blocks: nothing to do.
template <class... Parameters, class... Arguments>
void launch(const char* name, const cuda::Queue& queue, const Grid& grid, void (*kernel)(Parameters...), const Arguments&... arguments) {
    if (grid.blocks == 0) return;
    if (grid.blocks > 0x7fffffff) throw std::runtime_error(std::string(name) + ": more than 2^31 - 1 blocks");
    const DeviceGuard guard(queue.device);
    constexpr size_t kWithoutAsking = 48 * 1024;
    if (grid.shared_bytes > kWithoutAsking) {
        const auto* function = reinterpret_cast<const void*>(kernel);
        check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(grid.shared_bytes)), name);
        // As many of these blocks on a multiprocessor as fit, whatever that leaves of the L1 cache.
        check(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), name);
    }
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(grid.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(grid.blocks));
    config.blockDim = dim3(unsigned(grid.threads));
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = static_cast<cudaStream_t>(queue.stream);
    config.attrs = &cluster;
    config.numAttrs = grid.cluster > 1 ? 1 : 0;
#if !defined(__CUDACC__)
    host::count_launch(name, grid.cluster);
#endif
    check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
    check(cudaGetLastError(), name);
}

}  // namespace GRPO_ISA
}  // namespace grpo
