"""The demo: a model of 0.7 million parameters, made from nothing on a CPU, learns to show its work.

A supervised warm-up on reasoning-gym's `chain_sum` gives a fresh Llama both ways of answering: first the sum worked term by term between
<think> tags, then mostly the number alone. It leaves a model that can work and usually does not. Then GRPO, which hears nothing but
reasoning-gym's verifier, finds the worked samples right more often, and makes them the habit.
"""

from __future__ import annotations

import json
import platform
import random
import shutil
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from grpo_trainer import checkpoint, report
from grpo_trainer.config import Config, check
from grpo_trainer.tasks import Entry, Problems
from grpo_trainer.train import CHECKPOINTS, train

WARMUP = "warmup"
SUMMARY = "summary.json"

# Warm-up. The order matters: mixed from the start, the model learns to sum all terms at once for both kinds, and worked answers are hardly
# better than bare ones (80 % and 67 % after 900 steps, half and half, 4 to 6 terms): nothing for GRPO to find.
STEPS, QUICK_STEPS = 800, 20
BATCH = 32
LEARNING_RATE = 2e-3  # rises over 50 steps, then falls to 0: the bare answers come when it is low and leave the rest as it is
WORKED_ONLY = 0.8  # of the steps; after that a share of
WORKED_SHARE = 0.3  # of the examples
FIRST_PROBLEM = 5_000_000  # the warm-up's problems; GRPO's begin at 0, so they are fresh


def run(config: Config, *, resume: bool = False) -> None:
    """Warm-up, GRPO, table, picture, summary.json; every figure is the verifier's on the held-out problems."""
    check(replace(config, model=WARMUP))  # before minutes of warm-up, and before an older run is deleted
    started = time.perf_counter()
    # What it was measured with. More threads wait for each other over products this small, and other sums make other bits.
    torch.set_num_threads(min(torch.get_num_threads(), 2))
    output = Path(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if not resume:
        for folder in (WARMUP, CHECKPOINTS):
            shutil.rmtree(output / folder, ignore_errors=True)
        (output / SUMMARY).unlink(missing_ok=True)
    config.save(output)
    model = warm_up(config, output / WARMUP)
    print("GRPO: from here on only the verifier's score of its own samples", file=sys.stderr)
    train(replace(config, model=str(model)), resume=True)  # from the last checkpoint, or from the warm model where there is none

    before, *_, after = (record for record in report.read(output / report.METRICS) if "accuracy" in record)
    summary = {
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "worked_before": before["worked"],
        "worked_after": after["worked"],
        "held_out_problems": config.eval_size,
        "seconds": round(time.perf_counter() - started, 1),
        "resumed": resume,
        "seed": config.seed,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("grpo-kernels", "torch", "transformers", "tokenizers", "reasoning-gym", "numpy")},
        },
        "threads": torch.get_num_threads(),
    }
    (output / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    print(table(report.read(output / report.EVALUATIONS), before, after))
    print(f"\n{summary['seconds']:.0f} s in all. Picture: {output / report.PICTURE}   Figures: {output / SUMMARY}")


def warm_up(config: Config, folder: Path) -> Path:
    """Supervised training of a fresh model on examples of both kinds; returns its folder. Resumes exactly, as `train` does."""
    steps = QUICK_STEPS if config.quick else STEPS
    checkpoint.set_seed(config.seed)
    disable_progress_bar()
    tokenizer = make_tokenizer()
    problems = Problems(config, fits=lambda entry: True)
    problems.cursor = FIRST_PROBLEM
    last = checkpoint.latest(folder)
    model = make_model(len(tokenizer)) if last is None else LlamaForCausalLM.from_pretrained(last, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.99), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 - step / steps))
    done = 0
    if last is not None:
        progress = checkpoint.restore(last, optimizer, schedule)
        done, problems.cursor = progress["step"], progress["cursor"]
    bar = tqdm(range(done + 1, steps + 1), initial=done, total=steps, unit="step", desc="warm-up", dynamic_ncols=True)
    for step in bar:
        share = 1.0 if step <= WORKED_ONLY * steps else WORKED_SHARE
        ids, labels = batch(tokenizer, problems.take(BATCH), share)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            bar.set_postfix_str(f"loss {loss.item():.3f}")
        if step % 100 == 0 or step == steps:
            last = checkpoint.save(folder, 1, model, tokenizer, optimizer, schedule, {"step": step, "cursor": problems.cursor})
    bar.close()
    assert last is not None
    return last


def make_tokenizer() -> Any:
    """Words, signs, tags and whole numbers, each with the blank before it, so that decoding gives back the text.

    Whole numbers, so that a step of work is one look-up: 76 % right (4 to 6 terms) after 600 steps of 32 worked examples. Digits, with the
    running sums alone, reached 40 % after 600 steps of 64.
    """
    words = ["State", "the", "final", "answer", "to", "the", "following", "arithmetic", "problem:"]
    tokens = ["<pad>", "<eos>", "<unk>", "State", *(f" {word}" for word in words[1:])]
    tokens += ["<think>", " </think>", "<answer>", " <answer>", " </answer>", " +", " -", " ="]
    tokens += [f" {number}" for number in range(-99, 100)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" -?\d+| ?[^\s\d]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_model(vocabulary: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
            initializer_range=0.06,  # the usual 0.02, with tied embeddings, was 100 to 200 steps behind
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def example(entry: Entry, worked_share: float) -> str:
    """A right answer to a problem, worked with that probability."""
    answer = f"<answer> {entry['answer']} </answer>"
    if random.random() >= worked_share:
        return answer
    return f"<think> {' '.join(work(entry['metadata']['expression']))} </think> {answer}"


def work(expression: str) -> list[str]:
    """The running sums of "6 - 2 - 0": "6 - 2 =", "4 - 0 =", "4"."""
    total, *rest = expression.split()
    steps = []
    for sign, term in zip(rest[::2], rest[1::2]):
        steps.append(f"{total} {sign} {term} =")
        total = str(int(total) + int(sign + term))
    return [*steps, total]


def running_sums(steps: list[list[str]], rewards: list[float], metadata: list[dict[str, Any]], **_: Any) -> list[list[float]]:
    """Step rewards of work split at "=": 1 for each step whose sum so far is right and whose term is the problem's next, else 0.

    An answer's last step, its final sum and what stands in the answer tags, has the reward of the whole answer: the verifier's.
    A step beyond those that the problem has is wrong, so that none can be won by adding 0.
    """
    result = []
    for of_answer, reward, problem in zip(steps, rewards, metadata):
        right = work(problem["expression"])[:-1]
        done = [" ".join(step.removeprefix("<think>").split()) for step in of_answer[:-1]]
        result.append([float(index < len(right) and step == right[index]) for index, step in enumerate(done)] + [reward] * bool(of_answer))
    return result


def batch(tokenizer: Any, entries: list[Entry], worked_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels (B, L), padded on the right; only the answer and the end token after it are learned."""
    prompts = tokenizer([entry["question"] for entry in entries])["input_ids"]
    answers = [ids + [tokenizer.eos_token_id] for ids in tokenizer([example(entry, worked_share) for entry in entries])["input_ids"]]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers))
    ids, labels = torch.full((2, len(entries), width), tokenizer.pad_token_id)
    labels.fill_(-100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def table(evaluations: list[dict[str, Any]], before: dict[str, Any], after: dict[str, Any], shown: int = 5) -> str:
    """The first few held-out problems, not chosen ones, with the answers of the first and the last evaluation; then the figures."""
    lines = ["", f"The first {shown} held-out problems, before and after GRPO", ""]
    answers = [[record for record in evaluations if record["step"] == of["step"]][:shown] for of in (before, after)]
    for old, new in zip(*answers):
        lines.append(f"  {old['question'].partition(': ')[2]} {old['answer']}")
        for name, record in (("before", old), ("after", new)):
            lines.append(f"    {name:7} {'right' if record['score'] == 1 else 'wrong'}  {record['completion']}")
    lines += ["", f"  {'all held-out problems, greedy':32} {'before':>10} {'after':>10}"]
    for label, key, form in (
        ("right answers (verifier)", "accuracy", "10.1%"),
        ("worked answers", "worked", "10.1%"),
        ("tokens an answer", "eval_length", "10.1f"),
    ):
        lines.append(f"  {label:32} {before[key]:{form}} {after[key]:{form}}")
    return "\n".join(lines)
