"""One module a trainer. Nothing of a trainer is imported before its module is, and nothing of these by `import grpo_kernels`."""
