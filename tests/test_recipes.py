"""The recipes of docs/trainers.md, extracted and run as they stand, beside a textbook loss in the same places: same parameters after it.

A block ends up in the namespace that the text before it describes; the models are small ones made from a configuration.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ranks import on_every_rank
from sweeps import Sweeps

transformers = pytest.importorskip("transformers")

PAGE = (Path(__file__).resolve().parents[1] / "docs/trainers.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in PAGE.split("\n## ")[1:]}
RECIPES = {title: blocks for title, text in SECTIONS.items() if (blocks := re.findall(r"```py\n(.*?)```", text, flags=re.DOTALL))}
VOCAB, B, P, T = 61, 4, 3, 6
LENGTHS = torch.tensor([6, 2, 5, 3])


def run(title: str, **namespace: Any) -> dict[str, Any]:
    """The recipe's block with these names, and what it leaves behind."""
    (block,) = RECIPES[title]
    namespace["__name__"] = "recipe"
    exec(compile(block, f"docs/trainers.md, {title}", "exec"), namespace)
    return namespace


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def made() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


@pytest.fixture
def model(made: Any) -> Any:
    return copy.deepcopy(made)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def rollout(seed: int = 0, lengths: Tensor = LENGTHS) -> dict[str, Tensor]:
    g, rows = torch.Generator().manual_seed(seed), len(lengths)
    prompt_mask = (torch.arange(P) >= torch.tensor([0, 1, 2, 0])[:rows, None]).long()
    completion_mask = (torch.arange(T) < lengths[:, None]).long()
    prompt_ids, completion_ids = (torch.randint(VOCAB, (rows, n), generator=g) for n in (P, T))
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "input_ids": torch.cat([prompt_ids, completion_ids], 1),
        "attention_mask": torch.cat([prompt_mask, completion_mask], 1),
        "rewards": torch.tensor([1.0, 0.0, 0.0, 1.0])[:rows],
        "advantages": torch.randn(rows, generator=g),
    }


def forward_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `Policy.forward` and the FSDP2 loop take."""
    return {name: batch[name] for name in ("input_ids", "attention_mask", "completion_ids", "completion_mask", "advantages")}


def textbook(
    logits: Tensor, ids: Tensor, advantages: Tensor, mask: Tensor, *, old: Tensor | None = None, factor: Tensor | float = 1.0,
    temperature: float = 1.0, epsilon_high: float = 0.2, tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, log-probs): the clipped loss from logits (B, T, V), means of sequences or, with a count, a sum over tokens divided by it."""
    logps = (logits.float() / temperature).log_softmax(-1).gather(-1, ids.clamp(min=0)[..., None])[..., 0]
    ratio = (logps - (logps.detach() if old is None else old)).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1 + epsilon_high) * advantages[:, None])
    terms = torch.where(mask != 0, -gain * factor, 0)
    lengths = mask.sum(-1).clamp(min=1)
    return (terms.sum(-1) / lengths).mean() if tokens is None else terms.sum() / tokens, logps


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, P - 1 : -1]


def same_training(mine: Any, theirs: Any, start: Any, tolerance: float = 1e-4) -> None:
    """Both moved, and to the same place, to a fraction of the way."""
    parameters = [torch.cat([x.detach().flatten() for x in model.parameters()]) for model in (mine, theirs, start)]
    way = (parameters[1] - parameters[2]).norm()
    assert way > 1e-3
    assert (parameters[0] - parameters[1]).norm() < tolerance * way


# --- the page


def test_the_page_has_its_recipes_and_they_are_short() -> None:
    assert {"A hand-written loop", "transformers.Trainer", "Accelerate", "FSDP2", "Packed sequences", "Rollouts by an engine"} <= set(
        RECIPES
    )
    for title, blocks in RECIPES.items():
        for block in blocks:
            lines = [line for line in block.splitlines() if line.strip() and not re.match(r"\s*(import|from) ", line)]
            assert len(lines) <= 22, title


@pytest.mark.parametrize("title", ["A hand-written loop", "transformers.Trainer", "Accelerate", "FSDP2", "Packed sequences", "verl"])
def test_every_section_says_what_changes(title: str) -> None:
    assert "What changes:" in SECTIONS[title]


# --- the recipes


def test_a_hand_written_loop(model: Any, made: Any) -> None:
    rollouts = [rollout(0), rollout(1)]
    run("A hand-written loop", model=model, optimizer=sgd(model.parameters()), rollouts=rollouts)
    other = copy.deepcopy(made)
    optimizer = sgd(other.parameters())
    for batch in rollouts:
        advantages = (batch["rewards"] - batch["rewards"].mean()) / (batch["rewards"].std() + 1e-4)
        old = None
        for _ in range(2):
            loss, logps = textbook(
                logits_of(other, batch), batch["completion_ids"], advantages, batch["completion_mask"],
                old=old, temperature=0.9, epsilon_high=0.28,
            )  # fmt: skip
            old = logps.detach() if old is None else old
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    same_training(model, other, made)


class Rows(torch.utils.data.Dataset):
    """Sequences with labels, for the Trainer."""

    def __init__(self, count: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.rows = []
        for i in range(count):
            ids = torch.randint(VOCAB, (P + T,), generator=g)
            labels = torch.where((torch.arange(P + T) >= P) & (torch.arange(P + T) < P + 1 + i % T), ids, -100)
            self.rows.append(
                {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "advantages": torch.randn((), generator=g)}
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


def trained(trainer: type, model: Any, folder: Path, batch: int, accumulation: int, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, num_train_epochs=1, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0, remove_unused_columns=False, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no", **options,
    )  # fmt: skip
    trainer(model=model, args=args, train_dataset=Rows(16)).train()
    return model


def test_the_trainer_of_transformers(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    recipe = run("transformers.Trainer", transformers=transformers)["GRPOTrainer"]

    class Textbook(transformers.Trainer):  # type: ignore[name-defined, misc]
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
            labels = inputs["labels"][:, 1:]
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            return textbook(logits, labels, inputs["advantages"], labels != -100, tokens=num_items_in_batch)[0]

    theirs = trained(Textbook, copy.deepcopy(made), tmp_path, 4, 1)
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        same_training(trained(recipe, copy.deepcopy(made), tmp_path, batch, accumulation), theirs, made)


def test_the_trainer_evaluates(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    recipe = run("transformers.Trainer", transformers=transformers)["GRPOTrainer"]
    args = transformers.TrainingArguments(str(tmp_path), remove_unused_columns=False, report_to="none", use_cpu=True, disable_tqdm=True)
    result = recipe(model=copy.deepcopy(made), args=args, eval_dataset=Rows(4)).evaluate()
    assert result["eval_loss"] == result["eval_loss"]


@pytest.fixture
def accelerator() -> Iterator[Any]:
    state = pytest.importorskip("accelerate.state")
    accelerate = pytest.importorskip("accelerate")

    def reset() -> None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

    reset()
    yield accelerate.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
    reset()


def test_accelerate_and_bfloat16_stays_bfloat16(accelerator: Any, model: Any, made: Any) -> None:
    steps = [[rollout(0), rollout(1, torch.tensor([1, 6, 0, 2]))], [rollout(2), rollout(3)]]
    with Sweeps() as sweeps:
        run(
            "Accelerate", model=model, optimizer=sgd(model.parameters()), accelerator=accelerator,
            steps=[[forward_of(batch) for batch in step] for step in steps],
        )  # fmt: skip
    assert sweeps.dtypes == {torch.bfloat16} and set(sweeps.counts) == {"loss_and_grad_", "scale_"}
    other = copy.deepcopy(made)
    optimizer = sgd(other.parameters())
    for step in steps:
        tokens = sum(batch["completion_mask"].sum() for batch in step)
        for batch in step:
            with torch.autocast("cpu", torch.bfloat16):
                logits = logits_of(other, batch)
            textbook(logits, batch["completion_ids"], batch["advantages"], batch["completion_mask"], tokens=tokens)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    same_training(model, other, made, tolerance=2e-2)  # bfloat16 keeps 8 bits
    assert accelerator.prepare(copy.deepcopy(made))(**inputs_of(steps[0][0])).logits.dtype == torch.float32, "the trap of the page is gone"


def inputs_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.serial
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 has no FSDP2 on a CPU")
def test_fsdp2_on_two_ranks_is_one_process_with_everything(made: Any, tmp_path: Path) -> None:
    # unequal in every way: one rank has few tokens, and a micro-batch without any
    shards = [
        [[rollout(0), rollout(1)], [rollout(2), rollout(3)]],
        [
            [rollout(4, torch.tensor([1, 0, 0, 2])), rollout(5, torch.tensor([0, 0, 0, 0]))],
            [rollout(6), rollout(7, torch.tensor([6, 6, 1, 1]))],
        ],
    ]

    def act(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        train = run("FSDP2")["train"]
        model = copy.deepcopy(made)
        train(model, sgd, [[forward_of(batch) for batch in step] for step in shards[rank]])
        return {name: x.full_tensor().detach() for name, x in model.named_parameters()}

    results = on_every_rank(2, tmp_path, act)
    other = copy.deepcopy(made)
    optimizer = sgd(other.parameters())
    for step in zip(*shards):
        batches = [batch for micro_batches in step for batch in micro_batches]
        tokens = sum(batch["completion_mask"].sum() for batch in batches)
        for batch in batches:
            loss = textbook(logits_of(other, batch), batch["completion_ids"], batch["advantages"], batch["completion_mask"], tokens=tokens)[
                0
            ]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in results:
        mine = copy.deepcopy(made)
        mine.load_state_dict(rank, strict=False)
        same_training(mine, other, made)


def test_packed_sequences(model: Any, made: Any) -> None:
    g = torch.Generator().manual_seed(0)
    prompt_lengths, lengths = [2, 1, 3], [5, 1, 4]
    sequences = [torch.randint(VOCAB, (p + n,), generator=g) for p, n in zip(prompt_lengths, lengths)]
    advantages = torch.tensor([1.0, -0.5, 0.7])
    left = run("Packed sequences", model=model, sequences=sequences, prompt_lengths=prompt_lengths, advantages=advantages)
    other, start = copy.deepcopy(made), 0
    for ids, p, n, advantage in zip(sequences, prompt_lengths, lengths, advantages):
        logits = other(input_ids=ids[None]).logits[:, p - 1 : -1]
        loss, logps = textbook(logits, ids[None, p:], advantage[None], torch.ones(1, n), temperature=0.9)
        (loss / 3).backward()
        torch.testing.assert_close(left["out"].logps[start + p - 1 : start + p + n - 1], logps[0].detach(), rtol=1e-5, atol=1e-5)
        start += p + n
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_rollouts_by_an_engine(
    model: Any, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    batch, g = rollout(0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        _, exact = textbook(logits_of(made, batch), batch["completion_ids"], torch.zeros(B), batch["completion_mask"], temperature=0.9)
    engine = exact + 0.6 * torch.randn(B, T, generator=g)  # what kernels of another engine make of the same weights, and more
    lines = [
        {
            "prompt_ids": batch["prompt_ids"][i][batch["prompt_mask"][i] != 0].tolist(),
            "completion_ids": batch["completion_ids"][i, :n].tolist(),
            "logprobs": engine[i, :n].tolist(),
            "reward": batch["rewards"][i].item(),
        }
        for i, n in enumerate(LENGTHS.tolist())
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    left = run("Rollouts by an engine", score=scorer(model), optimizer=sgd(model.parameters()))

    other = copy.deepcopy(made)
    optimizer = sgd(other.parameters())
    advantages = (batch["rewards"] - batch["rewards"].mean()) / (batch["rewards"].std() + 1e-4)
    factor = (exact - engine).exp().clamp(max=2.0)
    assert ((factor == 2) & (batch["completion_mask"] != 0)).any()
    for _ in range(2):
        loss, _ = textbook(
            logits_of(other, batch), batch["completion_ids"], advantages, batch["completion_mask"],
            old=exact, factor=factor, temperature=0.9,
        )  # fmt: skip
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    same_training(model, other, made)
    kept = (exact - engine)[batch["completion_mask"] != 0]
    assert left["correction"].mismatch_kl.item() == pytest.approx((kept.exp() - 1 - kept).mean().item(), rel=1e-3)
    assert f"{left['correction'].mismatch_kl:.2e}" in capsys.readouterr().out


def scorer(model: Any) -> Callable[[list[list[int]], list[list[int]]], tuple[Tensor, Tensor, Tensor]]:
    def score(prompts: list[list[int]], completions: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
        width = max(map(len, prompts))
        prompt_ids = torch.tensor([[0] * (width - len(x)) + x for x in prompts])
        prompt_mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts])
        completion_ids = pad_sequence([torch.tensor(x) for x in completions], batch_first=True)
        mask = pad_sequence([torch.ones(len(x), dtype=torch.long) for x in completions], batch_first=True)
        logits = model(
            input_ids=torch.cat([prompt_ids, completion_ids], 1), attention_mask=torch.cat([prompt_mask, mask], 1),
            logits_to_keep=completion_ids.shape[1] + 1,
        ).logits  # fmt: skip
        return logits, completion_ids, mask

    return score
