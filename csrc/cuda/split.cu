// The table of splits, and what is known of the device that it is asked for.

#include <algorithm>
#include <atomic>

#include "cuda/device.cuh"
#include "cuda/split.h"

namespace grpo::cuda {
namespace {

struct Rule {
    int arch;           // from this one on
    int64_t row_bytes;  // up to so many
    int blocks;
};

// Not yet measured: what follows is arithmetic for an H200, 228 KB of shared memory and 32 bytes a nanosecond for each multiprocessor.
//   A row of up to 32 KB: a second reading out of the L2 cache costs less than the exchange of a cluster.
//   Beyond: as few blocks as leave each a part of at most 74 KB. Three of those fit a multiprocessor, so that one reads while another
//   writes and a third waits for its cluster: 151,936 columns are 4 blocks in 16 bits and 8 in float32.
//   Beyond 8 times that the parts grow to what one block may have, then the row is not held.
//   Before sm_90 there are no clusters.
constexpr int64_t kPart = 74 * 1024 + 512;
constexpr Rule kRules[] = {
    {90, 32 * 1024, 1}, {90, 2 * kPart, 2}, {90, 4 * kPart, 4}, {90, INT64_MAX, 8}, {0, INT64_MAX, 1},
};

std::atomic<int> forced{0};

__global__ void tells_what_it_was_compiled_for() {}

int attribute(cudaDeviceAttr name, int device) {
    int value;
    check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
    return value;
}

// The device's, or that of the code which was loaded for it: PTX of sm_80 on a newer device has no cluster in it.
int arch_of(int device) {
    const DeviceGuard guard(device);
    cudaFuncAttributes code;
    check(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(tells_what_it_was_compiled_for)), "cudaFuncGetAttributes");
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, device), minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
    return std::min(major * 10 + minor, code.ptxVersion);
}

int blocks_by_table(int arch, int64_t row_bytes) {
    for (const Rule& rule : kRules)
        if (arch >= rule.arch && row_bytes <= rule.row_bytes) return rule.blocks;
    return 1;
}

}  // namespace

Split split_of(DType dtype, int64_t vocab, int device) {
    constexpr int64_t kUsed = 4096;  // of a block's shared memory, beside the row
    const int64_t bytes = vocab * (dtype == DType::float32 ? 4 : 2), vectors = (bytes + 15) / 16;
    const int arch = arch_of(device);
    const int blocks = arch < 90 ? 1 : forced ? forced.load() : blocks_by_table(arch, bytes);
    const int64_t part = (vectors + blocks - 1) / blocks * 16;
    if (blocks > 1 && part + kUsed <= attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device))
        return {blocks, threads_for(vocab / blocks), size_t(part)};
    // Rows in flight are to stay in the L2 cache until they are read again: no more of them at once than fit into three quarters of it.
    // A block that asks for more shared memory keeps others away.
    const int64_t fit = attribute(cudaDevAttrL2CacheSize, device) / 4 * 3 / (bytes * attribute(cudaDevAttrMultiProcessorCount, device) + 1);
    const int64_t share = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) / (std::max<int64_t>(fit, 1) + 1);
    return {1, threads_for(vocab), fit < 4 ? size_t(share) : 0};
}

void force_split(int split) { forced = split; }

std::vector<int> archs() {
#if defined(__CUDA_ARCH_LIST__)
    std::vector<int> archs = {__CUDA_ARCH_LIST__};
    for (int& arch : archs) arch /= 10;
    return archs;
#else
    return {90};  // on a CPU: the one that is emulated
#endif
}

}  // namespace grpo::cuda
