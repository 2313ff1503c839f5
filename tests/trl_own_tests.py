"""TRL's own tests of GRPOTrainer with FusedGRPOTrainer in its place:

    git clone --branch v1.16.0 https://github.com/huggingface/trl
    python tests/trl_own_tests.py trl [options of pytest]

They load small models and data sets from a hub by name. Those of the language models are made here from configurations, in folders of
the same names under the folder where the tests run, where `from_pretrained` and `load_dataset` look before they ask a hub. What else a test
asks for (vision models, vLLM, a GPU) it does not find, and fails with TRL's own trainer too: `--theirs` leaves that in, to compare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

OWNER = "trl-internal-testing"
QUESTIONS = [
    f"{word} is better than {other}." for word in ("Beautiful", "Explicit", "Simple", "Flat", "Sparse") for other in ("ugly", "hidden")
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> int:
    checkout, *options = sys.argv[1:]
    environment = {
        **os.environ, "GRPO_TRAINER": "theirs" if "--theirs" in options else "ours", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    options = [x for x in options if x != "--theirs"]
    with tempfile.TemporaryDirectory() as folder:
        make_hub(Path(folder))
        tests = Path(checkout).resolve() / "tests" / "test_grpo_trainer.py"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "trl_own_tests", str(tests), *options]
        return subprocess.run(command, cwd=folder, env=environment).returncode


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: before the tests import the names."""
    import trl

    from grpo_kernels.integrations.trl import patch_trl

    init = trl.GRPOConfig.__init__

    def on_the_cpu(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **{"use_cpu": True, **options})

    if not torch.cuda.is_available():  # where its default, bf16, is refused otherwise
        trl.GRPOConfig.__init__ = on_the_cpu
    if os.environ["GRPO_TRAINER"] == "ours":
        patch_trl()


def make_hub(folder: Path) -> None:
    """Folders that are named as on the hub."""
    import transformers as t

    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    models = {
        "tiny-Qwen2ForCausalLM-2.5": t.AutoModelForCausalLM.from_config(t.Qwen2Config(**sizes)),
        "tiny-Qwen2ForSequenceClassification-2.5": t.AutoModelForSequenceClassification.from_config(t.Qwen2Config(**sizes, num_labels=1)),
        "tiny-Qwen3ForCausalLM": t.AutoModelForCausalLM.from_config(t.Qwen3Config(**sizes, head_dim=4)),
        "tiny-Qwen3MoeForCausalLM": t.AutoModelForCausalLM.from_config(t.Qwen3MoeConfig(**sizes, head_dim=4, **experts)),
        "tiny-LlamaForCausalLM-3.2": t.AutoModelForCausalLM.from_config(t.LlamaConfig(**sizes)),
    }
    for name, model in models.items():
        model.to(torch.float32).save_pretrained(folder / OWNER / name)
        tokenizer.save_pretrained(folder / OWNER / name)

    prompts = {
        "standard_prompt_only": [{"prompt": text} for text in QUESTIONS],
        "conversational_prompt_only": [{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS],
    }
    data = folder / OWNER / "zen"
    head = ["---", "configs:"]
    for name, rows in prompts.items():
        head += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            path = data / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            head += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (data / "README.md").write_text("\n".join([*head, "---", ""]))


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner.train_from_iterator(
        QUESTIONS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=CHATML, padding_side="left"
    )


if __name__ == "__main__":
    sys.exit(main())
