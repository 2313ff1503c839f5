// Lets a C++ compiler take the .cu files as they are and run them on a CPU, so that the kernels of a machine without a GPU are tested:
// CUDA's own names over fibres. A block's threads are fibres of one thread, a cluster's blocks run side by side, blocks of a grid one
// after the other; a launch returns when its kernel is done, whatever the stream.
//
// What it checks at every launch: races in shared memory (race.h), accesses outside a block's shared memory or to a block that has not
// begun, reads of shared memory that nobody wrote, vector accesses that a GPU would refuse as misaligned, and barriers that some thread
// never reaches. A launch that shows one throws, and testing.h has the sentences. Global memory is the host's: AddressSanitizer watches
// it, where the build has it.
//
// What it cannot show: times; a memory model weaker than one thread's, beyond the races above; races in global memory; what ptxas makes
// of the code, and the hardware's own exponential (its error is imitated, see device.cuh).
#pragma once

#include <cuda_runtime_api.h>
#include <driver_types.h>
#include <vector_types.h>

#include <cstdint>
#include <cstring>
#include <utility>

namespace grpo::host {

// What device.cuh asks for beyond CUDA's names.
unsigned char* shared_memory();  // of the running block
void shared_access(const void* address, size_t bytes, bool write);
bool is_dropped(int barrier);
void count_launch(const char* kernel, int cluster);

// What the names below are made of.
void check_alignment(const void* address, size_t bytes);
void shuffle_xor(const void* value, void* result, size_t bytes, int mask);
void* of_block(const void* address, unsigned rank);
cudaError_t run(const cudaLaunchConfig_t& config, void (*kernel)(void*), void* arguments);

}  // namespace grpo::host

#define __launch_bounds__(...)

// Variables and not macros: a macro would rewrite every member of that name too.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

void __syncthreads();
void __cluster_barrier_arrive();
void __cluster_barrier_arrive_relaxed();
void __cluster_barrier_wait();
unsigned __clusterRelativeBlockRank();
unsigned __clusterSizeInBlocks();
inline void* __cluster_map_shared_rank(const void* address, unsigned rank) { return grpo::host::of_block(address, rank); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    T result;
    grpo::host::shuffle_xor(&value, &result, sizeof value, mask);
    return result;
}

inline int min(int a, int b) { return a < b ? a : b; }

template <class T>
T __ldcs(const T* address) {
    grpo::host::check_alignment(address, sizeof(T));
    T value;
    std::memcpy(&value, static_cast<const void*>(address), sizeof value);
    return value;
}

template <class T>
T __ldcg(const T* address) {
    return __ldcs(address);
}

template <class T>
void __stcs(T* address, T value) {
    grpo::host::check_alignment(address, sizeof(T));
    std::memcpy(static_cast<void*>(address), &value, sizeof value);
}

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    auto call = [kernel, &arguments...] { kernel(arguments...); };
    return grpo::host::run(*config, [](void* closure) { (*static_cast<decltype(call)*>(closure))(); }, &call);
}
