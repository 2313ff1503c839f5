// What lets one text serve CUDA, every CPU instruction set, and the tests that run CUDA sources on a host.
#pragma once

#if defined(__CUDACC__)
#define GRPO_HOST_DEVICE __host__ __device__
#else
#define GRPO_HOST_DEVICE
#endif

// The build compiles the row kernels once per instruction set and names each copy. Everything they include lives in an inline
// namespace of that name: were two copies of an inline function called the same, the linker would keep one for both, and a
// machine without AVX-512 would meet it in its baseline code.
#if !defined(GRPO_ISA)
#define GRPO_ISA any
#endif
