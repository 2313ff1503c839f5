"""Small causal language models of transformers, one for each way in which a head or what follows it differs, and a batch for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import grpo_kernels as gk

B, P, T, VOCAB = 3, 4, 3, 50

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3}

# name -> class of the config, what it adds, (scale, cap) of its logits
MODELS: dict[str, tuple[str, dict[str, Any], tuple[float, float | None]]] = {
    "llama": ("LlamaConfig", {}, (1, None)),
    "qwen2, tied": ("Qwen2Config", {"tie_word_embeddings": True}, (1, None)),
    "qwen3, tied": ("Qwen3Config", {"tie_word_embeddings": True}, (1, None)),
    "gemma2: soft cap": ("Gemma2Config", {"final_logit_softcapping": 3.0}, (1, 3)),
    "gemma3: soft cap": ("Gemma3TextConfig", {"final_logit_softcapping": 3.0}, (1, 3)),
    "recurrent gemma: soft cap of another name": (
        "RecurrentGemmaConfig",
        {"logits_soft_cap": 3.0, "lru_width": 16, "num_hidden_layers": 3},
        (1, 3),
    ),
    "cohere: scale": ("CohereConfig", {"logit_scale": 0.3}, (0.3, None)),
    "granite: divides": ("GraniteConfig", {"logits_scaling": 3.0}, (1 / 3, None)),
    "phi: bias": ("PhiConfig", {}, (1, None)),
    "mixtral": ("MixtralConfig", _EXPERTS, (1, None)),
    "qwen3 mixture": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
        (1, None),
    ),
    "gpt2: tied, another body": ("GPT2Config", _GPT2, (1, None)),
    "opt: a body within a body": ("OPTConfig", {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}, (1, None)),
    "bert: layers before the head, tied bias": (
        "BertConfig",
        {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        (1, None),
    ),
    "mamba: no attention": ("MambaConfig", {"state_size": 4}, (1, None)),
}


def model_of(name: str, **changed: Any) -> Any:
    kind, options, _ = MODELS[name]
    options = options if kind == "GPT2Config" else {**_SIZES, **options}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**options, **changed}))
    for parameter in model.parameters():  # biases and norms too: none may be 0 or 1 by its initialisation
        nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.float()


def batch(rows: int = B, seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """`model`: what the model takes, prompts padded on the left; `loss`: what the loss takes."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, P + T), generator=g)
    lengths = torch.tensor(list(itertools.islice(itertools.cycle((3, 1, 2)), rows)))
    completion_mask = (torch.arange(T) < lengths[:, None]).long()
    prompt_mask = (torch.arange(P) >= torch.arange(rows)[:, None] % 3).long()
    return {
        "model": {"input_ids": ids, "attention_mask": torch.cat([prompt_mask, completion_mask], 1)},
        "loss": {
            "completion_ids": ids[:, P:],
            "advantages": torch.randn(rows, generator=g),
            "old_logps": torch.randn(rows, T, generator=g) * 0.3 - 4,
            "ref_logps": torch.randn(rows, T, generator=g) * 0.3 - 4,
            "completion_mask": completion_mask,
        },
    }


OPTIONS: dict[str, Any] = {"beta": 0.1, "temperature": 0.8, "entropy_coef": 0.01}


def loss_fn(inputs: dict[str, dict[str, Tensor]], **options: Any) -> Callable[..., Any]:
    return partial(gk.fused_linear_grpo_loss, **inputs["loss"], **{**OPTIONS, **options})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the name that each has in an unwrapped model, and cleared."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found = {name.removeprefix("_orig_mod.").removeprefix("module."): x for name, x in found.items()}
    model.zero_grad(set_to_none=True)
    return found


def by_logits(model: Any, inputs: dict[str, dict[str, Tensor]], **options: Any) -> tuple[Any, gk.GRPOLossOutput, dict[str, Tensor]]:
    """The model's output, the loss of its logits, and every gradient of loss + 0.3 * auxiliary loss."""
    output = model(**inputs["model"], return_dict=True)
    logits = output.logits[:, -(T + 1) :].contiguous()
    expected = gk.fused_grpo_loss(logits, **inputs["loss"], **{**OPTIONS, **options})
    (expected.loss + 0.3 * auxiliary(output)).backward()
    return output, expected, gradients(model)


def by_head(model: Any, inputs: dict[str, dict[str, Tensor]], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """The same of a fused model."""
    output = model(**inputs["model"], lm_head_fn=loss_fn(inputs, **options))
    (output.loss + 0.3 * auxiliary(output)).backward()
    return output, gradients(model)


def auxiliary(output: Any) -> Any:
    return output.aux_loss if output.get("aux_loss") is not None else 0.0


def close(got: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 2e-5) -> None:
    """Each gradient within rtol of its norm; where that is small beside the largest (a bias that softmax cancels), of a share of that."""
    assert got.keys() == wanted.keys() and wanted
    largest = max(x.norm() for x in wanted.values())
    assert largest > 1e-3
    for name, x in wanted.items():
        assert x.dtype == got[name].dtype
        difference = (got[name].double() - x.double()).norm()
        assert difference <= rtol * max(x.norm(), 1e-3 * largest), f"{name}: {difference / max(x.norm(), 1e-3 * largest):.1e}"
