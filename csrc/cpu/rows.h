// The row kernels of one instruction set. rows.cpp is compiled once for each; dispatch.cpp picks a table when the first kernel runs.
#pragma once

#include "kernels.h"

namespace grpo::cpu {

struct RowKernels {
    decltype(&cpu::logprobs_forward) forward;
    decltype(&cpu::objective) objective;
    decltype(&cpu::logprobs_backward) backward;
    decltype(&cpu::loss_and_grad) loss_and_grad;
    decltype(&cpu::scale) scale;
};

#if defined(__x86_64__)
inline namespace baseline {
extern const RowKernels row_kernels;
}
inline namespace avx2 {
extern const RowKernels row_kernels;
}
inline namespace avx512 {
extern const RowKernels row_kernels;
}
#else
inline namespace portable {
extern const RowKernels row_kernels;
}
#endif

}  // namespace grpo::cpu
