"""The GRPO loss from logits and back, without a softmax in memory: kernels behind a thin PyTorch autograd layer."""

try:
    import torch  # noqa: F401  first: its OpenMP runtime is the one that the native module shares
except ImportError as error:
    raise ImportError(f"grpo_kernels needs PyTorch, which could not be imported ({error}); install torch >= 2.6") from error

from grpo_kernels.advantages import gae_advantages, group_advantages, process_advantages
from grpo_kernels.backends import available as available_backends
from grpo_kernels.corrections import ImportanceWeights, high_entropy_mask, off_policy_mask, truncated_importance_weights
from grpo_kernels.fuse import fuse_lm_head, unfuse_lm_head
from grpo_kernels.head import GRPOHead
from grpo_kernels.linear import fused_linear_grpo_loss, fused_linear_logprobs
from grpo_kernels.logprobs import LogprobsOutput, token_logprobs, token_logprobs_and_entropy
from grpo_kernels.loss import fused_grpo_loss, grpo_loss
from grpo_kernels.metrics import grpo_metrics
from grpo_kernels.options import GRPOLossOutput, LossOptions
from grpo_kernels.packed import packed_targets

__version__ = "0.1.0"

__all__ = [
    "GRPOHead",
    "GRPOLossOutput",
    "ImportanceWeights",
    "LogprobsOutput",
    "LossOptions",
    "available_backends",
    "fuse_lm_head",
    "fused_grpo_loss",
    "fused_linear_grpo_loss",
    "fused_linear_logprobs",
    "gae_advantages",
    "group_advantages",
    "grpo_loss",
    "grpo_metrics",
    "high_entropy_mask",
    "off_policy_mask",
    "packed_targets",
    "process_advantages",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "truncated_importance_weights",
    "unfuse_lm_head",
]
