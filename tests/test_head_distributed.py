"""A fused model on two processes, replicated or sharded, has the gradients that one process has of the whole batch.

The wrong answer to guard against comes without an error: of a head whose weight is gathered outside its module's forward, each rank keeps
a gradient of its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import fsdp

import grpo_kernels as gk
from ranks import on_every_rank

pytest.importorskip("transformers", reason="transformers is an extra")

from causal_models import batch, by_head, by_logits, close, gradients, loss_fn, model_of

pytestmark = pytest.mark.serial

fsdp_runs_here = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 runs on a GPU only")
RANKS, ROWS = 2, 4
# The counts of the whole batch, as a trainer passes them that averages gradients over ranks.
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "num_items_in_batch": 9, "num_processes": RANKS},
    "sequence level": {"importance_sampling_level": "sequence", "num_sequences": ROWS, "num_processes": RANKS},
    "sequence level, two sweeps": {
        "importance_sampling_level": "sequence",
        "num_sequences": ROWS,
        "num_processes": RANKS,
        "chunk_size": 1,
    },
}


def share(inputs: dict[str, dict[str, Tensor]], rank: int) -> dict[str, dict[str, Tensor]]:
    """The rows of a rank."""
    rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
    return {part: {key: x[rows] for key, x in tensors.items()} for part, tensors in inputs.items()}


def whole(name: str, options: dict[str, Any], adapt: Callable[[Any], Any] = lambda model: model) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, by logits."""
    options = {key: x for key, x in options.items() if key != "chunk_size"} | {"num_processes": 1}
    _, expected, wanted = by_logits(adapt(model_of(name)), batch(ROWS), **options)
    return expected.loss.item(), wanted


def steps(model: Any, inputs: dict[str, dict[str, Tensor]], options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the second step; the first one measures what the model does to logits."""
    for _ in range(2):
        output, got = by_head(model, inputs, **options)
    return output.loss.item(), {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in got.items()}


def agree(results: list[Any], expected: tuple[float, dict[str, Tensor]], **tolerance: float) -> None:
    """The mean of the ranks' losses, and every rank's gradients."""
    loss, wanted = expected
    assert sum(loss for loss, _ in results) / RANKS == pytest.approx(loss, rel=tolerance.get("rtol", 1e-5))
    for _, got in results:
        close(got, wanted, **tolerance)


@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("name", ["llama", "qwen3, tied"])
def test_ddp_has_the_gradients_of_one_process(name: str, options: str, tmp_path: Path) -> None:
    def act(rank: int, group: dist.ProcessGroup) -> Any:
        model = torch.nn.parallel.DistributedDataParallel(gk.fuse_lm_head(model_of(name)))
        return steps(model, share(batch(ROWS), rank), LOSSES[options])

    agree(on_every_rank(RANKS, tmp_path, act), whole(name, LOSSES[options]))


def sharded(model: Any, head_alone: bool, **policy: Any) -> Any:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    shard = partial(fsdp.fully_shard, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
    body = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in body.model.layers:
        shard(layer)
    if head_alone:
        shard(body.get_output_embeddings())
    return shard(model)


@fsdp_runs_here
@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize(
    ("name", "head_alone"), [("llama", False), ("llama", True), ("qwen3, tied", False), ("granite: divides", True)], ids=str
)
def test_fsdp_has_the_gradients_of_one_process(name: str, head_alone: bool, options: str, tmp_path: Path) -> None:
    def act(rank: int, group: dist.ProcessGroup) -> Any:
        model = sharded(gk.fuse_lm_head(model_of(name)), head_alone)
        return steps(model, share(batch(ROWS), rank), LOSSES[options])

    agree(on_every_rank(RANKS, tmp_path, act), whole(name, LOSSES[options]))


@fsdp_runs_here
def test_casts_of_fsdp_do_not_reach_the_log_probs(tmp_path: Path) -> None:
    """cast_forward_inputs rounds every tensor that it finds among the arguments: a log-prob of -5 in bfloat16 by up to 2^-6."""
    options = LOSSES["dapo"]

    def act(rank: int, group: dist.ProcessGroup) -> Any:
        model = sharded(gk.fuse_lm_head(model_of("llama")), True, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        inputs = share(batch(ROWS), rank)
        fn = loss_fn(inputs, **options)

        def spied(hidden_states: Tensor, lm_head_weight: Tensor, **head: Any) -> Any:
            assert hidden_states.dtype == lm_head_weight.dtype == torch.bfloat16 and type(lm_head_weight.data) is Tensor
            assert fn.keywords["old_logps"].dtype == torch.float32
            return fn(hidden_states, lm_head_weight, **head)

        model(**inputs["model"], logits_to_keep=4, lm_head_fn=spied)
        return steps(model, inputs, options)

    results = on_every_rank(RANKS, tmp_path, act)
    agree(results, whole("llama", options), rtol=0.1)


def lora(model: Any) -> Any:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, lora_alpha=8, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "wrapper", ["ddp", pytest.param("fsdp", marks=fsdp_runs_here), pytest.param("fsdp, head alone", marks=fsdp_runs_here)]
)
def test_an_adapter_of_the_head_has_the_gradients_of_one_process(wrapper: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is an extra")
    options = LOSSES["dapo"]

    def act(rank: int, group: dist.ProcessGroup) -> Any:
        model = lora(gk.fuse_lm_head(model_of("llama")))
        model = torch.nn.parallel.DistributedDataParallel(model) if wrapper == "ddp" else sharded(model, "alone" in wrapper)
        return steps(model, share(batch(ROWS), rank), options)

    agree(on_every_rank(RANKS, tmp_path, act), whole("llama", options, lora))


@fsdp_runs_here
def test_a_sharded_weight_outside_its_forward_is_refused(tmp_path: Path) -> None:
    def act(rank: int, group: dist.ProcessGroup) -> Any:
        model, inputs = sharded(gk.fuse_lm_head(model_of("llama")), True), share(batch(ROWS), rank)
        messages = []
        for function in (loss_fn(inputs), lambda hidden, weight: model.lm_head.forward(hidden, loss_fn(inputs))):
            try:
                function(torch.randn(2, 4, 16), model.lm_head.weight)
            except TypeError as error:
                messages.append(str(error))
        gradients(model)
        return messages

    for messages in on_every_rank(RANKS, tmp_path, act):
        assert len(messages) == 2
        for message in messages:
            assert "lm_head_weight" in message and "DTensor" in message and "GRPOHead" in message, message
