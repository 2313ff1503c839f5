"""TRL's own loss, computed by a real trainer on a tiny model, agrees with ours on value, parameter gradients and metrics.

`ours` is the mapping of a TRL trainer's state to our arguments; the migration page of the docs says the same in words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk

trl = pytest.importorskip("trl", reason="TRL is an extra")
transformers = pytest.importorskip("transformers")
if not trl.__version__.startswith("1.16."):
    pytest.skip(f"written against the private _compute_loss of TRL 1.16, here is {trl.__version__}", allow_module_level=True)

B, P, T, VOCAB = 4, 3, 6, 100
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
CLIPPED = LOSS_TYPES[:5]
LENGTHS = torch.tensor([6, 2, 5, 3])
WORST = {"loss": 0.0, "gradient": 0.0, "metric": 0.0}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCAB - 2)} | {"<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, pad_token_id=VOCAB - 2, bos_token_id=VOCAB - 1, eos_token_id=VOCAB - 1, initializer_range=0.3,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=transformers.LlamaForCausalLM(config),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, report_to="none", num_generations=2, temperature=0.8,
            per_device_train_batch_size=B, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w1 w2"] * B}),
        processing_class=tokenizer,
    )  # fmt: skip


@pytest.fixture
def trainer(built: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Whose attributes a test may change; the private ones are what its constructor sets from the arguments of the same name."""
    built._metrics["train"].clear()
    built._metrics["eval"].clear()
    built.model.train()
    built.current_gradient_accumulation_steps = 3
    built.max_completion_length = 16
    attributes, arguments = dict(vars(built)), dict(vars(built.args))
    yield built
    vars(built).clear(), vars(built).update(attributes)
    vars(built.args).clear(), vars(built.args).update(arguments)


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_worst_differences() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small to be shared
    yield
    torch.set_num_threads(threads)
    print("\nTRL: largest relative difference", ", ".join(f"{name} {x:.1e}" for name, x in WORST.items()))


def settings(trainer: Any, **changed: Any) -> None:
    """As a GRPOConfig with these would have left the trainer."""
    for name, value in changed.items():
        if hasattr(trainer.args, name):
            setattr(trainer.args, name, value)
        setattr(trainer, {"epsilon": "epsilon_low"}.get(name, name), value)
    trainer._entropy_bonus_enabled = changed.get("entropy_coef", 0.0) != 0


def logits_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    return model(input_ids=ids, attention_mask=mask, logits_to_keep=T + 1).logits


def batch(trainer: Any, seed: int = 0, lengths: Tensor = LENGTHS, **others: Tensor) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    inputs = {
        "prompt_ids": torch.randint(VOCAB - 2, (B, P), generator=g),
        "prompt_mask": (torch.arange(P) >= torch.tensor([0, 1, 2, 0])[:, None]).long(),
        "completion_ids": torch.randint(VOCAB - 2, (B, T), generator=g),
        "completion_mask": (torch.arange(T) < lengths[:, None]).long(),
        "advantages": torch.tensor([1.3, -0.7, -1.1, 0.4]),
        "num_items_in_batch": torch.tensor(57.0),
    }
    with torch.no_grad():
        logps = gk.token_logprobs(logits_of(trainer.model, inputs), inputs["completion_ids"], temperature=trainer.temperature)
    drift = torch.tensor([0.3, 0.5, -0.3, -0.2])[:, None] + 0.3 * torch.randn(B, T, generator=g)
    return inputs | {"old_per_token_logps": logps - drift, "ref_per_token_logps": logps + 0.5 * torch.randn(B, T, generator=g)} | others


def ours(trainer: Any, inputs: dict[str, Tensor]) -> tuple[gk.GRPOLossOutput, Tensor]:
    """The loss that the trainer would compute, from our functions, and its mask."""
    args, training = trainer.args, trainer.model.training
    accumulation = trainer.current_gradient_accumulation_steps if training else 1
    options: dict[str, Any] = {
        "loss_type": trainer.loss_type, "importance_sampling_level": trainer.importance_sampling_level, "beta": trainer.beta,
        "epsilon": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high, "kl_bias_correction": args.use_bias_correction_kl,
        "delta": args.delta if trainer.loss_type in CLIPPED else None,
        "sapo_temperature_pos": args.sapo_temperature_pos, "sapo_temperature_neg": args.sapo_temperature_neg,
        "vespo_k_pos": args.vespo_k_pos, "vespo_lambda_pos": args.vespo_lambda_pos,
        "vespo_k_neg": args.vespo_k_neg, "vespo_lambda_neg": args.vespo_lambda_neg,
        "entropy_coef": trainer.entropy_coef if trainer._entropy_bonus_enabled else 0.0, "entropy_aggregation": "token_mean",
        "max_completion_length": trainer.max_completion_length, "loss_scale": 1 / accumulation,
    }  # fmt: skip
    if trainer.loss_type in ("dapo", "cispo", "vespo"):  # the others are means of this process alone
        steps = args.steps_per_generation if training else 1
        options |= {
            "num_items_in_batch": inputs["num_items_in_batch"].clamp(min=1) / steps,
            "num_processes": trainer.accelerator.num_processes,
        }

    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    logits, ids = logits_of(trainer.model, inputs), inputs["completion_ids"]
    old, factor = inputs.get("old_per_token_logps"), None
    if trainer.top_entropy_quantile < 1 or trainer.off_policy_mask_threshold is not None:
        scored = gk.token_logprobs_and_entropy(logits.detach(), ids, mask=mask, temperature=trainer.temperature)
        factor = torch.ones_like(scored.logps)
        if trainer.top_entropy_quantile < 1:
            factor *= gk.high_entropy_mask(scored.entropy, mask, top_entropy_quantile=trainer.top_entropy_quantile)
        if trainer.off_policy_mask_threshold is not None:
            sampler = inputs.get("sampling_per_token_logps", scored.logps if old is None else old)
            factor *= gk.off_policy_mask(scored.logps, sampler, inputs["advantages"], mask, threshold=trainer.off_policy_mask_threshold)
    output = gk.fused_grpo_loss(
        logits, ids, inputs["advantages"], old_logps=old, ref_logps=inputs["ref_per_token_logps"], completion_mask=mask,
        importance_weights=inputs.get("importance_sampling_ratio"), policy_weights=factor, temperature=trainer.temperature, **options,
    )  # fmt: skip
    return output, mask


def gradients(trainer: Any, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(trainer.model.parameters()))
    return torch.cat([x.flatten() for x in found])


def agree(trainer: Any, inputs: dict[str, Tensor]) -> None:
    theirs = trainer._compute_loss(trainer.model, inputs)
    output, mask = ours(trainer, inputs)
    wanted, got = gradients(trainer, theirs), gradients(trainer, output.loss)
    assert wanted.abs().max() > 1e-4
    scale = max(abs(theirs.item()), 0.1)  # the loss is a sum of terms about 1 that cancel
    difference = {"loss": abs(output.loss.item() - theirs.item()) / scale, "gradient": float((got - wanted).norm() / wanted.norm())}
    for name, value in difference.items():
        WORST[name] = max(WORST[name], value)
    assert difference["loss"] < 1e-5 and difference["gradient"] < 1e-5, difference
    metrics_agree(trainer, output, mask)


def metrics_agree(trainer: Any, output: gk.GRPOLossOutput, mask: Tensor) -> None:
    logged = trainer._metrics["train" if trainer.model.training else "eval"]
    metrics = gk.grpo_metrics(output, mask, importance_sampling_level=trainer.importance_sampling_level)
    names = {name: name for name in metrics if name in logged}
    if trainer.loss_type == "cispo":
        names["clip_ratio/high_mean"] = "cispo_clip_ratio"
    assert "entropy" in names and ("kl" in names) == (trainer.beta > 0) and (trainer.loss_type not in CLIPPED or len(names) > 5)
    for mine, theirs in names.items():
        assert metrics[mine].item() == pytest.approx(logged[theirs][-1], rel=1e-5, abs=1e-6), theirs
        WORST["metric"] = max(WORST["metric"], abs(metrics[mine].item() - logged[theirs][-1]))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_level_and_penalty_agrees(trainer: Any, loss_type: str, level: str) -> None:
    inputs = batch(trainer)
    high = 1.2 if loss_type == "cispo" else 0.28
    for beta, corrected in ((0.0, False), (0.3, False), (0.3, True)):
        settings(
            trainer, loss_type=loss_type, importance_sampling_level=level, epsilon_high=high, beta=beta, use_bias_correction_kl=corrected
        )
        agree(trainer, inputs)


OPTIONS: dict[str, dict[str, Any]] = {
    "a cap of the ratio": {"delta": 1.5},
    "high-entropy tokens": {"top_entropy_quantile": 0.4},
    "off-policy sequences": {"off_policy_mask_threshold": 0.05},
    "both masks": {"top_entropy_quantile": 0.6, "off_policy_mask_threshold": 0.05},
    "entropy bonus": {"entropy_coef": 0.05},
    "negative entropy bonus and penalty": {"entropy_coef": -0.05, "beta": 0.1},
    "temperatures of sapo": {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "shape of vespo": {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0},
    "four steps a generation": {"steps_per_generation": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_option_agrees(trainer: Any, loss_type: str, name: str) -> None:
    settings(trainer, loss_type=loss_type, epsilon_high=1.2 if loss_type == "cispo" else 0.28, **OPTIONS[name])
    agree(trainer, batch(trainer, seed=1))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_importance_ratios_of_the_sampler_agree(trainer: Any, loss_type: str) -> None:
    inputs = batch(trainer, seed=2)
    settings(trainer, loss_type=loss_type, epsilon_high=1.2, beta=0.1, use_vllm=True, vllm_importance_sampling_correction=True)
    sampler = inputs["old_per_token_logps"] + 0.5 * torch.randn(B, T, generator=torch.Generator().manual_seed(0))
    sampler[0, 1] = torch.nan
    for level in ("token", "sequence")[: 1 if loss_type == "vespo" else 2]:
        weights = gk.truncated_importance_weights(inputs["old_per_token_logps"], sampler, inputs["completion_mask"], level=level).weights
        agree(trainer, inputs | {"importance_sampling_ratio": weights if level == "token" else weights[:, None]})


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_tools_advantages_per_token_and_evaluation_agree(trainer: Any, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(trainer, loss_type=loss_type, epsilon_high=1.2, beta=0.1, steps_per_generation=2)
    inputs = batch(trainer, seed=3)
    agree(trainer, {name: x for name, x in inputs.items() if name != "old_per_token_logps"})
    agree(trainer, inputs | {"tool_mask": torch.tensor([[1, 1, 0, 1, 1, 1]]).repeat(B, 1)})
    agree(trainer, inputs | {"advantages": torch.randn(B, T, generator=torch.Generator().manual_seed(0))})
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda _: 2))
    agree(trainer, inputs)
    trainer.model.eval()
    agree(trainer, inputs)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_empty_completion_agrees(trainer: Any, loss_type: str, level: str) -> None:
    settings(trainer, loss_type=loss_type, importance_sampling_level=level, epsilon_high=1.2, beta=0.1)
    inputs = batch(trainer, seed=4, lengths=torch.tensor([6, 0, 5, 3]))
    theirs = trainer._compute_loss(trainer.model, inputs)
    output, _ = ours(trainer, inputs)  # of the metrics, low_min and high_max are here of the completions that have a token
    torch.testing.assert_close(output.loss, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradients(trainer, output.loss), gradients(trainer, theirs), rtol=1e-4, atol=1e-6)


def test_the_entropy_bonus_over_high_entropy_tokens_agrees(trainer: Any) -> None:
    """TRL's bonus is then a mean over those tokens alone, which no option of ours is: one line beside the loss."""
    settings(trainer, loss_type="grpo", entropy_coef=0.1, top_entropy_quantile=0.4)
    inputs = batch(trainer, seed=5)
    theirs = trainer._compute_loss(trainer.model, inputs)
    mask, scale = inputs["completion_mask"], 1 / trainer.current_gradient_accumulation_steps
    scored = gk.token_logprobs_and_entropy(logits_of(trainer.model, inputs), inputs["completion_ids"], mask=mask, temperature=0.8)
    top = gk.high_entropy_mask(scored.entropy, mask, top_entropy_quantile=0.4)
    loss = gk.grpo_loss(
        scored.logps, inputs["advantages"], old_logps=inputs["old_per_token_logps"], completion_mask=mask, policy_weights=top,
        epsilon_high=trainer.epsilon_high, loss_scale=scale,
    ).loss  # fmt: skip
    loss = loss - 0.1 * scale * (scored.entropy * top).sum() / top.sum().clamp(min=1)
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradients(trainer, loss), gradients(trainer, theirs), rtol=1e-4, atol=1e-6)


def test_masks_are_those_of_the_trainer(trainer: Any) -> None:
    g = torch.Generator().manual_seed(0)
    for quantile, empty in itertools.product((0.05, 0.2, 0.5, 1.0), (False, True)):
        entropy, mask = torch.rand(B, T, generator=g), (torch.rand(B, T, generator=g) < (0 if empty else 0.8)).long()
        theirs = trainer.get_high_entropy_mask(entropy, mask, 1 - quantile)
        assert torch.equal(gk.high_entropy_mask(entropy, mask, top_entropy_quantile=quantile) != 0, theirs)
    for threshold in (-0.1, 0.0, 0.1, 0.5):
        logps, sampler = torch.randn(B, T, generator=g), torch.randn(B, T, generator=g)
        sampler[1, :2] = torch.nan
        mask, advantages = (torch.rand(B, T, generator=g) < 0.8).long(), torch.tensor([0.0, -1.0, 1.0, -1.0])
        theirs = trainer.get_off_policy_mask(advantages[:, None], logps, sampler, mask, threshold)
        kept = gk.off_policy_mask(logps, sampler, advantages, mask, threshold=threshold)
        assert torch.equal(kept, theirs.float().expand(B, T))
