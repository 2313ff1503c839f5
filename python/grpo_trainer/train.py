"""GRPO in one loop: sample a group of completions a prompt, score them, compare within the group, step.

    for each step:
        completions = generate(prompts)                                    one rollout, num_prompts x num_generations
        advantages  = group_advantages(rewards)                            or, from a reward for each step, process_advantages
        for each pass (num_iterations):
            for each window of micro-batches:
                loss = fused_grpo_loss(logits, ...); backward              normalised over the whole window
                clip the gradient, AdamW, schedule

The value of the loss says nothing (on-policy it is 0 by construction, while its gradient is not), so what is logged is reward, gradient
norm, KL, entropy, clip fractions and lengths. Lines that make the host wait for a GPU say "host sync".
"""

from __future__ import annotations

import math
import os
import shutil
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from grpo_kernels import fused_grpo_loss, group_advantages, grpo_metrics, token_logprobs
from grpo_trainer import checkpoint, report
from grpo_trainer.config import Config, check
from grpo_trainer.rollout import Prompts, Rollout, Sampler
from grpo_trainer.steps import StepScorer, step_advantages
from grpo_trainer.tasks import Problems, Scorer

CHECKPOINTS = "checkpoints"


def train(config: Config, *, resume: bool = False) -> dict[str, Any]:
    """Runs `config` to its last step, from the last checkpoint in its output folder where `resume`; returns the last step's metrics.

    Raises:
        ValueError: a setting, a task, a reward function or a model that cannot work; it names the flag, what came and what was expected.
        RuntimeError: a reward function that raised; a gradient that is not finite (nothing is stepped then).
    """
    check(config)
    output = Path(config.output_dir)
    start_from = checkpoint.latest(output / CHECKPOINTS) if resume else None
    device = config.resolved_device()
    if device.type == "cuda":  # without it, sums in a GPU's own order would make no two runs alike
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    checkpoint.set_seed(config.seed)
    disable_progress_bar()  # of loading and saving: it would break up our own

    # What is quick to check comes before what is slow to load.
    tokenizer = load_tokenizer(start_from or config.model)
    prompts = Prompts(tokenizer, config.system_prompt)
    problems = Problems(config, fits=lambda entry: 0 < len(prompts.ids(entry)) <= config.max_prompt_length)
    scorer = Scorer(config, problems)
    step_scorer = StepScorer(config, tokenizer) if config.supervision == "process" else None
    policy = load_model(start_from or config.model, config, tokenizer)
    reference = load_model(config.model, config, tokenizer).requires_grad_(False) if config.beta > 0 or config.track_kl else None
    sampler = Sampler(policy, tokenizer, config.resolved_dtype())
    windows, arguments = config.windows(), config.loss_arguments()
    optimizer = torch.optim.AdamW(
        policy.parameters(), config.learning_rate, (config.adam_beta1, config.adam_beta2), weight_decay=config.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_factor(config))
    # One optimiser step a rollout samples from the very policy that it trains: the ratio is exactly 1 and needs no old log-probabilities.
    on_policy = config.num_iterations * len(windows) == 1
    progress = {"step": 0, "optimizer_step": 0, "cursor": 0}

    if start_from is not None:
        progress = checkpoint.restore(start_from, optimizer, schedule)
        problems.cursor = progress["cursor"]
        report.forget_after(output, progress["step"])
    else:
        _new_run(output, config, anew=resume or config.overwrite)
        if config.eval_size:
            report.append(output / report.METRICS, [{"step": 0, **_evaluate(sampler, prompts, problems, config, step=0)}])

    bar = tqdm(range(progress["step"] + 1, config.steps + 1), initial=progress["step"], total=config.steps, unit="step", dynamic_ncols=True)
    for step in bar:
        started = time.perf_counter()

        # Sample and score. A group is num_generations neighbouring rows.
        group = config.num_generations
        drawn = problems.take(config.num_prompts)
        entries = [entry for entry in drawn for _ in range(group)]
        prompt_ids = [ids for ids in map(prompts.ids, drawn) for _ in range(group)]
        rollout = sampler.generate(prompt_ids, config.max_completion_length, config.temperature, config.generation_batch_size)
        completions = rollout.completions()
        texts = sampler.texts(completions)
        scored = [prompts.text(entry) for entry in entries], texts, completions, entries
        rewards, each_reward = scorer(*scored)
        if step_scorer is None:
            step_rewards = None
            advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), group, scale_rewards=config.scale_rewards)
        else:
            step_rewards, step_ends = step_scorer(*scored, rewards)
            advantages = step_advantages(step_rewards, step_ends, rollout.completion_ids.shape[1], group)
        advantages = advantages.to(device)

        # Log-probabilities of the policy that sampled and of the reference, on the same micro-batches as the update: the same row in
        # another batch is another sum in the model's matrix products, and the first ratio would not be 1.
        old_logps = {} if on_policy else _logps(policy, sampler, rollout, config)
        ref_logps = {} if reference is None else _logps(reference, sampler, rollout, config)

        sums = StepSums(device)
        for window in windows * config.num_iterations:
            # Normalisers are the whole window's, so neither the split into micro-batches nor a short last window changes a token's weight.
            tokens = sum(_trained_tokens(rollout.rows(rows), config) for rows in window)
            sequences = sum(len(rows) for rows in window)
            for rows in window:
                part = rollout.rows(rows)
                mask = _loss_mask(part, config)
                result = fused_grpo_loss(
                    sampler.logits(policy, part), part.completion_ids, _advantages_of(advantages, rows, part),
                    old_logps=old_logps.get(rows.start), ref_logps=ref_logps.get(rows.start), completion_mask=mask,
                    num_items_in_batch=tokens, num_sequences=sequences, **arguments,
                )  # fmt: skip
                result.loss.backward()
                sums.add(grpo_metrics(result, mask), _trained_tokens(part, config))
            grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm or math.inf)
            if not grad_norm.isfinite():  # host sync, once an optimiser step: better than weights that are NaN from here on
                raise RuntimeError(f"step {step}: the norm of the gradient is {grad_norm.item()}; no weight was changed")
            sums.add_step(grad_norm)
            learning_rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            progress["optimizer_step"] += 1

        seconds = time.perf_counter() - started
        record: dict[str, Any] = {
            "step": step,
            "optimizer_step": progress["optimizer_step"],
            **_reward_statistics(rewards, each_reward, step_rewards, group),
            "length": sum(rollout.completion_lengths) / len(rewards),
            "truncated": sum(rollout.truncated) / len(rewards),
            **sums.means(),  # host sync
            "learning_rate": learning_rate,  # of the last optimiser step
            "tokens_per_second": sum(rollout.completion_lengths) / seconds,
            "seconds": seconds,
        }
        if reference is None:
            record["kl"] = None  # nothing was measured
        progress |= {"step": step, "cursor": problems.cursor}
        bar.set_postfix_str(
            f"reward {record['reward']:.3f}, kl {'-' if record['kl'] is None else format(record['kl'], '.4f')}, "
            f"clip {record['clip_ratio/region_mean']:.3f}, {record['tokens_per_second']:.0f} tokens/s"
        )
        last = step == config.steps
        if config.eval_size and (last or step % config.eval_every == 0):
            record |= _evaluate(sampler, prompts, problems, config, step)
        report.append(output / report.METRICS, [record])
        if last or step % config.eval_every == 0:
            report.picture(output, _title(config))
        if last or step % config.save_every == 0:
            checkpoint.save(output / CHECKPOINTS, config.keep_checkpoints, policy, tokenizer, optimizer, schedule, progress)
    bar.close()
    return report.read(output / report.METRICS)[-1]


class StepSums:
    """Means of a step's metrics over its tokens, summed on the device: the host waits once a step, for all of them."""

    def __init__(self, device: torch.device) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens = 0
        self.steps = 0
        self.grad_norm = torch.zeros((), device=device)

    def add(self, metrics: dict[str, Tensor], tokens: int) -> None:
        self.tokens += tokens
        for name, value in metrics.items():
            before = self.sums.get(name)
            if name.endswith("_min"):
                self.sums[name] = value if before is None else torch.minimum(before, value)
            elif name.endswith("_max"):
                self.sums[name] = value if before is None else torch.maximum(before, value)
            else:
                self.sums[name] = tokens * value + (0 if before is None else before)

    def add_step(self, grad_norm: Tensor) -> None:
        self.grad_norm = self.grad_norm + grad_norm
        self.steps += 1

    def means(self) -> dict[str, float]:
        values = dict(zip(self.sums, torch.stack(list(self.sums.values())).tolist()))
        for name in values:
            if not name.endswith(("_min", "_max")):
                values[name] /= max(self.tokens, 1)
        return values | {"grad_norm": self.grad_norm.item() / self.steps}


def load_tokenizer(source: str | Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises what it meets: OSError, ValueError, KeyError, errors of the hub's client
        raise ValueError(
            f"--model: no tokenizer could be loaded from {str(source)!r}, expected a local folder or a hub name: {error}"
        ) from error


def load_model(source: str | Path, config: Config, tokenizer: Any) -> Any:
    """The model in float32 (arithmetic in --dtype is autocast's), on the device, in eval mode for good.

    Dropout stays off in the update as in sampling: with it, the policy that is trained is not the one that sampled, the first ratio is
    not 1, and the KL to an identical reference is not 0.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation=config.attn_implementation)
    except Exception as error:
        raise ValueError(f"--model: {str(source)!r} cannot be loaded as a causal language model: {error}") from error
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.max_prompt_length + config.max_completion_length > positions:
        raise ValueError(
            f"--max-prompt-length, --max-completion-length: {config.max_prompt_length} + {config.max_completion_length} tokens, "
            f"but {config.model} has {positions} positions"
        )
    known = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > known:
        raise ValueError(f"--model: the tokenizer of {config.model} has {len(tokenizer)} tokens, its model only {known}")
    for parameter in model.parameters():  # out of the mapped file, whose alignment would otherwise decide which kernels run
        parameter.data = parameter.data.clone()
    return model.to(config.resolved_device()).eval()


def _learning_rate_factor(config: Config) -> Any:
    total = config.steps * config.num_iterations * len(config.windows())

    def factor(optimizer_step: int) -> float:
        if optimizer_step < config.warmup_steps:
            return (optimizer_step + 1) / config.warmup_steps
        done = (optimizer_step - config.warmup_steps) / max(total - config.warmup_steps, 1)
        return {"constant": 1.0, "linear": max(1 - done, 0.0), "cosine": 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))}[config.lr_schedule]

    return factor


@torch.no_grad()
def _logps(model: Any, sampler: Sampler, rollout: Rollout, config: Config) -> dict[int, Tensor]:
    """Log-probabilities of the sampled tokens under `model`, by the first row of each micro-batch."""
    result = {}
    for rows in config.micro_batches():
        part = rollout.rows(rows)
        logits = sampler.logits(model, part)
        result[rows.start] = token_logprobs(logits, part.completion_ids, temperature=config.temperature, mask=_loss_mask(part, config))
    return result


def _advantages_of(advantages: Tensor, rows: range, part: Rollout) -> Tensor:
    """(B,), or (B, T) without the padding columns that `part` does not have either."""
    block = advantages[rows.start : rows.stop]
    return block if block.dim() == 1 else block[:, : part.completion_ids.shape[1]]


def _loss_mask(rollout: Rollout, config: Config) -> Tensor:
    mask = rollout.completion_mask()
    if config.mask_truncated:
        mask = mask & ~torch.tensor(rollout.truncated, device=mask.device)[:, None]
    return mask


def _trained_tokens(rollout: Rollout, config: Config) -> int:
    """The sum of `_loss_mask`, known without asking the device."""
    return sum(
        length for length, truncated in zip(rollout.completion_lengths, rollout.truncated) if not (truncated and config.mask_truncated)
    )


def _reward_statistics(
    rewards: list[float], each: dict[str, list[float]], steps: list[list[float]] | None, num_generations: int
) -> dict[str, float]:
    compared = [[reward] for reward in rewards] if steps is None else steps
    pools = [list(chain(*compared[start : start + num_generations])) for start in range(0, len(rewards), num_generations)]
    values = torch.tensor(rewards, dtype=torch.float64)
    statistics = {
        "reward": values.mean().item(),
        "reward_std": values.std().item(),
        # groups that teach nothing: all right, or all wrong
        "zero_std_groups": sum(len(set(pool)) < 2 for pool in pools) / len(pools),
    }
    if steps is not None:
        statistics |= {"step_reward": sum(chain(*steps)) / max(sum(map(len, steps)), 1), "steps": sum(map(len, steps)) / len(steps)}
    if len(each) > 1:
        statistics |= {f"reward/{name}": sum(scores) / len(scores) for name, scores in each.items()}
    return statistics


def _evaluate(sampler: Sampler, prompts: Prompts, problems: Problems, config: Config, step: int) -> dict[str, float]:
    """Greedy answers to the held-out problems; an answer is right where the task's own score is 1. Draws no random number."""
    size = config.generation_batch_size or config.completions_a_step()
    texts: list[str] = []
    lengths: list[int] = []
    for start in range(0, len(problems.held_out), size):
        entries = problems.held_out[start : start + size]
        rollout = sampler.generate([prompts.ids(entry) for entry in entries], config.max_completion_length, None)
        texts += sampler.texts(rollout.completions())
        lengths += rollout.completion_lengths
    scores = problems.verify(texts, problems.held_out)
    report.append(
        Path(config.output_dir) / report.EVALUATIONS,
        (
            {"step": step, "question": entry["question"], "answer": entry["answer"], "completion": text, "score": score}
            for entry, text, score in zip(problems.held_out, texts, scores)
        ),
    )
    count = len(texts)
    return {
        "accuracy": sum(score == 1 for score in scores) / count,
        "worked": sum(map(is_worked, texts)) / count,
        "eval_length": sum(lengths) / count,
    }


def is_worked(completion: str) -> bool:
    """Whether something stands before </think>."""
    before, tag, _ = completion.partition("</think>")
    return bool(tag and before.replace("<think>", "").strip())


def _new_run(output: Path, config: Config, anew: bool) -> None:
    if (output / "config.json").exists() and not anew:
        raise ValueError(
            f"--output-dir: {output} holds a run; continue it with --resume {output}, start anew with --overwrite, or name another folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)
    for name in (report.METRICS, report.EVALUATIONS, report.PICTURE):
        (output / name).unlink(missing_ok=True)
    config.save(output)


def _title(config: Config) -> str:
    options = ", ".join(f"{name} {value}" for name, value in config.task_options.items())
    model = "the demo's model" if config.demo else Path(config.model).name
    return f"{model} on {Path(config.task).name}" + (f" ({options})" if options else "")
