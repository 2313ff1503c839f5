// Kernels with one fault each, for a GPU or a sanitizer to refuse: without them, a check that sees nothing would pass. A sound one shows
// that it is the fault which is seen. csrc/host/CMakeLists.txt takes this file into the module (CUDA_ON_HOST_WITH).

#include <memory>
#include <string>

#include "cuda/device.cuh"

namespace grpo {
namespace {

constexpr int kThreads = 64;
constexpr size_t kSharedBytes = kThreads * sizeof(float);

__global__ void sound(float* out) {
    const Shared<float> shared(0);
    const int i = int(threadIdx.x);
    shared.write(i, float(i));
    __syncthreads();
    out[i] = shared.read(kThreads - 1 - i);
}

__global__ void writes_behind_the_array(float* out) { out[threadIdx.x + 1] = 1.0f; }

__global__ void reads_behind_the_array(float* out) { out[0] += __ldcs(out + threadIdx.x + 1); }

__global__ void writes_behind_a_local_array(float* out) {
    volatile float local[4];
    for (volatile int i = 0; i <= 4; i = i + 1) local[i] = float(i);
    out[threadIdx.x] = local[0];
}

__global__ void loads_a_misaligned_vector(float* out) {
    const uint4 vector = __ldcs(reinterpret_cast<const uint4*>(out + 1));
    memcpy(out, &vector, sizeof vector);
}

__global__ void stores_a_misaligned_vector(float* out) { __stcs(reinterpret_cast<uint4*>(out + 2), uint4{}); }

__global__ void writes_behind_shared_memory(float*) { Shared<float>(0).write(int(threadIdx.x) + 1, 1.0f); }

__global__ void reads_shared_memory_that_nobody_wrote(float* out) { out[threadIdx.x] = Shared<float>(0).read(int(threadIdx.x)); }

__global__ void two_threads_write_one_word(float*) { Shared<float>(0).write(0, float(threadIdx.x)); }

__global__ void reads_without_a_barrier(float* out) {
    const Shared<float> shared(0);
    if (threadIdx.x == 0) shared.write(0, 1.0f);
    out[threadIdx.x] = shared.read(0);
}

__global__ void overwrites_without_a_barrier(float* out) {
    const Shared<float> shared(0);
    if (threadIdx.x == 0) shared.write(0, 1.0f);
    __syncthreads();
    out[threadIdx.x] = shared.read(0);
    if (threadIdx.x == 0) shared.write(0, 2.0f);
}

__global__ void half_of_the_block_waits(float*) {
    if (threadIdx.x < kThreads / 2) __syncthreads();
}

__global__ void an_integer_overflows(float* out) {
    volatile int large = 0x7fffffff;
    out[threadIdx.x] = float(large + int(threadIdx.x));
}

}  // namespace

// What the launch of one of them threw, or "" where it threw nothing.
extern "C" __attribute__((visibility("default"))) const char* planted(const char* name) {
    static std::string said;
    const std::pair<const char*, void (*)(float*)> kernels[] = {
#define KERNEL(name) {#name, name}
        KERNEL(sound),
        KERNEL(writes_behind_the_array),
        KERNEL(reads_behind_the_array),
        KERNEL(writes_behind_a_local_array),
        KERNEL(loads_a_misaligned_vector),
        KERNEL(stores_a_misaligned_vector),
        KERNEL(writes_behind_shared_memory),
        KERNEL(reads_shared_memory_that_nobody_wrote),
        KERNEL(two_threads_write_one_word),
        KERNEL(reads_without_a_barrier),
        KERNEL(overwrites_without_a_barrier),
        KERNEL(half_of_the_block_waits),
        KERNEL(an_integer_overflows),
    };
    for (const auto& [known, kernel] : kernels) {
        if (std::string(name) != known) continue;
        const std::unique_ptr<float[]> out(new float[kThreads]());
        try {
            launch(known, {0, nullptr}, {1, kThreads, 1, kSharedBytes}, kernel, out.get());
        } catch (const std::exception& error) {
            said = error.what();
            return said.c_str();
        }
        return "";
    }
    return "no such kernel";
}

}  // namespace grpo
