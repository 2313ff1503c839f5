"""A minimal GRPO trainer over transformers' `generate` and the public functions of grpo_kernels: `python -m grpo_trainer --help`.

From Python: `from grpo_trainer.config import Config; from grpo_trainer.train import train; train(Config(model=..., task=...))`.
"""
