"""A TRL trainer's settings as options of ours: which versions, what each field of GRPOConfig is to the loss, and what is left to TRL.

A field that nobody classified is never ignored: a test fails for the versions that are supported, and a run that sets one is left to TRL's
own code.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from grpo_kernels import grpo_loss
from grpo_kernels.integrations.trl.entropy import entropy_coefficient

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_kernels import LossOptions

__all__ = ["FIELDS", "SUPPORTED_VERSIONS", "Semantics", "accumulation", "left_to_trl", "options_of", "semantics"]


@dataclass(frozen=True)
class Semantics:
    """Where TRL's versions compute different numbers from the same configuration."""

    windowed_count: bool  # num_items_in_batch spans the generation batch and is brought to one accumulation window
    global_metrics: bool  # sums and counts reduced over the ranks, and min and max of sequences; else means and extremes of ranks' means
    router_loss: bool  # the scores come with the router's auxiliary loss as third
    falls_back: dict[str, str]  # settings, "field" or "field=value", that only this version leaves to its own code, with the reason


SUPPORTED_VERSIONS = {
    "1.0.0": Semantics(
        windowed_count=False,
        global_metrics=False,
        router_loss=False,
        falls_back={
            "use_liger_kernel": "it replaces the loss there",
            "loss_type=luspo": "that version weighs padding too",
            "cast_lm_head_to_fp32": "autocast takes the head back to half precision there",
        },
    ),
    "1.16.0": Semantics(windowed_count=True, global_metrics=True, router_loss=True, falls_back={}),
}


def semantics(version: str) -> Semantics:
    """Raises RuntimeError with the list for a version that the tests have not run with."""
    if version not in SUPPORTED_VERSIONS:
        raise RuntimeError(f"grpo_kernels.integrations.trl: supported are TRL {', '.join(SUPPORTED_VERSIONS)}, installed is {version}")
    return SUPPORTED_VERSIONS[version]


# What the loss reads: `options_of` below, or _compute_loss where an option decides which tensors there are.
_LOSS = """
    loss_type importance_sampling_level epsilon epsilon_high delta beta use_bias_correction_kl temperature max_completion_length
    sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg
    top_entropy_quantile off_policy_mask_threshold entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta
    entropy_target router_aux_loss_coef cast_lm_head_to_fp32 gradient_accumulation_steps steps_per_generation
    use_vllm vllm_importance_sampling_correction bf16 fp16 bf16_full_eval fp16_full_eval
"""
# What acts before the loss gets its tensors (data, rollouts, rewards, advantages, importance ratios), inside the model, or after the
# gradient (optimiser, schedule, logging, checkpoints). label_smoothing_factor belongs to a loss that GRPOTrainer never calls.
_ELSEWHERE = """
    model_init_kwargs trust_remote_code disable_dropout num_generations num_generations_eval ds3_gather_for_generation shuffle_dataset
    pad_to_multiple_of generation_batch_size top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty
    cache_implementation vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url
    vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length
    vllm_tensor_parallel_size num_iterations reward_weights multi_objective_aggregation scale_rewards mask_truncated_completions
    sync_ref_model ref_model_mixup_alpha ref_model_sync_steps max_tool_calling_iterations vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged use_liger_kernel liger_kernel_config
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
    optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules average_tokens_across_devices max_grad_norm
    label_smoothing_factor tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size
    logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    save_only_model save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token
    hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model
    greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu
    accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    ddp_backend ddp_timeout debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank
"""
# What has not been tried with these kernels inside TRL: any setting of it is left to TRL's own code.
_FALLS_BACK = "fsdp fsdp_config deepspeed parallelism_config torch_compile torch_compile_backend torch_compile_mode"

FIELDS: dict[str, str] = {
    **dict.fromkeys(_LOSS.split(), "used by the loss"),
    **dict.fromkeys(_ELSEWHERE.split(), "no effect on the loss"),
    **dict.fromkeys(_FALLS_BACK.split(), "falls back"),
}


def left_to_trl(trainer: Any, version: Semantics) -> list[str]:
    """The settings, each with its reason, for which the loss has to be TRL's own; none: it is ours."""
    args, found = trainer.args, []
    for field in fields(args):
        value, kind = getattr(args, field.name), FIELDS.get(field.name, "unknown")
        if kind == "unknown" and value != (field.default if field.default_factory is MISSING else field.default_factory()):
            found.append(f"{field.name}: an option that this version of grpo_kernels does not know")
        elif kind == "falls back" and (value or None) is not None and field.name != "fsdp_config":
            found.append(f"{field.name}: not tried with these kernels")
    for setting, reason in version.falls_back.items():
        name, _, wanted = setting.partition("=")
        if getattr(args, name) == wanted or (not wanted and getattr(args, name)):
            found.append(f"{setting}: {reason}")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:  # which accelerate's own configuration can bring in as well
        found.append("FSDP or DeepSpeed: not tried with these kernels")
    if args.n_gpu > 1:
        found.append("n_gpu: nn.DataParallel copies the model on each call")
    try:  # the ranges of our options, on one token
        one = torch.zeros(1, 1)
        grpo_loss(one, one[0], ref_logps=one, entropy=one, **options_of(trainer, version, {"num_items_in_batch": one.sum() + 1}))
    except (TypeError, ValueError) as error:
        found.append(str(error))
    return found


def options_of(trainer: Any, version: Semantics, inputs: dict[str, Any]) -> LossOptions:
    """The options of one micro-batch. TRL's attributes, not its arguments, where it has both: callbacks change these."""
    args, training = trainer.args, trainer.model.training
    options: LossOptions = {
        "loss_type": trainer.loss_type,
        "importance_sampling_level": trainer.importance_sampling_level,
        "epsilon": trainer.epsilon_low,
        "epsilon_high": trainer.epsilon_high,
        "beta": trainer.beta,
        "kl_bias_correction": bool(args.use_bias_correction_kl),
        "sapo_temperature_pos": args.sapo_temperature_pos,
        "sapo_temperature_neg": args.sapo_temperature_neg,
        "vespo_k_pos": args.vespo_k_pos,
        "vespo_k_neg": args.vespo_k_neg,
        "vespo_lambda_pos": max(args.vespo_lambda_pos, 1e-4),  # TRL's clamp
        "vespo_lambda_neg": max(args.vespo_lambda_neg, 1e-4),
        "max_completion_length": trainer.max_completion_length,
        "entropy_coef": entropy_coefficient(trainer),
        "entropy_aggregation": "token_mean",
        "loss_scale": 1 / accumulation(trainer),
    }
    if trainer.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):  # the others clip nothing: TRL ignores it there
        options["delta"] = args.delta
    if trainer.loss_type in ("dapo", "cispo", "vespo"):  # the others are means of this process alone
        count: Tensor = inputs["num_items_in_batch"]
        if not version.windowed_count:
            options["loss_scale"] = 1.0
        elif training:
            count = count.clamp(min=1) / args.steps_per_generation
        options["num_items_in_batch"], options["num_processes"] = count, trainer.accelerator.num_processes
    return options


def accumulation(trainer: Any) -> int:
    """The micro-batches that share an optimiser step, from the first step on; TRL does not divide by it in evaluation."""
    return getattr(trainer, "current_gradient_accumulation_steps", 1) if trainer.model.training else 1
