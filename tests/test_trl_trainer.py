"""FusedGRPOTrainer trains as TRL's GRPOTrainer does: step by step over a grid of its options, over ranks, and over thirty steps.

Another version of TRL than the installed one: PYTHONPATH=<folder> pytest tests/test_trl_trainer.py, after pip install --no-deps --target.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL is an extra")

import transformers
import trl
from datasets import Dataset

import ranks
import trl_steps
from grpo_kernels.integrations.trl import SUPPORTED_VERSIONS, FusedGRPOMixin, FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_kernels.integrations.trl.config import FIELDS
from trl_steps import DEFAULTS, GRID, LOSS_TYPES, OFF_POLICY, applicable, difference, path_of, steps_of, train

ROOT = Path(__file__).resolve().parents[1]
OWN_FALLBACKS = {"1.0.0": {"cast_lm_head_to_fp32", *(name for name in GRID if name.startswith("loss_type=luspo"))}}
ROWS = [name for name in GRID if applicable(GRID[name]) is not None]
FROM_LOGITS = [name for name in ROWS if name in DEFAULTS or name in {f"loss_type={x}" for x in LOSS_TYPES}]
# float32: 2e-5 of a gradient, which a second step carries on. bfloat16 products: each side rounds elsewhere, so this is a sanity bound of
# eight roundings; how near to float32 each comes is a test of its own.
BOUND, HALF_BOUND = 5e-5, 2.0**-5
WORST = {"loss": 0.0, "metrics": 0.0, "parameters": 0.0}


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_worst_differences() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small to be shared
    gc.freeze()  # every run ends in a collection, which looks at all that the imports made
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    print("\nTRL: largest difference in float32:", ", ".join(f"{name} {x:.1e}" for name, x in WORST.items()))


def steps_agree(name: str, folder: Path, loss_from: str) -> None:
    apart, path = steps_of(name, folder, loss_from)
    falls_back = name in OWN_FALLBACKS.get(trl.__version__, ())
    assert path == ("TRL" if falls_back else loss_from.replace("_", " "))
    half = GRID[name].get("bf16", False)
    assert max(apart) <= (HALF_BOUND if half else BOUND), apart
    if not half:
        WORST.update({key: max(WORST[key], value) for key, value in apart._asdict().items()})


@pytest.mark.parametrize("name", ROWS)
def test_steps_are_those_of_trl(name: str, tmp_path: Path) -> None:
    steps_agree(name, tmp_path, "hidden_states")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FROM_LOGITS else pytest.mark.slow) for x in ROWS])
def test_steps_from_logits_are_those_of_trl(name: str, tmp_path: Path) -> None:
    steps_agree(name, tmp_path, "logits")


def test_thirty_steps_have_the_same_rewards(tmp_path: Path) -> None:
    row = {"optim": "adamw_torch", "learning_rate": 1e-2, "per_device_train_batch_size": 8, "num_generations": 4, "beta": 0.01}
    theirs, ours = (train(x, row, tmp_path, steps=30) for x in (trl.GRPOTrainer, FusedGRPOTrainer))
    rewards = [[line["reward"] for line in run.log if "reward" in line] for run in (theirs, ours)]
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-6) and len(rewards[0]) == 30
    assert sum(rewards[0][-5:]) > sum(rewards[0][:5]) + 0.2, "it learns"
    assert path_of(ours.calls) == "hidden states"


@pytest.mark.parametrize(
    ("loss_from", "weights"), [("hidden_states", torch.bfloat16), ("logits", torch.bfloat16), ("logits", torch.float32)]
)
def test_half_precision_reaches_the_kernels(loss_from: str, weights: torch.dtype, tmp_path: Path) -> None:
    """Of the policy and of the reference, whose forwards accelerate wraps: outputs become float32 there."""
    beta = 0.0 if trl.__version__ == "1.0.0" else 0.1  # whose reference is always float32
    row = {"bf16": True, "beta": beta, **OFF_POLICY, "Rollout": True, "Dtype": weights}
    assert train(FusedGRPOTrainer, row, tmp_path, loss_from=loss_from).dtypes == {torch.bfloat16}


@pytest.mark.parametrize("loss_from", ["hidden_states", "logits"])
def test_half_precision_is_as_near_to_float32_as_it_is_in_trl(loss_from: str, tmp_path: Path) -> None:
    row = {"Rollout": True, "beta": 0.1, "loss_type": "grpo"}
    exact, theirs = (train(trl.GRPOTrainer, row | {"bf16": half}, tmp_path) for half in (False, True))
    ours = train(FusedGRPOTrainer, row | {"bf16": True}, tmp_path, loss_from=loss_from)
    own, apart = (difference(exact, run) for run in (theirs, ours))
    assert own.parameters > 1e-3 and apart.parameters <= 2 * own.parameters and apart.metrics <= 2 * own.metrics, (own, apart)


# --- ranks ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_two_ranks_train_as_one(loss_type: str, tmp_path: Path) -> None:
    row = {"loss_type": loss_type, "beta": 0.1, "Rollout": True, "per_device_train_batch_size": 2, **OFF_POLICY}
    alone = train(FusedGRPOTrainer, {**row, "per_device_train_batch_size": 4}, tmp_path)

    def act(rank: int, _: Any) -> Any:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
        for state in (AcceleratorState, GradientState, PartialState):  # of the parent process, where there was one
            state._shared_state.clear()
        runs = [train(x, {**row, "ddp_backend": "gloo"}, tmp_path) for x in (trl.GRPOTrainer, FusedGRPOTrainer)]
        return tuple(difference(*runs)), path_of(runs[1].calls), runs[1].moved

    for apart, path, moved in ranks.on_every_rank(2, tmp_path, act):
        assert path == "hidden states" and max(apart) <= BOUND, apart
        torch.testing.assert_close(moved, alone.moved, rtol=0, atol=BOUND * float(alone.moved.abs().max()))


# --- what is left to TRL ----------------------------------------------------------------------------------------------------------------


def test_every_field_of_the_configuration_is_classified() -> None:
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert fields - FIELDS.keys() == set(), "say in integrations/trl/config.py what each of these is to the loss"
    assert set(FIELDS.values()) == {"used by the loss", "no effect on the loss", "falls back"}


@dataclasses.dataclass
class NewerConfig(trl.GRPOConfig):
    loss_of_tomorrow: float = 0.0


LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "a field that nobody knows": ({"loss_of_tomorrow": 0.5}, "loss_of_tomorrow"),
    "a value that is out of our range": ({"loss_type": "vespo", "vespo_k_pos": -1.0}, "vespo_k_pos"),
    "a negative penalty": ({"beta": -0.1}, "beta"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_served_is_left_to_trl_with_one_warning(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, option = LEFT[name]
    monkeypatch.setattr(trl, "GRPOConfig", NewerConfig)
    theirs = train(trl.GRPOTrainer, row, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = train(FusedGRPOTrainer, row, tmp_path)
    said = [str(w.message) for w in caught if "TRL's own code" in str(w.message)]
    assert len(said) == 1 and option in said[0]
    assert path_of(ours.calls) == "TRL" and max(difference(theirs, ours)) == 0


class OddHead(torch.nn.Linear):
    pass


class OddModel(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + 1
        return outputs


@pytest.mark.parametrize("odd", [OddHead, OddModel])
def test_a_model_whose_logits_cannot_be_followed_is_left_to_trl(odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_of(*args: Any) -> Any:
        model = trl_steps_model_of(*args)
        (model if odd is OddModel else model.lm_head).__class__ = odd
        return model

    trl_steps_model_of = trl_steps.model_of
    monkeypatch.setattr(trl_steps, "model_of", model_of)
    with pytest.warns(UserWarning, match="OddHead" if odd is OddHead else "does more than that"):
        assert path_of(train(FusedGRPOTrainer, {}, tmp_path).calls) == "TRL"


@pytest.mark.parametrize("act", [patch_trl, lambda: FusedGRPOMixin()])
def test_another_version_raises_with_the_list(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    monkeypatch.delitem(vars(sys.modules["grpo_kernels.integrations.trl"]), "FusedGRPOTrainer", raising=False)
    with pytest.raises(RuntimeError, match=re.escape(f"{', '.join(SUPPORTED_VERSIONS)}, installed is 1.17.0")):
        act()


def test_an_unknown_source_raises() -> None:
    with pytest.raises(ValueError, match="loss_from.*hidden_states, logits.*'logit'"):
        FusedGRPOMixin(loss_from="logit")


# --- where it goes ----------------------------------------------------------------------------------------------------------------------


def test_patching_rebinds_the_name_everywhere_and_back() -> None:
    from trl.trainer import grpo_trainer

    original = trl.GRPOTrainer
    try:
        patch_trl()
        patch_trl()
        assert trl.GRPOTrainer is grpo_trainer.GRPOTrainer is FusedGRPOTrainer and issubclass(FusedGRPOTrainer, original)
    finally:
        unpatch_trl()
    assert trl.GRPOTrainer is grpo_trainer.GRPOTrainer is original
    assert FusedGRPOTrainer is not original, "who imported ours by its own name keeps it"


def test_a_subclass_of_a_user_takes_the_mixin(tmp_path: Path) -> None:
    class Mine(trl.GRPOTrainer):
        def _calculate_rewards(self, *args: Any) -> torch.Tensor:
            return 2 * super()._calculate_rewards(*args)

    class MineFused(FusedGRPOMixin, Mine):
        pass

    row = {"scale_rewards": "none"}
    theirs, ours = (train(x, row, tmp_path) for x in (Mine, MineFused))
    assert path_of(ours.calls) == "hidden states" and max(difference(theirs, ours)) <= BOUND


@pytest.mark.parametrize("bf16", [False, True])
def test_one_model_may_have_one_trainer_after_another(bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook; TRL and accelerate leave their patches around its forward."""
    model = trl_steps.model_of()
    monkeypatch.setattr(trl_steps, "model_of", lambda *_: model)
    paths = [path_of(train(x, {"bf16": bf16}, tmp_path, steps=1).calls) for x in (FusedGRPOTrainer, FusedGRPOTrainer, trl.GRPOTrainer)]
    assert paths == ["hidden states", "hidden states", "TRL"]


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"## TRL\n\n```py\n(.*?)```", (ROOT / "docs/trainers.md").read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {
        "model": trl_steps.model_of(),
        "reward_funcs": trl_steps.variety,
        "args": trl.GRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_steps=1, per_device_train_batch_size=4, num_generations=2,
            max_completion_length=4, save_strategy="no",
        ),
        "train_dataset": Dataset.from_dict({"prompt": ["w1 w2", "w3"] * 4}),
        "tokenizer": trl_steps.tokenizer(),
    }  # fmt: skip
    with trl_steps.Calls() as calls:
        exec(block, names)
    assert path_of(calls.counts) == "hidden states" and names["trainer"].state.global_step == 1


def test_importing_the_integration_imports_no_trl() -> None:
    code = "import sys, grpo_kernels.integrations.trl as t; assert 'trl' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


OF_TRL = """
import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def test_it_trains(tmp_path):
    args = GRPOConfig(
        str(tmp_path), per_device_train_batch_size=3, num_generations=3, max_completion_length=8, report_to="none", max_steps=1, beta=0.1,
        learning_rate=0.1,
    )
    trainer = GRPOTrainer(
        model="trl-internal-testing/tiny-Qwen2ForCausalLM-2.5",
        reward_funcs="trl-internal-testing/tiny-Qwen2ForSequenceClassification-2.5",
        args=args,
        train_dataset=load_dataset("trl-internal-testing/zen", "conversational_prompt_only", split="train"),
    )
    before = trainer.model.lm_head.weight.clone()
    trainer.train()
    assert type(trainer).__name__ == "FusedGRPOTrainer" and not torch.equal(before, trainer.model.lm_head.weight)
"""


@pytest.mark.slow
def test_a_test_as_trl_has_them_finds_its_models_and_our_trainer(tmp_path: Path) -> None:
    """What runs TRL's own tests, on one of their kind: theirs are in TRL's repository, not in its packages."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_grpo_trainer.py").write_text(OF_TRL)
    done = subprocess.run([sys.executable, ROOT / "tests" / "trl_own_tests.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.parametrize("version", [x for x in SUPPORTED_VERSIONS if x != trl.__version__])
def test_other_supported_versions(version: str, tmp_path: Path) -> None:
    """This file once more, with that version in front of the installed one (a network is needed)."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, f"trl=={version}", "requests", "urllib3", "idna", "certifi", "charset-normalizer"], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:]
