// The entry points over rows of logits. A row is one block's, or one cluster's, where blocks of a cluster hold it in their shared memory:
// masked rows, which nobody reads, leave at once and cost only their zeros.

#include "cuda/row.cuh"
#include "cuda/split.h"

namespace grpo::cuda {
namespace {

// What holds a kernel's registers down, with nothing spilled: to 64, so that four blocks of 256 threads share a multiprocessor; the one
// pass, of which three do at most, to 80.
#define GRPO_ONE_SWEEP __launch_bounds__(512, 2)
#define GRPO_TWO_SWEEPS __launch_bounds__(kMaxThreads, 2)

template <class Storage>
__device__ typename Storage::Element* row_at(const Shape& shape, const Rows& rows, unsigned row) {
    const unsigned batch = row / unsigned(shape.time), time = row % unsigned(shape.time);
    return static_cast<typename Storage::Element*>(rows.data) + batch * rows.batch_stride + time * rows.time_stride;
}

__device__ void store_stats(const RowOutputs& out, int64_t row, const RowStats& stats) {
    out.logps[row] = stats.logp;
    out.entropy[row] = stats.entropy;
    if (out.row_max) out.row_max[row] = stats.max;
    if (out.log_sum) out.log_sum[row] = stats.log_sum;
}

// The token's logit, NaN where there is no such token: no address outside the row is ever made.
template <class Storage>
__device__ float chosen_logit(const typename Storage::Element* row, int64_t vocab, int64_t token_id) {
    return token_id >= 0 && token_id < vocab ? value_of<Storage>(row[token_id]) : NAN;
}

// Reads a part of a row into statistics, one pack ahead of what it computes. With `holds`, the part stays in shared memory, where each
// thread later finds what it put there itself.
template <class Storage, bool again, bool holds>
__device__ Softmax read_part(const Part<Storage>& part, const typename Storage::Element* row, const Exponential<float>& exp) {
    const int steps = part.steps();
    Softmax softmax;
    typename Part<Storage>::Pack ahead{};
    if (steps > 0) ahead = part.template load<again>(row, 0);
    for (int step = 0; step < steps; step++) {
        const auto pack = ahead;
        if (step + 1 < steps) ahead = part.template load<again>(row, step + 1);
        if constexpr (holds) {
            const Shared<uint4> held(kRowOffset);
            GRPO_UNROLL
            for (int k = 0; k < part.kVectors; k++)
                if (part.vector(step, k) < part.vectors) held.write(part.vector(step, k), pack.vectors[k]);
        }
        float z[part.kPack];
        unpack<Storage>(pack, z);
        push(softmax, z, exp);
    }
    return softmax;
}

template <class Storage>
__device__ typename Part<Storage>::Pack held_pack(const Part<Storage>& part, int step) {
    const Shared<uint4> held(kRowOffset);
    typename Part<Storage>::Pack pack{};
    GRPO_UNROLL
    for (int k = 0; k < part.kVectors; k++)
        if (part.vector(step, k) < part.vectors) pack.vectors[k] = held.read(part.vector(step, k));
    return pack;
}

template <class Storage>
__global__ void GRPO_ONE_SWEEP logprobs_forward_kernel(Shape shape, Rows logits, Targets targets, RowOutputs out, int blocks) {
    const unsigned row = blockIdx.x / blocks, rank = blockIdx.x % blocks;
    const bool stores = threadIdx.x == 0 && rank == 0;
    if (targets.active && !targets.active[row]) {
        if (stores) store_stats(out, row, RowStats{});
        return;
    }
    if (blocks > 1) cluster_arrive<Order::relaxed>(Barrier::row_begun);
    const auto* z = row_at<Storage>(shape, logits, row);
    const float temperature = targets.temperature[row];
    const float chosen = stores ? chosen_logit<Storage>(z, shape.vocab, targets.token_ids[row]) : 0.0f;
    const Exponential<float> exp(temperature);
    const Softmax part = read_part<Storage, false, false>({shape.vocab, blocks, int(rank)}, z, exp);
    const Softmax softmax = merged_over_row(part, blocks, int(rank), exp);
    if (stores) store_stats(out, row, row_stats(softmax, chosen, temperature));
}

template <class Storage>
__global__ void GRPO_ONE_SWEEP logprobs_backward_kernel(Shape shape, Rows logits, Targets targets, SavedRows saved, const float* dlogps,
                                                        const float* dentropy, Rows dlogits) {
    const unsigned row = blockIdx.x;
    const Part<Storage> part(shape.vocab, 1, 0);
    auto* dz = row_at<Storage>(shape, dlogits, row);
    if (targets.active && !targets.active[row]) return part.fill(dz, 0);
    const auto* z = row_at<Storage>(shape, logits, row);
    const int64_t token_id = targets.token_ids[row];
    const RowGrad grad = {dlogps[row],        dentropy ? dentropy[row] : 0.0f, saved.row_max[row], saved.log_sum[row],
                          saved.entropy[row], targets.temperature[row]};
    // In place, another thread may be ahead and have overwritten the target: only the one that sees its column uses its value.
    const bool is_valid = token_id >= 0 && token_id < shape.vocab, is_read = grad.a != 0.0f || grad.b != 0.0f;
    const float chosen = !is_valid ? NAN : is_read && part.has(token_id) ? value_of<Storage>(z[token_id]) : grad.max;
    const Exponential<float> exp(grad.temperature);
    write_gradient<Storage, false>(
        part, [&](int step) { return part.template load<false>(z, step); }, dz, token_id, grad.coefficients(chosen), exp);
}

// holds: the row stays in the shared memory of `blocks` blocks. Otherwise one block reads it twice, the second time backwards, from where
// the L2 cache has it.
template <class Storage, bool holds>
__global__ void GRPO_TWO_SWEEPS loss_and_grad_kernel(Shape shape, Rows logits, Targets targets, TokenInputs in, ObjectiveParams params,
                                                     RowOutputs stats_out, TokenOutputs loss_out, Rows dlogits, int blocks) {
    const unsigned row = blockIdx.x / blocks, rank = blockIdx.x % blocks;
    const bool stores = threadIdx.x == 0 && rank == 0;
    const Part<Storage> part(shape.vocab, blocks, int(rank));
    auto* dz = row_at<Storage>(shape, dlogits, row);
    if (targets.active && !targets.active[row]) {
        if (stores) {
            store_stats(stats_out, row, RowStats{});
            store_token(loss_out, row, TokenLoss{});
        }
        return part.fill(dz, 0);
    }
    if (holds && blocks > 1) cluster_arrive<Order::relaxed>(Barrier::row_begun);
    const auto* z = row_at<Storage>(shape, logits, row);
    const int64_t token_id = targets.token_ids[row];
    const float temperature = targets.temperature[row];
    const float chosen = threadIdx.x == 0 ? chosen_logit<Storage>(z, shape.vocab, token_id) : 0.0f;
    const Exponential<float> exp(temperature);
    const Softmax softmax = merged_over_row(read_part<Storage, !holds, holds>(part, z, exp), blocks, int(rank), exp);

    const Shared<Coefficients> shared(kStatisticsBytes);
    if (threadIdx.x == 0) {
        const RowStats stats = row_stats(softmax, chosen, temperature);
        const TokenLoss token = token_objective(load_token(in, row, stats.logp, stats.entropy), params);
        if (stores) {
            store_stats(stats_out, row, stats);
            store_token(loss_out, row, token);
        }
        const float dentropy = in.entropy_weights ? -in.entropy_weights[row] : 0.0f;
        const RowGrad grad = {token.dlogp, dentropy, stats.max, stats.log_sum, stats.entropy, temperature};
        shared.write(0, grad.coefficients(chosen));
    }
    block_barrier(Barrier::row_gradient);
    const Coefficients coefficients = shared.read(0);
    if constexpr (holds) {
        write_gradient<Storage, false>(part, [&](int step) { return held_pack(part, step); }, dz, token_id, coefficients, exp);
    } else {
        write_gradient<Storage, true>(part, [&](int step) { return part.template load<false>(z, step); }, dz, token_id, coefficients, exp);
    }
}

// Leaves at once where the factor is 1, without the host knowing.
template <class Storage>
__global__ void GRPO_ONE_SWEEP scale_kernel(Shape shape, Rows dlogits, const float* factor) {
    const float by = *factor;
    if (by == 1.0f) return;
    const Part<Storage> part(shape.vocab, 1, 0);
    auto* dz = row_at<Storage>(shape, dlogits, blockIdx.x);
    for (int step = 0; step < part.steps(); step++) {
        float g[part.kPack];
        unpack<Storage>(part.template load<false>(dz, step), g);
        GRPO_UNROLL
        for (float& x : g) x *= by;
        part.store(dz, step, pack_of<Storage>(g));
    }
}

}  // namespace

void logprobs_forward(const Shape& shape, const Rows& logits, const Targets& targets, const RowOutputs& out, const Queue& queue) {
    with_storage(shape.dtype, [&](auto storage) {
        const auto kernel = logprobs_forward_kernel<decltype(storage)>;
        const Split split = split_of(shape.dtype, shape.vocab, queue.device);
        const Grid grid = {shape.batch * shape.time * split.blocks, split.threads, split.blocks, kRowOffset};
        launch("logprobs_forward", queue, grid, kernel, shape, logits, targets, out, split.blocks);
    });
}

void logprobs_backward(const Shape& shape, const Rows& logits, const Targets& targets, const SavedRows& saved, const float* dlogps,
                       const float* dentropy, const Rows& dlogits, const Queue& queue) {
    with_storage(shape.dtype, [&](auto storage) {
        const auto kernel = logprobs_backward_kernel<decltype(storage)>;
        const Grid grid = {shape.batch * shape.time, threads_for(shape.vocab)};
        launch("logprobs_backward", queue, grid, kernel, shape, logits, targets, saved, dlogps, dentropy, dlogits);
    });
}

void loss_and_grad(const Shape& shape, const Rows& logits, const Targets& targets, const TokenInputs& in, const ObjectiveParams& params,
                   const RowOutputs& stats, const TokenOutputs& loss, const Rows& dlogits, const Queue& queue) {
    with_storage(shape.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        const Split split = split_of(shape.dtype, shape.vocab, queue.device);
        const auto kernel = split.blocks > 1 ? loss_and_grad_kernel<Storage, true> : loss_and_grad_kernel<Storage, false>;
        const Grid grid = {shape.batch * shape.time * split.blocks, split.threads, split.blocks, kRowOffset + split.shared_bytes};
        launch("loss_and_grad", queue, grid, kernel, shape, logits, targets, in, params, stats, loss, dlogits, split.blocks);
    });
}

void scale(const Shape& shape, const Rows& dlogits, const float* factor, const Queue& queue) {
    with_storage(shape.dtype, [&](auto storage) {
        const Grid grid = {shape.batch * shape.time, threads_for(shape.vocab)};
        launch("scale", queue, grid, scale_kernel<decltype(storage)>, shape, dlogits, factor);
    });
}

}  // namespace grpo::cuda
