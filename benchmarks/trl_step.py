"""Peak memory and time of TRL's training step before and after: `python benchmarks/trl_step.py` (Linux; about ten minutes on two cores).

A step is TRL's own: rollouts by a function that costs nothing, rewards, the loss, its backward, plain gradient descent. The body is two
layers, so that what is measured is the head of 151,936 tokens. Each round runs every contestant once, in a process of its own: peak memory
is what the process held at most during the steps above what it held before, gradients included; a time is the median of its steps after the
first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

CONTESTANTS = {
    "TRL": "trl.GRPOTrainer",
    "hidden states": 'FusedGRPOTrainer(loss_from="hidden_states")',
    "logits": 'FusedGRPOTrainer(loss_from="logits")',
}
PROMPT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestant", choices=CONTESTANTS, help="one of them, in this process; prints JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of GRPOConfig, VALUE as JSON")
    options = parser.parse_args()
    if options.contestant:
        print(json.dumps(measure(options)))
        return
    import torch
    import trl

    tokens = options.batch * options.length
    logits = tokens * options.vocab * 4 / 2**30
    print(
        f"TRL {trl.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads; {tokens} completion tokens, "
        f"V {options.vocab}, D {options.width}; float32 logits would be {logits:.2f} GiB; {' '.join(options.option) or 'float32'}"
    )
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for turn in range(options.rounds):
        names = list(CONTESTANTS)
        for name in names[turn % 3 :] + names[: turn % 3]:
            child = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--contestant", name], capture_output=True, text=True)
            if child.returncode:
                raise RuntimeError(f"{name}: {child.stderr[-2000:]}")
            found[name].append(json.loads(child.stdout.splitlines()[-1]))
    print("| step of | peak memory, GiB | seconds | of TRL's, each round |\n|---|---|---|---|")
    for name, runs in found.items():
        peak, seconds = (statistics.median(run[key] for run in runs) for key in ("peak", "seconds"))
        ratios = ", ".join(f"{run['seconds'] / base['seconds']:.2f}" for run, base in zip(runs, found["TRL"]))
        print(f"| `{CONTESTANTS[name]}` | {peak / 2**30:.2f} | {seconds:.2f} | {ratios} |")


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

    words = {f"w{i}": i for i in range(options.vocab - 1)} | {"<eos>": options.vocab - 1}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="<eos>", eos_token="<eos>", padding_side="left"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocab, hidden_size=options.width, intermediate_size=2 * options.width, num_hidden_layers=2,
        num_attention_heads=14, num_key_value_heads=2,
        max_position_embeddings=PROMPT + options.length, bos_token_id=None, eos_token_id=options.vocab - 1,
        pad_token_id=options.vocab - 1, tie_word_embeddings=True,
    )  # fmt: skip

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = torch.randint(options.vocab - 1, (len(prompts), PROMPT + options.length)).tolist()
        return {"prompt_ids": [x[:PROMPT] for x in ids], "completion_ids": [x[PROMPT:] for x in ids], "logprobs": None}

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    fused = {} if options.contestant == "TRL" else {"loss_from": options.contestant.replace(" ", "_")}
    base = FusedGRPOTrainer if fused else trl.GRPOTrainer

    class Clocked(base):  # type: ignore[misc, valid-type]
        seconds: list[float] = []

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            loss = super().training_step(*args, **kwargs)
            self.seconds.append(time.perf_counter() - start)
            return loss

    chosen: dict[str, Any] = {"bf16": False} | {name: json.loads(value) for name, value in (x.split("=", 1) for x in options.option)}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Clocked(
            model=transformers.LlamaForCausalLM(config), reward_funcs=reward, processing_class=tokenizer, rollout_func=rollout,
            train_dataset=Dataset.from_dict({"prompt": ["w1"] * 64}), **fused,
            args=trl.GRPOConfig(
                folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, max_steps=options.steps, optim="sgd",
                num_generations=options.batch, per_device_train_batch_size=options.batch, max_completion_length=options.length, **chosen,
            ),
        )  # fmt: skip
        before = status("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        trainer.train()
        return {"peak": status("VmHWM") - before, "seconds": statistics.median(trainer.seconds[1:])}


def status(name: str) -> int:
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
