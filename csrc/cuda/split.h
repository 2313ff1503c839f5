// Over how many blocks a row is split, for the forward and the one pass alike: their log-probabilities of a row have the same bits. It
// follows from architecture, dtype and V alone.
#pragma once

#include "kernels.h"

namespace grpo::cuda {

constexpr int kMaxThreads = 384;

struct Split {
    int blocks;           // 1: the portable design, which reads a row twice; 2, 4, 8: a cluster, which holds it in its shared memory
    int threads;          // of a block
    size_t shared_bytes;  // for the one pass beyond what every kernel has: a block's part of the row
};

Split split_of(DType dtype, int64_t vocab, int device);

// So many that a block has a few steps of work at hand, and a small row does not wait for idle warps.
constexpr int threads_for(int64_t columns) { return columns <= 1024 ? 32 : columns <= 8192 ? 128 : columns <= 65536 ? 256 : kMaxThreads; }

}  // namespace grpo::cuda
