// The entry points over rows, for the instruction set that this file is compiled for (it is compiled once for each).
// Rows are dealt out one by one as threads come free, so that masked rows, which cost a third, leave nobody idle; a row is
// one thread's, so no result depends on how many there are.

#include "cpu/rows.h"

#include <omp.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/row.h"

namespace grpo::cpu {
inline namespace GRPO_ISA {
namespace {

// Rows that are dealt out together: enough that dealing costs nothing beside them.
int64_t rows_at_once(int64_t vocab) { return 1 + 32768 / (vocab + 1); }

template <class Body>
void for_each_row(int64_t rows, int64_t vocab, int num_threads, Body body) {
    const int64_t at_once = rows_at_once(vocab);
#pragma omp parallel for schedule(dynamic, at_once) num_threads(num_threads) if (num_threads > 1 && rows > at_once)
    for (int64_t row = 0; row < rows; row++) body(row);
}

template <class Element>
Element* row_at(const Shape& shape, const Rows& rows, int64_t row) {
    const int64_t batch = row / shape.time, time = row % shape.time;
    return static_cast<Element*>(rows.data) + batch * rows.batch_stride + time * rows.time_stride;
}

// A stretch of floats for every thread, from a cache line on.
class Scratch {
  public:
    Scratch(int64_t floats, int num_threads) : floats_((floats + 15) / 16 * 16) {
        data_ = static_cast<float*>(std::aligned_alloc(64, sizeof(float) * floats_ * num_threads));
        if (!data_) throw std::bad_alloc();
    }
    ~Scratch() { std::free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    float* of_this_thread() const { return data_ + floats_ * omp_get_thread_num(); }

  private:
    int64_t floats_;
    float* data_;
};

void store_stats(const RowOutputs& out, int64_t row, const RowStats& stats) {
    out.logps[row] = stats.logp;
    out.entropy[row] = stats.entropy;
    if (out.row_max) out.row_max[row] = stats.max;
    if (out.log_sum) out.log_sum[row] = stats.log_sum;
}

bool is_active(const uint8_t* active, int64_t row) { return !active || active[row]; }

void logprobs_forward(const Shape& shape, const Rows& logits, const Targets& targets, const RowOutputs& out, int num_threads) {
    with_storage(shape.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        for_each_row(shape.batch * shape.time, shape.vocab, num_threads, [&](int64_t row) {
            if (!is_active(targets.active, row)) return store_stats(out, row, RowStats{});
            const auto* z = row_at<typename Storage::Element>(shape, logits, row);
            store_stats(out, row, row_stats<Storage, false>(z, shape.vocab, targets.token_ids[row], targets.temperature[row], nullptr));
        });
    });
}

void objective(int64_t rows, const float* logps, const float* entropy, const TokenInputs& in, const uint8_t* active,
               const ObjectiveParams& params, const TokenOutputs& out, int num_threads) {
    for_each_row(rows, 64, num_threads, [&](int64_t row) {
        if (!is_active(active, row)) return store_token(out, row, TokenLoss{});
        store_token(out, row, token_objective(load_token(in, row, logps[row], entropy ? entropy[row] : 0.0f), params));
    });
}

void logprobs_backward(const Shape& shape, const Rows& logits, const Targets& targets, const SavedRows& saved, const float* dlogps,
                       const float* dentropy, const Rows& dlogits, int num_threads) {
    with_storage(shape.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        using Element = typename Storage::Element;
        for_each_row(shape.batch * shape.time, shape.vocab, num_threads, [&](int64_t row) {
            auto* dz = row_at<Element>(shape, dlogits, row);
            if (!is_active(targets.active, row)) return fill_row<Storage>(dz, shape.vocab, 0);
            const RowGrad grad = {dlogps[row],        dentropy ? dentropy[row] : 0.0f, saved.row_max[row],    saved.log_sum[row],
                                  saved.entropy[row], targets.temperature[row],        targets.token_ids[row]};
            const bool valid_id = grad.token_id >= 0 && grad.token_id < shape.vocab;
            if (std::isnan(grad.log_sum) || std::isnan(grad.a) || std::isnan(grad.b) || !valid_id)
                return fill_row<Storage>(dz, shape.vocab, Storage::kNan);
            if (grad.a == 0.0f && grad.b == 0.0f) return fill_row<Storage>(dz, shape.vocab, 0);
            row_grad<Storage>(row_at<Element>(shape, logits, row), dz, shape.vocab, grad);
        });
    });
}

void loss_and_grad(const Shape& shape, const Rows& logits, const Targets& targets, const TokenInputs& in, const ObjectiveParams& params,
                   const RowOutputs& stats_out, const TokenOutputs& loss_out, const Rows& dlogits, int num_threads) {
    with_storage(shape.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        using Element = typename Storage::Element;
        const Scratch scratch(Exponentials<Storage>::scratch_floats(shape.vocab), num_threads);
        for_each_row(shape.batch * shape.time, shape.vocab, num_threads, [&](int64_t row) {
            auto* dz = row_at<Element>(shape, dlogits, row);
            if (!is_active(targets.active, row)) {
                store_stats(stats_out, row, RowStats{});
                store_token(loss_out, row, TokenLoss{});
                return fill_row<Storage>(dz, shape.vocab, 0);
            }
            const auto* z = row_at<Element>(shape, logits, row);
            const int64_t id = targets.token_ids[row];
            const float temperature = targets.temperature[row], dentropy = in.entropy_weights ? -in.entropy_weights[row] : 0.0f;
            // The entropy's gradient needs exponents beside exponentials: then the logits are read again.
            const bool keep = dentropy == 0.0f && may_have_gradient(in, row, params);
            const Exponentials<Storage> kept(scratch.of_this_thread(), dz, shape.vocab);
            const RowStats stats = keep ? row_stats<Storage, true>(z, shape.vocab, id, temperature, &kept)
                                        : row_stats<Storage, false>(z, shape.vocab, id, temperature, nullptr);
            store_stats(stats_out, row, stats);

            const TokenLoss token = token_objective(load_token(in, row, stats.logp, stats.entropy), params);
            store_token(loss_out, row, token);

            if (std::isnan(stats.logp) || std::isnan(token.dlogp) || std::isnan(dentropy))
                return fill_row<Storage>(dz, shape.vocab, Storage::kNan);
            if (token.dlogp == 0.0f && dentropy == 0.0f) return fill_row<Storage>(dz, shape.vocab, 0);
            const RowGrad grad = {token.dlogp, dentropy, stats.max, stats.log_sum, stats.entropy, temperature, id};
            if (keep) return row_grad<Storage>(kept, dz, shape.vocab, stats.chosen, grad);
            row_grad<Storage>(z, dz, shape.vocab, grad);
        });
    });
}

void scale(const Shape& shape, const Rows& dlogits, float factor, int num_threads) {
    if (factor == 1.0f) return;
    // Rounding to bfloat16 carries the NaN whose bits are all 1, which a GPU makes, over into 0.
    if (std::isnan(factor)) factor = __builtin_nanf("");
    with_storage(shape.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        for_each_row(shape.batch * shape.time, shape.vocab, num_threads, [&](int64_t row) {
            auto* dz = row_at<typename Storage::Element>(shape, dlogits, row);
            for_each_pack<Storage>(dz, dz, shape.vocab, [&](int64_t, const auto* from, auto* to, int columns) {
                for (int i = 0; i < columns; i += kPair) {
                    Vec a, b;
                    Storage::load2(from + i, a, b);
                    Storage::store2(to + i, a * factor, b * factor);
                }
            });
        });
    });
}

}  // namespace

extern const RowKernels row_kernels;
const RowKernels row_kernels = {logprobs_forward, objective, logprobs_backward, loss_and_grad, scale};

}  // namespace GRPO_ISA
}  // namespace grpo::cpu
