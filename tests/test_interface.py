"""The public face: what is exported and documented, which tensors are taken, which backend answers."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from types import ModuleType

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.options import ObjectiveParams
from modes import gradient, small_batch


def fused(**changed):
    return gk.fused_grpo_loss(**{**small_batch(), **changed})


# --- tensors ----------------------------------------------------------------------------------------------------------------------------


def test_dtensors_are_refused_with_the_recipe():
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        logits = distribute_tensor(small_batch()["logits"], init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"logits: .*DTensor.*x\.full_tensor\(\)"):
            fused(logits=logits)
        assert fused(logits=logits.full_tensor()).loss == fused().loss
    finally:
        distributed.destroy_process_group()


def test_parameters_are_plain_tensors():
    assert fused(logits=torch.nn.Parameter(small_batch()["logits"])).loss.requires_grad


def test_three_sequences_of_three_tokens_take_three_advantages_per_sequence(backend):
    """B = T = 3 is where a broadcast along the wrong dimension would go unnoticed."""
    logits, ids, values = torch.randn(3, 3, 11), torch.randint(11, (3, 3)), torch.tensor([1.0, 2.0, -3.0])
    per_row = gk.fused_grpo_loss(logits, ids, values, old_logps=torch.full((3, 3), -2.4), backend=backend).loss
    spelled = gk.fused_grpo_loss(logits, ids, values[:, None].expand(3, 3), old_logps=torch.full((3, 3), -2.4), backend=backend).loss
    assert per_row == spelled


def test_position_t_scores_token_t(backend):
    """A shift by one gives about -30 at every token."""
    ids = torch.randint(11, (2, 4))
    logits = 30 * torch.nn.functional.one_hot(torch.cat([ids, ids[:, :1]], 1), 11).float()
    assert (gk.token_logprobs(logits, ids, backend=backend) > -1e-6).all()


TENSORS = {
    "temperature": torch.tensor([0.7, 1.5]),
    "advantages": torch.tensor([1.0, -1.0]),
    "old_logps": None,
    "ref_logps": small_batch()["ref_logps"] - 0.5,
    "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    "importance_weights": torch.tensor([0.5, 2.0]),
    "policy_weights": torch.tensor([0.5, 2.0]),
    "token_weights": torch.rand(2, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_no_tensor_is_taken_and_ignored(backend, name):
    """The options have their own table, in test_options.py."""
    gradients = [gradient({**small_batch(), **changed}, beta=0.1, backend=backend) for changed in ({}, {name: TENSORS[name]})]
    assert not torch.allclose(*gradients, rtol=1e-3, atol=0)


# --- backends ---------------------------------------------------------------------------------------------------------------------------


def test_available_backends_say_available_or_why_not():
    backends = gk.available_backends()
    assert backends["torch"] == "available" and "cpu" in backends
    assert all(isinstance(state, str) and state for state in backends.values())


def test_float64_is_served_by_torch_alone(backend):
    inputs = {**small_batch(), "logits": small_batch()["logits"].double()}
    assert gk.fused_grpo_loss(**inputs).loss.dtype == torch.float64  # None picks it
    if backend == "torch":
        assert gk.fused_grpo_loss(**inputs, backend="torch").loss.dtype == torch.float64
    else:
        with pytest.raises(TypeError, match=f"'{backend}' .*float64"):
            gk.fused_grpo_loss(**inputs, backend=backend)


def test_the_environment_chooses_a_backend(backend, monkeypatch):
    expected = fused(backend=backend)
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", backend)
    assert all(torch.equal(x, y) for x, y in zip(fused(), expected))
    monkeypatch.setenv("GRPO_KERNELS_BACKEND", "gpu")
    with pytest.raises(ValueError, match="GRPO_KERNELS_BACKEND: expected one of torch, .*got 'gpu'"):
        fused()
    fused(backend=backend)  # the argument wins


# --- declarations -----------------------------------------------------------------------------------------------------------------------

DEFAULTS = {
    "loss_type": "grpo", "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, "delta": None, "dual_clip": None,
    "beta": 0.0, "kl_estimator": "k3", "kl_bias_correction": False, "max_log_ratio": None, "entropy_coef": 0.0,
    "entropy_aggregation": "loss", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "num_items_in_batch": None, "num_sequences": None, "num_processes": 1, "max_completion_length": None, "loss_scale": 1.0,
}  # fmt: skip


def test_options_are_declared_once_with_the_documented_defaults():
    assert {field.name: field.default for field in fields(ObjectiveParams)} == DEFAULTS
    assert set(gk.LossOptions.__annotations__) == set(DEFAULTS)
    documented = gk.LossOptions.__doc__
    assert [name for name in DEFAULTS if not re.search(rf"^    .*\b{name}\b.*:", documented, re.MULTILINE)] == []


@pytest.mark.parametrize("function", [gk.fused_grpo_loss, gk.grpo_loss, gk.fused_linear_grpo_loss])
def test_every_argument_of_a_loss_is_documented(function):
    names = [name for name in inspect.signature(function).parameters if name != "options"]
    documented = function.__doc__ + (gk.fused_grpo_loss.__doc__ if "as `fused_grpo_loss`" in function.__doc__ else "")
    assert [name for name in names if f"{name}:" not in documented and name != "cu_seqlens"] == []
    assert all(parameter.kind != parameter.VAR_POSITIONAL for parameter in inspect.signature(function).parameters.values())


def test_the_public_names_are_the_exported_ones_and_say_what_they_are():
    public = {name for name, x in vars(gk).items() if not name.startswith("_") and not isinstance(x, ModuleType)}
    assert public == set(gk.__all__) and len(gk.__all__) == len(public)
    for name in gk.__all__:
        documented = getattr(gk, name).__doc__
        assert documented and not documented.startswith(f"{name}("), name  # a NamedTuple's own text says nothing
        if inspect.isfunction(getattr(gk, name)):
            assert ">>>" in documented, name


def test_a_native_module_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_kernels.backends import native

    monkeypatch.setattr(native._C, "interface", native._C.interface - 1)
    with pytest.raises(ImportError, match="another version"):
        native.load("cpu")
