"""What comes in wrong is refused before anything runs, by an error that names the argument, what was expected and what came."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.options import ObjectiveParams
from grpo_kernels.registry import LOSS_TYPES
from modes import small_batch, without_logits

IDS = small_batch()["completion_ids"]


def fused(**changed):
    return gk.fused_grpo_loss(**{**small_batch(), **changed})


def linear(**changed):
    inputs = {"hidden_states": torch.randn(2, 3, 4), "lm_head_weight": torch.randn(11, 4), "bias": torch.randn(11), **small_batch()}
    del inputs["logits"]
    return gk.fused_linear_grpo_loss(**{**inputs, **changed})


def from_logps(**changed):
    return gk.grpo_loss(**{**without_logits(small_batch()), "logps": small_batch()["ref_logps"], **changed})


def scored(**changed):
    return gk.token_logprobs_and_entropy(**{"logits": small_batch()["logits"], "token_ids": IDS, **changed})


def packed(**changed):
    rows = {"logits": torch.randn(6, 11), "completion_ids": IDS.flatten(), "advantages": torch.ones(2)}
    return gk.fused_grpo_loss(**{**rows, "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32), **changed})


def advantages(**changed):
    return gk.group_advantages(**{"rewards": torch.rand(6), "num_generations": 3, **changed})


def process(**changed):
    steps = {"step_rewards": torch.rand(4, 2), "step_ends": torch.tensor([[0, 3]] * 4), "completion_length": 4, "num_generations": 2}
    return gk.process_advantages(**{**steps, **changed})


def metrics(**changed):
    return gk.grpo_metrics(**{"output": fused(), "completion_mask": None, **changed})


def targets(**changed):
    return gk.packed_targets(**{"input_ids": torch.arange(5), "cu_seqlens": torch.tensor([0, 3, 5]), **changed})


class Subclass(torch.Tensor):
    pass


HALF_IDS, GRAD = IDS.half(), torch.rand(2, 3, requires_grad=True)

# function, what is changed, error, what its message holds
WRONG = [
    # kinds of tensors
    (fused, {"logits": [[1.0]]}, TypeError, "logits: expected a torch.Tensor, got list"),
    (fused, {"logits": IDS[..., None].expand(2, 3, 11).contiguous()}, TypeError, "logits: expected float32.*int64"),
    (fused, {"logits": torch.randn(2, 3, 11, dtype=torch.complex64)}, TypeError, "logits: expected float32.*complex64"),
    (fused, {"completion_ids": HALF_IDS}, TypeError, "completion_ids: expected int64 or int32, got torch.float16"),
    (scored, {"token_ids": HALF_IDS}, TypeError, "token_ids: expected int64 or int32, got torch.float16"),
    (fused, {"completion_ids": IDS.tolist()}, TypeError, "completion_ids: .*list"),
    (fused, {"advantages": [1.0, 2.0]}, TypeError, "advantages: .*list"),
    (fused, {"advantages": 1.0}, TypeError, "advantages: .*float"),
    (fused, {"old_logps": torch.randn(2, 3, dtype=torch.complex64)}, TypeError, "old_logps: .*complex64"),
    (fused, {"completion_mask": [[1, 1, 1]] * 2}, TypeError, "completion_mask: .*list"),
    (fused, {"logits": torch.randn(2, 3, 11).as_subclass(Subclass)}, TypeError, "logits: .*Subclass.*full_tensor.*as_subclass"),
    (fused, {"advantages": torch.randn(2).as_subclass(Subclass)}, TypeError, "advantages: .*Subclass"),
    (scored, {"mask": torch.ones(2, 3).as_subclass(Subclass)}, TypeError, "mask: .*Subclass"),
    (from_logps, {"logps": IDS}, TypeError, "logps: expected a floating dtype, got torch.int64"),
    (from_logps, {"entropy": IDS}, TypeError, "entropy: expected a floating dtype, got torch.int64"),
    (fused, {"logits": torch.randn(2, 3, 11).to_sparse()}, TypeError, "logits: expected a dense tensor, got .*sparse_coo"),
    (fused, {"advantages": torch.randn(2).to_sparse()}, TypeError, "advantages: .*sparse_coo"),
    (fused, {"logits": torch.nested.nested_tensor([torch.randn(3, 11)] * 2)}, TypeError, "logits: .*nested"),
    (linear, {"hidden_states": torch.randn(2, 3, 4).to_sparse()}, TypeError, "hidden_states: .*sparse_coo"),
    (linear, {"lm_head_weight": torch.randn(11, 4).to_sparse()}, TypeError, "lm_head_weight: .*sparse_coo"),
    (linear, {"lm_head_weight": torch.randn(11, 4).half()}, TypeError, "lm_head_weight: .*torch.float32.*got torch.float16.*autocast"),
    (linear, {"bias": torch.randn(11).double()}, TypeError, "bias: .*torch.float32.*got torch.float64"),
    # shapes
    (linear, {"hidden_states": torch.randn(2, 5, 4)}, ValueError, r"completion_ids: expected .*\(2, 5, 4\).*\(2, 3\)"),
    (linear, {"lm_head_weight": torch.randn(4, 11)}, ValueError, r"lm_head_weight: .*4 columns, got shape \(4, 11\)"),
    (linear, {"bias": torch.randn(4)}, ValueError, r"bias: .*11 rows, got shape \(4,\)"),
    (fused, {"logits": torch.randn(2, 5, 11)}, ValueError, r"completion_ids: expected .*\(2, 5, 11\).*\(2, 3\)"),
    (fused, {"logits": torch.randn(2, 2, 11)}, ValueError, r"completion_ids: expected .*\(2, 2, 11\).*\(2, 3\)"),
    (fused, {"logits": torch.randn(3, 3, 11)}, ValueError, r"completion_ids: expected .*\(3, 3, 11\).*\(2, 3\)"),
    (fused, {"logits": torch.randn(6, 11)}, ValueError, r"completion_ids: expected .*\(6, 11\).*\(2, 3\)"),
    (fused, {"logits": torch.randn(6, 11), "completion_ids": IDS.flatten()}, ValueError, r"completion_ids: .*cu_seqlens.*\(6,\)"),
    (scored, {"token_ids": IDS.flatten()}, ValueError, r"token_ids: expected .*\(2, 3, 11\).*\(6,\)"),
    (fused, {"logits": torch.randn(2, 3, 0)}, ValueError, r"logits: expected at least one column, got shape \(2, 3, 0\)"),
    (fused, {"logits": torch.randn(2, 3, 22)[..., ::2]}, ValueError, r"logits: .*contiguous .*strides \(66, 22, 2\).*\.contiguous\(\)"),
    (fused, {"logits": torch.randn(2, 11, 3).mT}, ValueError, "logits: .*contiguous"),
    (fused, {"advantages": torch.randn(3)}, ValueError, r"advantages: expected shape \(2, 3\) or \(2,\), got \(3,\)"),
    (fused, {"advantages": torch.randn(2, 1)}, ValueError, r"advantages: expected shape \(2, 3\) or \(2,\), got \(2, 1\)"),
    (fused, {"advantages": torch.tensor(1.0)}, ValueError, r"advantages: expected .*got \(\)"),
    (fused, {"completion_mask": torch.ones(3)}, ValueError, r"completion_mask: expected shape \(2, 3\), got \(3,\)"),
    (fused, {"completion_mask": torch.ones(2)}, ValueError, r"completion_mask: expected shape \(2, 3\), got \(2,\)"),
    (fused, {"completion_mask": torch.ones(2, 4)}, ValueError, r"completion_mask: expected shape \(2, 3\), got \(2, 4\)"),
    (scored, {"mask": torch.ones(3)}, ValueError, r"mask: expected shape \(2, 3\), got \(3,\)"),
    (fused, {"old_logps": torch.randn(2, 2)}, ValueError, r"old_logps: expected shape \(2, 3\), got \(2, 2\)"),
    (fused, {"old_logps": torch.randn(2)}, ValueError, r"old_logps: expected shape \(2, 3\), got \(2,\)"),
    (fused, {"ref_logps": torch.randn(2, 4)}, ValueError, r"ref_logps: expected shape \(2, 3\), got \(2, 4\)"),
    (
        fused,
        {"importance_weights": torch.rand(3)},
        ValueError,
        r"importance_weights: expected .*\(2, 3\) or \(2,\) or \(2, 1\), got \(3,\)",
    ),
    (fused, {"policy_weights": torch.rand(1, 3)}, ValueError, r"policy_weights: expected .*got \(1, 3\)"),
    (fused, {"token_weights": torch.rand(2)}, ValueError, r"token_weights: expected shape \(2, 3\), got \(2,\)"),
    (fused, {"temperature": torch.ones(3)}, ValueError, r"temperature: expected shape \(2, 3\) or \(2,\), got \(3,\)"),
    (from_logps, {"logps": torch.randn(2, 3, 1)}, ValueError, r"logps: expected \(B, T\), got shape \(2, 3, 1\)"),
    (from_logps, {"entropy": torch.randn(2, 2)}, ValueError, r"entropy: expected \(2, 3\).*got \(2, 2\)"),
    (from_logps, {"entropy": torch.randn(3, 2)}, ValueError, r"entropy: expected \(2, 3\).*got \(3, 2\)"),
    # packed rows
    (packed, {"cu_seqlens": torch.tensor([0.0, 2.0, 6.0])}, TypeError, "cu_seqlens: expected int32 or int64, got torch.float32"),
    (packed, {"cu_seqlens": torch.tensor(6)}, ValueError, r"cu_seqlens: expected \(S \+ 1,\) offsets, got shape \(\)"),
    (packed, {"cu_seqlens": torch.tensor([1, 2, 6])}, ValueError, r"cu_seqlens: expected .*ascend from 0.*\[1, 2, 6\]"),
    (packed, {"cu_seqlens": torch.tensor([0, 4, 2])}, ValueError, r"cu_seqlens: expected .*ascend.*\[0, 4, 2\]"),
    (packed, {"cu_seqlens": torch.tensor([0, 2, 7])}, ValueError, r"cu_seqlens: expected .*at most the 6 rows.*\[0, 2, 7\]"),
    (packed, {"advantages": torch.ones(3)}, ValueError, r"advantages: expected shape \(6,\) or \(2,\), got \(3,\)"),
    (fused, {"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"completion_ids: expected packed .*got \(2, 3\)"),
    (targets, {"input_ids": torch.rand(5)}, TypeError, "input_ids: expected int64 or int32"),
    (targets, {"input_ids": torch.zeros(2, 3, dtype=torch.long)}, ValueError, r"input_ids: expected packed .*got \(2, 3\)"),
    # constants, devices, values
    *((fused, {name: GRAD}, ValueError, f"{name}: .*must not require grad.*{name}.detach") for name in ("old_logps", "ref_logps")),
    *((fused, {name: GRAD}, ValueError, f"{name}: .*must not require grad") for name in ("advantages", "token_weights", "temperature")),
    *((fused, {name: GRAD}, ValueError, f"{name}: .*must not require grad") for name in ("importance_weights", "policy_weights")),
    *(
        (fused, {name: x.to("meta")}, ValueError, f"{name}: expected a tensor on cpu .*meta")
        for name, x in small_batch().items()
        if name != "logits"
    ),
    (from_logps, {"entropy": torch.zeros(2, 3, device="meta")}, ValueError, "entropy: .*meta"),
    (fused, {"completion_ids": IDS + 11}, IndexError, r"token id at position \(0, 0\): expected in \[0, 11\), got 1\d"),
    (fused, {"completion_ids": IDS - 11}, IndexError, r"token id at position \(0, 0\): expected in \[0, 11\), got -"),
    (fused, {"temperature": torch.tensor([1.0, 0.0])}, ValueError, r"temperature at position \(1, 0\): .*positive.*got 0"),
    (fused, {"temperature": torch.tensor(float("nan"))}, ValueError, "temperature at position .*nan"),
    *((fused, {"temperature": x}, ValueError, f"temperature: expected a finite number > 0, got {x}") for x in (0, -1.0, float("nan"))),
    (fused, {"temperature": "hot"}, TypeError, "temperature: expected a number, got str"),
    *((linear, {name: 0.0}, ValueError, f"{name}: .*> 0, got 0.0") for name in ("logit_scale", "logit_softcap")),
    *(  # float32 would make inf or 0 of it, and NaN of the loss
        (linear, {name: x}, ValueError, f"{name}: expected a number in .*float32.*got {x}".replace("+", r"\+"))
        for name in ("logit_scale", "logit_softcap")
        for x in (1e-46, 1e39)
    ),
    # options
    *((fused, {name: -0.1}, ValueError, f"{name}: expected a finite number >= 0, got -0.1") for name in ("epsilon", "epsilon_high")),
    (fused, {"beta": -0.1}, ValueError, "beta: expected a finite number >= 0, got -0.1"),
    (fused, {"beta": float("inf")}, ValueError, "beta: expected a finite number >= 0, got inf"),
    *(
        (fused, {name: 0}, ValueError, f"{name}: expected a finite number > 0, got 0")
        for name in ("delta", "max_log_ratio", "max_completion_length", "loss_scale")
    ),
    *(
        (fused, {f"{name}": 0.0}, ValueError, f"{name}: expected a finite number > 0, got 0.0")
        for name in (field.name for field in fields(ObjectiveParams) if field.name.startswith(("sapo_", "vespo_")))
    ),
    (fused, {"dual_clip": 1.0}, ValueError, "dual_clip: expected a finite number > 1, got 1.0"),
    (fused, {"entropy_coef": float("nan")}, ValueError, "entropy_coef: expected a finite number, got nan"),
    (fused, {"epsilon": "0.2"}, TypeError, "epsilon: expected a number, got str"),
    (fused, {"epsilon": None}, TypeError, "epsilon: expected a number, got NoneType"),
    (fused, {"beta": True}, TypeError, "beta: expected a number, got bool"),
    (fused, {"kl_bias_correction": "yes"}, TypeError, "kl_bias_correction: expected True or False, got 'yes'"),
    *((fused, {"num_processes": x}, ValueError, f"num_processes: expected an integer >= 1, got {x}") for x in (0, 1.5, True)),
    *((fused, {name: float("nan")}, ValueError, f"{name}: .*nan") for name in ("num_items_in_batch", "num_sequences")),
    (fused, {"num_items_in_batch": torch.tensor([3])}, ValueError, r"num_items_in_batch: .*0-d.*\(1,\)"),
    (fused, {"num_sequences": "all"}, TypeError, "num_sequences: .*str"),
    (fused, {"loss_type": "gspo"}, ValueError, "loss_type: expected one of grpo, .*got 'gspo'"),
    (fused, {"importance_sampling_level": "batch"}, ValueError, "importance_sampling_level: expected one of token, .*got 'batch'"),
    (fused, {"kl_estimator": "k4"}, ValueError, "kl_estimator: expected one of k3, .*got 'k4'"),
    (fused, {"entropy_aggregation": "sum"}, ValueError, "entropy_aggregation: expected one of loss, token_mean, got 'sum'"),
    (fused, {"loss_type": None}, ValueError, "loss_type: .*None"),
    # combinations
    (fused, {"beta": 0.1, "ref_logps": None}, ValueError, "ref_logps: beta is 0.1.*got None"),
    (from_logps, {"beta": 0.1, "ref_logps": None}, ValueError, "ref_logps: beta is 0.1.*got None"),
    (from_logps, {"entropy_coef": 0.1}, ValueError, "entropy: entropy_coef is not 0.*got None"),
    (fused, {"loss_type": "dr_grpo"}, ValueError, "max_completion_length: loss_type 'dr_grpo'.*got None"),
    (fused, {"loss_type": "cispo"}, ValueError, "epsilon_high: loss_type 'cispo'.*got None"),
    *(
        (fused, {"loss_type": name, option: 2.0, "epsilon_high": 1.0}, ValueError, f"{option}: .*loss_type '{name}'")
        for name in ("cispo", "sapo", "vespo", "reinforce")
        for option in ("delta", "dual_clip")
    ),
    *(
        (fused, {"kl_estimator": name, "kl_bias_correction": True}, ValueError, f"kl_bias_correction: .*k3.*'{name}'")
        for name in ("k1", "k2", "abs")
    ),
    *(
        (
            fused,
            {"loss_type": name, "num_processes": 2, "epsilon_high": 1.0, "max_completion_length": 9},
            ValueError,
            f"{row.global_count}: loss_type '{name}' with num_processes 2.*got None",
        )
        for name, row in LOSS_TYPES.items()
        if row.global_count
    ),
    *(
        (fused, {"one_pass": True, "importance_sampling_level": level}, ValueError, f"one_pass: .*'{level}'.*one_pass=False")
        for level in ("sequence", "sequence_token")
    ),
    (fused, {"one_pass": True, "loss_type": "vespo"}, ValueError, "one_pass: .*'vespo'"),
    # names
    (fused, {"epsilon_hi": 0.3}, TypeError, "unknown option 'epsilon_hi'; did you mean 'epsilon_high'"),
    (fused, {"old_logp": None}, TypeError, "unknown option 'old_logp'; did you mean 'old_logps'"),
    (from_logps, {"completion_masks": None}, TypeError, "unknown option 'completion_masks'; did you mean 'completion_mask'"),
    (from_logps, {"zzz": None}, TypeError, "unknown option 'zzz'; known: .*loss_type.*loss_scale"),
    (fused, {"backend": "gpu"}, ValueError, "backend: expected one of torch, .*got 'gpu'"),
    (fused, {"backend": 1}, TypeError, r"backend: expected a name of available_backends\(\) or None, got int"),
    # rewards and metrics
    (advantages, {"rewards": torch.rand(6, dtype=torch.complex64)}, TypeError, "rewards: .*complex64"),
    (advantages, {"rewards": torch.rand(6, 1, 1)}, ValueError, r"rewards: expected \(B,\).*got shape \(6, 1, 1\)"),
    (advantages, {"num_generations": None}, ValueError, "num_generations, group_ids: .*neither"),
    (advantages, {"group_ids": torch.arange(6)}, ValueError, "num_generations, group_ids: .*both"),
    (advantages, {"num_generations": 4}, ValueError, "num_generations: expected a divisor of the 6 rewards, got 4"),
    (advantages, {"num_generations": 0}, ValueError, "num_generations: expected an integer >= 1, got 0"),
    (advantages, {"num_generations": None, "group_ids": torch.rand(6)}, TypeError, "group_ids: expected integers"),
    (advantages, {"num_generations": None, "group_ids": torch.arange(5)}, ValueError, r"group_ids: expected \(6,\).*\(5,\)"),
    (advantages, {"scale_rewards": True}, ValueError, "scale_rewards: expected one of group, batch, none, got True"),
    (advantages, {"baseline": "median"}, ValueError, "baseline: expected one of mean, leave_one_out, got 'median'"),
    (advantages, {"ddof": 2}, ValueError, "ddof: expected 0 or 1, got 2"),
    (advantages, {"eps": -1e-4}, ValueError, "eps: expected a finite number >= 0"),
    (process, {"step_ends": torch.rand(4, 2)}, TypeError, "step_ends: expected int64 or int32"),
    (process, {"step_ends": torch.tensor([[0, 4]] * 4)}, ValueError, r"step_ends at \(0, 1\): expected an end in \[0, 4\), got 4"),
    (process, {"step_ends": torch.tensor([[0, -1]] * 4)}, ValueError, r"step_ends at \(0, 1\): .*got -1"),
    (process, {"step_mask": torch.ones(4)}, ValueError, r"step_mask: expected \(4, 2\).*\(4,\)"),
    (process, {"completion_length": 4.0}, ValueError, "completion_length: expected an integer"),
    (metrics, {"completion_mask": torch.ones(3)}, ValueError, r"completion_mask: expected shape \(2, 3\), got \(3,\)"),
    (metrics, {"importance_sampling_level": "batch"}, ValueError, "importance_sampling_level: .*'batch'"),
]


@pytest.mark.parametrize("function, changed, error, message", WRONG, ids=[f"{f.__name__}-{'-'.join(c)}" for f, c, *_ in WRONG])
def test_wrong_arguments_are_named_with_what_was_expected_and_what_came(function, changed, error, message):
    with pytest.raises(error, match=message):
        function(**changed)


@pytest.mark.parametrize("function", [fused, linear, from_logps, scored, packed, advantages, process, metrics, targets])
def test_the_unchanged_arguments_are_accepted(function):
    function()
