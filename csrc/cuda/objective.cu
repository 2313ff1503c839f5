// The per-token objective over log-probabilities that are there already: one thread a token.

#include "cuda/device.cuh"

namespace grpo::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) objective_kernel(int64_t rows, const float* logps, const float* entropy, TokenInputs in,
                                                             const uint8_t* active, ObjectiveParams params, TokenOutputs out) {
    const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (row >= rows) return;
    if (active && !active[row]) return store_token(out, row, TokenLoss{});
    store_token(out, row, token_objective(load_token(in, row, logps[row], entropy ? entropy[row] : 0.0f), params));
}

}  // namespace

void objective(int64_t rows, const float* logps, const float* entropy, const TokenInputs& in, const uint8_t* active,
               const ObjectiveParams& params, const TokenOutputs& out, const Queue& queue) {
    const Grid grid = {(rows + kThreads - 1) / kThreads, kThreads};
    launch("objective", queue, grid, objective_kernel, rows, logps, entropy, in, active, params, out);
}

}  // namespace grpo::cuda
