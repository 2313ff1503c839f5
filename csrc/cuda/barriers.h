// The barriers of the kernels, by name, so that each can be left out in turn: a test of the race check has to see every one missed.
// GRPO_DROP_BARRIER is the number of the one to leave out (-DGRPO_DROP_BARRIER=1 for compute-sanitizer on a GPU; the build for a CPU
// asks at run time).
#pragma once

namespace grpo {

enum class Barrier : int {
    row_begun,       // of a cluster: every block has begun, so its shared memory may be written to
    row_statistics,  // every warp has left its statistics of the row
    row_gradient,    // the first thread has made the coefficients of the gradient out of them
    batch_moments,   // advantages: sums over the whole batch, then squares about the mean
    batch_squares,
    group_moments,  // likewise over a group
    group_squares,
};

constexpr const char* kBarrierNames[] = {"row_begun",     "row_statistics", "row_gradient", "batch_moments",
                                         "batch_squares", "group_moments",  "group_squares"};

}  // namespace grpo
