"""The command line: `grpo-train` or `python -m grpo_trainer`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

# Before torch loads OpenMP. Threads that spin while they wait cost a busy machine everything: a step of the demo took 1,600 to 3,100 ms
# where others used the two cores as well, and 160 ms with threads that sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from grpo_trainer.config import DEMO, PROCESS_DEMO, QUICK_DEMO, Config, flag, parser

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: list[str] | None = None) -> None:
    command = parser()
    given = vars(command.parse_args(arguments))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if not given:
        command.error("nothing to do: give --model and --task, or --demo, or --resume OUTPUT_DIR (--help lists all flags)")
    folder = given.pop("resume", None)
    if folder is not None:
        if not (Path(folder) / "config.json").is_file():
            command.error(f"argument --resume: {folder} holds no run (no config.json there)")
        given = Config.load(Path(folder)) | given | {"output_dir": folder}
    elif given.get("demo"):
        for name in ("model", "task"):
            if name in given:
                command.error(f"argument {flag(name)}: the demo brings its own")
        steps = PROCESS_DEMO if given.get("supervision") == "process" else {}
        given = (QUICK_DEMO if given.get("quick") else DEMO) | steps | given
    elif given.get("quick"):
        command.error("argument --quick: goes with --demo")
    config, resume = Config(**given), folder is not None

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prompts are short; its threads would only warn about forks
    signal.signal(signal.SIGTERM, _interrupt)  # what batch systems send before they kill
    try:
        # Imported here: transformers takes seconds, and --help and a wrong flag should not wait for it.
        if config.demo:
            from grpo_trainer.demo import run

            run(config, resume=resume)
        else:
            from grpo_trainer.train import train

            record = train(config, resume=resume)
            print(f"\nstep {record['step']}: reward {record['reward']:.3f}" + _accuracy(record) + f"; all of it in {config.output_dir}")
    except BaseException as error:
        if _interrupted(error):
            print(f"\ninterrupted. {how_to_resume(config)}", file=sys.stderr)
            sys.exit(INTERRUPTED)
        if isinstance(error, ValueError):
            print(f"grpo-train: error: {error}", file=sys.stderr)
            sys.exit(2)
        print(f"\nstopped by an error. {how_to_resume(config)}", file=sys.stderr)
        raise


def how_to_resume(config: Config) -> str:
    from grpo_trainer import checkpoint

    output = Path(config.output_dir)
    if not (output / "config.json").exists():
        return "Nothing was written yet."
    last = checkpoint.latest(output / "checkpoints") or checkpoint.latest(output / "warmup")
    kept = f"Kept: everything up to {last}." if last else "There is no checkpoint yet (--save-every), so it will start from the beginning."
    return f"{kept} Continue with: grpo-train --resume {output}"


def _accuracy(record: dict[str, Any]) -> str:
    return f", held-out accuracy {record['accuracy']:.1%}" if "accuracy" in record else ""


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _interrupted(error: BaseException | None) -> bool:
    """Whether a KeyboardInterrupt is behind it: one that arrives while a compiled module is imported comes out as an ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    main()
