// Rewards -> advantages within groups (DeepSeekMath §4.1.2 and §4.1.3): a block a group, float64, two passes. The statistics of the
// whole batch, where they are asked for, are each block's own work: a few thousand numbers out of the cache.

#include "cuda/device.cuh"

namespace grpo::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
// Four blocks to a multiprocessor allow 128 registers. Left to itself the compiler takes 40 for the sake of more blocks, and spills.
#define GRPO_BOUNDS __launch_bounds__(kThreads, 4)

// Of the values that are not NaN.
struct Moments {
    double count, sum, min, max;

    __device__ static Moments none() { return {0.0, 0.0, INFINITY, -INFINITY}; }
    __device__ void add(const Moments& other) {
        count += other.count;
        sum += other.sum;
        min = fmin(min, other.min);
        max = fmax(max, other.max);
    }
};

struct Squares {
    double sum;

    __device__ static Squares none() { return {0.0}; }
    __device__ void add(const Squares& other) { sum += other.sum; }
};

// Everybody's sum, for everybody, by way of an array that nobody else uses: kWarps entries from `offset` bytes on.
template <class T>
__device__ T block_sum(T mine, size_t offset, Barrier barrier) {
    for (int mask = kWarp / 2; mask > 0; mask /= 2) mine.add(shuffle_xor(mine, mask));
    const Shared<T> of_warps(offset);
    if (lane() == 0) of_warps.write(warp(), mine);
    block_barrier(barrier);
    T sum = T::none();
    for (int i = 0; i < kWarps; i++) sum.add(of_warps.read(i));
    return sum;
}

struct Statistics {
    double count, mean, deviation;
    bool all_equal;
};

constexpr size_t kStatisticsBytes = kWarps * (sizeof(Moments) + sizeof(Squares));

// Over value(0) .. value(size - 1) without the NaNs.
template <class Value>
__device__ Statistics statistics(int64_t size, int ddof, size_t offset, Barrier moments_barrier, Barrier squares_barrier, Value value) {
    Moments mine = Moments::none();
    for (int64_t k = threadIdx.x; k < size; k += kThreads) {
        const double v = value(k);
        if (!std::isnan(v)) mine.add({1.0, v, v, v});
    }
    const Moments all = block_sum(mine, offset, moments_barrier);
    const double mean = all.count > 0.0 ? all.sum / all.count : 0.0;
    Squares squares = Squares::none();
    for (int64_t k = threadIdx.x; k < size; k += kThreads) {
        const double v = value(k);
        if (!std::isnan(v)) squares.add({(v - mean) * (v - mean)});
    }
    squares = block_sum(squares, offset + kWarps * sizeof(Moments), squares_barrier);
    return {all.count, mean, all.count > ddof ? sqrt(squares.sum / (all.count - ddof)) : 0.0, all.min == all.max};
}

struct Steps {
    const int64_t* ends;  // null: outcome supervision, every value counts
    int64_t time;
};

// One block a group. `Out` is float, or double where a sum follows. 0 where there is nothing to compare: a group of one, of equals, a NaN,
// and a step that ends nowhere.
template <class Out>
__global__ void GRPO_BOUNDS normalise_kernel(Groups g, AdvantageScale scale, Baseline baseline, int ddof, double eps, Steps steps,
                                             Out* out) {
    const auto value = [&](int64_t index) {
        const bool is_real = !steps.ends || (steps.ends[index] >= 0 && steps.ends[index] < steps.time);
        return is_real ? g.values[index] : double(NAN);
    };
    const int64_t begin = g.offsets[blockIdx.x], size = g.offsets[blockIdx.x + 1] - begin;
    const auto index = [&](int64_t k) { return g.order ? g.order[begin + k] : begin + k; };

    const Statistics s =
        statistics(size, ddof, 0, Barrier::group_moments, Barrier::group_squares, [&](int64_t k) { return value(index(k)); });
    double divisor = s.deviation + eps;
    if (scale == AdvantageScale::batch)
        divisor = statistics(g.count, ddof, kStatisticsBytes, Barrier::batch_moments, Barrier::batch_squares, value).deviation + eps;
    if (scale == AdvantageScale::none) divisor = 1.0;
    // value - mean of the others = (value - mean) n / (n - 1)
    const double factor = baseline == Baseline::leave_one_out ? s.count / (s.count - 1.0) : 1.0;
    for (int64_t k = threadIdx.x; k < size; k += kThreads) {
        const double v = value(index(k));
        const bool nothing = s.count < 2.0 || s.all_equal || std::isnan(v);
        out[index(k)] = Out(nothing ? 0.0 : (v - s.mean) * factor / divisor);
    }
}

// out[row, t] = sum of the normalised steps of that row that end at t or later. A thread a token adds them in their order: no atomics, and
// several may end on one token.
__global__ void GRPO_BOUNDS steps_ahead_kernel(const double* normalised, const int64_t* step_ends, int64_t steps, int64_t time,
                                               int64_t tokens, float* out) {
    const int64_t token = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (token >= tokens) return;
    const int64_t row = token / time, t = token % time;
    double sum = 0.0;
    for (int64_t i = row * steps; i < (row + 1) * steps; i++)
        if (step_ends[i] >= t && step_ends[i] < time) sum += normalised[i];
    out[token] = float(sum);
}

template <class Out>
void normalise(const char* name, const Groups& groups, AdvantageScale scale, Baseline baseline, int ddof, double eps, const Steps& steps,
               Out* out, const Queue& queue) {
    launch(name, queue, {groups.groups, kThreads, 1, 2 * kStatisticsBytes}, normalise_kernel<Out>, groups, scale, baseline, ddof, eps,
           steps, out);
}

}  // namespace

void group_advantages(const Groups& groups, AdvantageScale scale, Baseline baseline, int ddof, double eps, float* out, const Queue& queue) {
    normalise("group_advantages", groups, scale, baseline, ddof, eps, Steps{nullptr, 0}, out, queue);
}

void process_advantages(const Groups& groups, AdvantageScale scale, Baseline baseline, int ddof, double eps, const int64_t* step_ends,
                        int64_t batch, int64_t steps, int64_t time, double* normalised, float* out, const Queue& queue) {
    normalise("process_advantages", groups, scale, baseline, ddof, eps, Steps{step_ends, time}, normalised, queue);
    const int64_t tokens = batch * time;
    launch("steps_ahead", queue, {(tokens + kThreads - 1) / kThreads, kThreads}, steps_ahead_kernel, normalised, step_ends, steps, time,
           tokens, out);
}

}  // namespace grpo::cuda
