// Rewards -> advantages within groups (MATH.md §5; DeepSeekMath §4.1.2 and §4.1.3). A few thousand numbers at most: float64, two
// passes, one thread.

#include <cmath>
#include <vector>

#include "kernels.h"

namespace grpo::cpu {
namespace {

struct Statistics {
    int64_t count = 0;
    double mean = 0.0, deviation = 0.0;
    bool all_equal = true;
};

// Over value(0) .. value(size - 1) without the NaNs.
template <class Value>
Statistics statistics(int64_t size, int ddof, Value value) {
    Statistics s;
    double first = 0.0, sum = 0.0;
    for (int64_t k = 0; k < size; k++) {
        const double v = value(k);
        if (std::isnan(v)) continue;
        if (s.count == 0) first = v;
        s.all_equal = s.all_equal && v == first;
        sum += v;
        s.count++;
    }
    if (s.count == 0) return s;
    s.mean = sum / double(s.count);
    double squares = 0.0;
    for (int64_t k = 0; k < size; k++) {
        const double v = value(k);
        if (!std::isnan(v)) squares += (v - s.mean) * (v - s.mean);
    }
    if (s.count > ddof) s.deviation = std::sqrt(squares / double(s.count - ddof));
    return s;
}

// advantage(index, a) for every value; a is 0 where there is nothing to compare: a group of one, of equals, a NaN.
template <class Store>
void normalise(const Groups& g, AdvantageScale scale, Baseline baseline, int ddof, double eps, Store advantage) {
    const auto index = [&](int64_t k) { return g.order ? g.order[k] : k; };
    const Statistics batch = statistics(g.count, ddof, [&](int64_t k) { return g.values[k]; });
    for (int64_t group = 0; group < g.groups; group++) {
        const int64_t begin = g.offsets[group], end = g.offsets[group + 1];
        const Statistics s = statistics(end - begin, ddof, [&](int64_t k) { return g.values[index(begin + k)]; });
        const double divisor = scale == AdvantageScale::none ? 1.0 : (scale == AdvantageScale::batch ? batch.deviation : s.deviation) + eps;
        // value - mean of the others = (value - mean) n / (n - 1)
        const double factor = baseline == Baseline::leave_one_out ? double(s.count) / double(s.count - 1) : 1.0;
        for (int64_t k = begin; k < end; k++) {
            const double v = g.values[index(k)];
            const bool nothing = s.count < 2 || s.all_equal || std::isnan(v);
            advantage(index(k), nothing ? 0.0 : (v - s.mean) * factor / divisor);
        }
    }
}

}  // namespace

void group_advantages(const Groups& groups, AdvantageScale scale, Baseline baseline, int ddof, double eps, float* out) {
    normalise(groups, scale, baseline, ddof, eps, [&](int64_t index, double a) { out[index] = float(a); });
}

void process_advantages(const Groups& groups, AdvantageScale scale, Baseline baseline, int ddof, double eps, const int64_t* step_ends,
                        int64_t batch, int64_t steps, int64_t time, float* out) {
    std::vector<double> values(groups.values, groups.values + groups.count);
    for (int64_t i = 0; i < groups.count; i++)
        if (step_ends[i] < 0 || step_ends[i] >= time) values[i] = std::nan("");  // no step there
    Groups real = groups;
    real.values = values.data();

    std::vector<double> at(batch * time, 0.0);
    normalise(real, scale, baseline, ddof, eps, [&](int64_t index, double a) {
        if (!std::isnan(values[index])) at[index / steps * time + step_ends[index]] += a;
    });
    for (int64_t row = 0; row < batch; row++) {
        double sum = 0.0;
        for (int64_t t = time - 1; t >= 0; t--) out[row * time + t] = float(sum += at[row * time + t]);
    }
}

}  // namespace grpo::cpu
