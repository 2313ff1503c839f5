"""Time and memory of grpo_kernels beside plain PyTorch and beside what people use instead. README.md says how to run and read them."""
