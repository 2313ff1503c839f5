"""Training steps of TRL's GRPOTrainer and of FusedGRPOTrainer from one seed, side by side; `python tests/trl_steps.py` prints the table of
docs/trainers.md.

Models are made here from configurations and the tokenizer from a list of words: nothing comes from a hub.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB, EOS, PAD, GROUP, BATCH = 97, 95, 96, 2, 4
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
OWN_BOUNDS: dict[str, dict[str, Any]] = {"cispo": {"epsilon_high": 1.2}, "dr_grpo": {"max_completion_length": 9}}
TIMES = ("time", "runtime", "per_second", "epoch")  # of a run, not of the training

# What differs from GRPOConfig's defaults in each row. `off_policy`: the second step trains on the first one's completions, so ratios are
# not 1. Names with a capital are not options but what the harness does.
OFF_POLICY: dict[str, Any] = {"num_iterations": 2, "learning_rate": 0.3}
GRID: dict[str, dict[str, Any]] = {
    "GRPOConfig's defaults": {"bf16": True},
    "defaults, bfloat16 weights": {"bf16": True, "Dtype": torch.bfloat16},
    "defaults, float32": {},
    "defaults, penalty": {"beta": 0.1},
    **{f"loss_type={x}": {"loss_type": x, **OFF_POLICY, **OWN_BOUNDS.get(x, {})} for x in LOSS_TYPES},
    **{
        f"loss_type={x}, penalty, sequence level": {
            "loss_type": x,
            "importance_sampling_level": "sequence",
            "beta": 0.1,
            **OFF_POLICY,
            **OWN_BOUNDS.get(x, {}),
        }
        for x in LOSS_TYPES
    },
    "penalty without bias correction": {"beta": 0.1, "use_bias_correction_kl": False, **OFF_POLICY},
    "epsilon, epsilon_high": {"epsilon": 0.05, "epsilon_high": 0.1, **OFF_POLICY},
    "delta": {"delta": 1.3, **OFF_POLICY},
    "delta below the clip": {"delta": 1.05, **OFF_POLICY},
    "temperatures of sapo": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5, **OFF_POLICY},
    "shape of vespo": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 2.0,
        "vespo_lambda_neg": 0.0,
        **OFF_POLICY,
    },
    "top_entropy_quantile": {"top_entropy_quantile": 0.4, **OFF_POLICY},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.001, **OFF_POLICY},
    "both masks, entropy bonus": {
        "top_entropy_quantile": 0.6,
        "off_policy_mask_threshold": 0.001,
        "entropy_coef": 0.05,
        "loss_type": "grpo",
        **OFF_POLICY,
    },
    "entropy bonus": {"entropy_coef": 0.05},
    "negative entropy bonus, penalty": {"entropy_coef": -0.05, "beta": 0.1, "loss_type": "sapo"},
    "adaptive entropy, above its target": {"use_adaptive_entropy": True, "entropy_target": 0.5, "entropy_coef": 0.03},
    "adaptive entropy, below": {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.1, "loss_type": "bnpo"},
    "gradient accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "gradient accumulation, grpo, entropy bonus": {"gradient_accumulation_steps": 2, "loss_type": "grpo", "entropy_coef": 0.05},
    "several steps a generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.3},
    "scale_rewards=batch": {"scale_rewards": "batch"},
    "scale_rewards=none": {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "two rewards, normalize_then_sum": {"Rewards": 2, "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
    "mask_truncated_completions": {"mask_truncated_completions": True, "Rollout": True, "beta": 0.1},
    "no gradient checkpointing": {"gradient_checkpointing": False},
    "tokens of tools masked": {"Rollout": True, "Tools": True, "loss_type": "grpo", "beta": 0.1},
    **{
        f"sampler's ratios, {mode}": {
            "Rollout": True,
            "Sampler": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": 1.5,
        }
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "sampler's ratios, vespo": {
        "Rollout": True,
        "Sampler": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "loss_type": "vespo",
        **OFF_POLICY,
    },
    "sampler's ratios, off-policy mask": {"Rollout": True, "Sampler": True, "off_policy_mask_threshold": 0.001, **OFF_POLICY},
    "cast_lm_head_to_fp32": {"cast_lm_head_to_fp32": True, "Dtype": torch.bfloat16, "beta": 0.1},
    "mixture of experts": {"Model": "mixtral", "router_aux_loss_coef": 0.1, "gradient_accumulation_steps": 2},
    "tied embeddings": {"Tied": True},
    "soft-capped logits": {"Model": "gemma2", "beta": 0.1},
    "scaled logits": {"Model": "granite", "Rollout": True, "beta": 0.1},
    "biased head": {"Model": "phi"},
    "LoRA": {"Lora": True, "beta": 0.1, "learning_rate": 0.3},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "beta": 0.1},
}
DEFAULTS = [name for name in GRID if "defaults" in name]


class Run(NamedTuple):
    log: list[dict[str, Any]]  # what TRL logged: a line a step, an evaluation, and the summary
    moved: Tensor  # how far each parameter came
    calls: Counter[str]  # of our operators
    dtypes: set[torch.dtype]  # that these got logits or hidden states in, log-probs where they got these


class Calls(TorchDispatchMode):
    """Counts calls of our operators, by name and dtype of what log-probs are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "grpo_kernels":
            self.counts[func._schema.name.split("::")[1]] += 1
            self.dtypes.add(next(x.dtype for x in args if isinstance(x, Tensor)))
        return func(*args, **(kwargs or {}))


def path_of(calls: Counter[str]) -> str:
    """Which way the losses of a run went, from the operators that were called and not from what the trainer says of itself."""
    if any(name.startswith("linear_") for name in calls):
        return "hidden states"
    if calls["loss_and_grad"] or calls["loss_and_grad_"] or calls["logprobs_forward"]:
        return "logits"
    return "TRL"


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(EOS)} | {"<eos>": EOS, "<pad>": PAD}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def model_of(kind: str = "llama", tied: bool = False, dtype: torch.dtype = torch.float32, folder: Path | None = None) -> Any:
    """A few thousand parameters; in `folder`, from where TRL makes the reference model of the same parameters."""
    import transformers as t

    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS,
        "initializer_range": 0.3, "tie_word_embeddings": tied,
    }  # fmt: skip
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**common),
        "mixtral": lambda: t.MixtralConfig(**common, num_local_experts=4),
        "gemma2": lambda: t.Gemma2Config(**common, head_dim=16, final_logit_softcapping=3.0),
        "granite": lambda: t.GraniteConfig(**common, logits_scaling=2.0),
        "phi": lambda: t.PhiConfig(**common),
    }
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(configs[kind]()).to(dtype)
    if kind == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    model.generation_config.eos_token_id = [EOS, *range(12)]  # so that completions differ in length
    if folder is None:
        return model
    if not folder.exists():
        model.save_pretrained(folder)
    return t.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def evenness(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of chance, the same for a prompt on whatever rank; the first of each is cut off, every third token is a tool's, and the
    log-probs are as of an engine that computes a little differently."""
    seen: Counter[str] = Counter()
    ids, completions, logprobs = [], [], []
    for prompt in prompts:
        ids.append(trainer.processing_class(text=prompt)["input_ids"])
        g = torch.Generator().manual_seed(1000 * sum(ids[-1]) + 10 * trainer.state.global_step + seen[prompt])
        completion = torch.randint(EOS, (int(torch.randint(3, 8, (1,), generator=g)),), generator=g).tolist()
        completions.append([*completion, EOS] if seen[prompt] else completion)
        seen[prompt] += 1
        tokens = torch.tensor([ids[-1] + completions[-1]])
        with torch.no_grad():
            logits = trainer.accelerator.unwrap_model(trainer.model)(input_ids=tokens).logits[0].float() / trainer.temperature
        scored = logits.log_softmax(-1)[len(ids[-1]) - 1 : -1].gather(1, torch.tensor(completions[-1])[:, None])[:, 0]
        logprobs.append((scored + 0.4 * torch.randn(len(scored), generator=g)).tolist())
    masks = {"env_mask": [[int(i % 3 != 2) for i in range(len(x))] for x in completions]} if trainer.masks_tools else {}
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs, **masks}


def train(trainer_class: Any, row: dict[str, Any], folder: Path, steps: int = 2, **more: Any) -> Run:
    """`steps` optimiser steps. Plain gradient descent: Adam would make a step of lr from the sign of a rounding error."""
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    options = {name: value for name, value in row.items() if name[0].islower()}
    args = trl.GRPOConfig(
        str(folder / "run"),
        **{
            "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
            "max_steps": steps, "num_generations": GROUP, "per_device_train_batch_size": BATCH, "max_completion_length": 8,
            "temperature": 0.8, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "seed": 3, **options,
        },
    )  # fmt: skip
    model = model_of(row.get("Model", "llama"), row.get("Tied", False), row.get("Dtype", torch.float32), folder / "model")
    if row.get("Lora"):
        import peft

        more["peft_config"] = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if row.get("Rollout"):
        more["rollout_func"] = rollout
    data = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9", "w10"] * 8})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = trainer_class(
            model=model, reward_funcs=[evenness, variety][: row.get("Rewards", 1)], args=args, train_dataset=data,
            eval_dataset=data.select(range(4)) if "eval_steps" in options else None, processing_class=tokenizer(), **more,
        )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.masks_tools = row.get("Tools", False)
    if row.get("Sampler"):  # vLLM itself needs a GPU: what TRL makes of the log-probs that an engine reports does not
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    before = parameters_of(trainer)
    with Calls() as calls:
        trainer.train()
    return Run(trainer.state.log_history, parameters_of(trainer) - before, calls.counts, calls.dtypes)


def parameters_of(trainer: Any) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters() if p.requires_grad])


class Difference(NamedTuple):
    """Largest differences of two runs, each relative to max(|TRL's|, the floor), parameters to the largest way that one came."""

    loss: float
    metrics: float
    parameters: float


def difference(theirs: Run, ours: Run) -> Difference:
    assert [sorted(line) for line in theirs.log] == [sorted(line) for line in ours.log], "not the same metrics"
    loss = metrics = 0.0
    for wanted, got in zip(theirs.log, ours.log):
        for name in wanted:
            if any(time in name for time in TIMES) or not isinstance(wanted[name], (int, float)):
                continue
            apart = abs(wanted[name] - got[name]) / max(abs(wanted[name]), 0.1)  # a loss is a sum of terms about 1 that cancel
            if name in ("loss", "eval_loss", "train_loss"):
                loss = max(loss, apart)
            else:
                metrics = max(metrics, apart)
    return Difference(loss, metrics, float((theirs.moved - ours.moved).abs().max() / theirs.moved.abs().max()))


def applicable(row: dict[str, Any]) -> dict[str, Any] | None:
    """The row in the words of the TRL that is installed; None: it has no such option."""
    import trl

    options = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    row = dict(row)
    if "vllm_importance_sampling_clip_max" in row and "vllm_importance_sampling_clip_max" not in options:
        row["vllm_importance_sampling_cap"] = row.pop("vllm_importance_sampling_clip_max")
    return row if {name for name in row if name[0].islower()} <= options else None


def steps_of(name: str, folder: Path, loss_from: str = "hidden_states") -> tuple[Difference, str]:
    """The difference of a row of the grid, and the path that its losses took."""
    import trl

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    row = applicable(GRID[name])
    assert row is not None
    theirs = train(trl.GRPOTrainer, row, folder)
    ours = train(FusedGRPOTrainer, row, folder, loss_from=loss_from)
    assert path_of(theirs.calls) == "TRL" and theirs.moved.abs().max() > 1e-3, "a row has to train"
    return difference(theirs, ours), path_of(ours.calls)


def main() -> None:
    """Arguments: hidden_states or logits, and rows; all rows without."""
    torch.set_num_threads(1)
    gc.freeze()  # every run ends in a collection, of what the imports made too
    loss_from = sys.argv[1] if len(sys.argv) > 1 else "hidden_states"
    print("| configuration | path | loss | metrics | parameters |\n|---|---|---|---|---|")
    for name in sys.argv[2:] or [name for name in GRID if applicable(GRID[name]) is not None]:
        with tempfile.TemporaryDirectory() as folder:
            apart, path = steps_of(name, Path(folder), loss_from)
        print(f"| {name} | {path} | {apart.loss:.1e} | {apart.metrics:.1e} | {apart.parameters:.1e} |", flush=True)


if __name__ == "__main__":
    main()
