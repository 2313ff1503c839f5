// Chooses the instruction set, once, when the first kernel runs: the best that this machine has, or what GRPO_KERNELS_ISA asks for.

#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "cpu/rows.h"

namespace grpo::cpu {
namespace {

struct Build {
    const char* name;
    const RowKernels* kernels;
    bool runs_here;
};

#if defined(__x86_64__)
bool has_f16c() {  // not among the names that every compiler's __builtin_cpu_supports knows
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

std::vector<Build> builds() {
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && has_f16c();
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return {
        {"baseline", &baseline::row_kernels, true}, {"avx2", &avx2::row_kernels, has_avx2}, {"avx512", &avx512::row_kernels, has_avx512}};
}
#else
std::vector<Build> builds() { return {{"portable", &portable::row_kernels, true}}; }
#endif

Build choose() {
    const char* asked = std::getenv("GRPO_KERNELS_ISA");
    Build best{};
    std::string names;
    for (const Build& build : builds()) {
        if (asked && *asked && build.name == std::string(asked)) {
            if (build.runs_here) return build;
            throw std::runtime_error("GRPO_KERNELS_ISA=" + std::string(asked) + ": this machine does not have that instruction set");
        }
        if (build.runs_here) best = build;
        names += names.empty() ? build.name : std::string(", ") + build.name;
    }
    if (asked && *asked) throw std::runtime_error("GRPO_KERNELS_ISA=" + std::string(asked) + " is not one of " + names);
    return best;
}

const Build& chosen() {
    static const Build build = choose();  // a throw leaves it unset, and the next call says so again
    return build;
}

const RowKernels& kernels() { return *chosen().kernels; }

// A forked child has none of its parent's OpenMP threads, and libgomp would wait for them for ever: children run on one. Registered when
// the module is loaded, since the threads may be torch's and the child's call the first to come here.
bool forked = false;
#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

int usable(int num_threads) { return forked || num_threads < 1 ? 1 : num_threads; }

}  // namespace

void logprobs_forward(const Shape& shape, const Rows& logits, const Targets& targets, const RowOutputs& out, int num_threads) {
    kernels().forward(shape, logits, targets, out, usable(num_threads));
}

void objective(int64_t rows, const float* logps, const float* entropy, const TokenInputs& in, const uint8_t* active,
               const ObjectiveParams& params, const TokenOutputs& out, int num_threads) {
    kernels().objective(rows, logps, entropy, in, active, params, out, usable(num_threads));
}

void logprobs_backward(const Shape& shape, const Rows& logits, const Targets& targets, const SavedRows& saved, const float* dlogps,
                       const float* dentropy, const Rows& dlogits, int num_threads) {
    kernels().backward(shape, logits, targets, saved, dlogps, dentropy, dlogits, usable(num_threads));
}

void loss_and_grad(const Shape& shape, const Rows& logits, const Targets& targets, const TokenInputs& in, const ObjectiveParams& params,
                   const RowOutputs& stats, const TokenOutputs& loss, const Rows& dlogits, int num_threads) {
    kernels().loss_and_grad(shape, logits, targets, in, params, stats, loss, dlogits, usable(num_threads));
}

void scale(const Shape& shape, const Rows& dlogits, float factor, int num_threads) {
    kernels().scale(shape, dlogits, factor, usable(num_threads));
}

std::string isa() { return chosen().name; }

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Build& build : builds())
        if (build.runs_here) names.push_back(build.name);
    return names;
}

}  // namespace grpo::cpu
