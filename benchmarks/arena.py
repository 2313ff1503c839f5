"""One case (shape and dtype) with its tensors, and the contests that are held on it.

What is timed: forward is the log-probs under no_grad; forward + backward ends when the gradient reaches the logits, which are an
intermediate result as a model's are, not a leaf. Outside the clock: making tensors, refilling logits that were turned into their gradient
(so that no round works on the gradient of a gradient, whose subnormals would be slow), and freeing the last gradient.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks import contest, isa
from benchmarks.contest import Clocked, Contest, Contestant, Turn, clock
from benchmarks.implementations import FORWARD, FORWARD_BACKWARD, IMPLEMENTATIONS, Implementation, Missing, trl_source
from benchmarks.inputs import Answer, Case, Inputs, WrongAnswer, check
from benchmarks.traffic import Traffic

ROOFLINE = "mul_"  # logits.mul_(1.0): one read and one write of the logits, and nothing else
ROUNDS = {"tiny": 5, "smoke": 9, "full": 7}
THREADS = (1, 2)
PEERS = ("liger", "trl_chunked", "verl")  # whom ratios are given to besides naive and the compiler

# contest -> its contestants' names, known before anything runs
NAMES = {
    "forward": [*FORWARD, ROOFLINE],
    "forward_backward": [*FORWARD_BACKWARD, ROOFLINE],
    "half_masked": ["forward-all", "forward-half", "inplace-all", "inplace-half"],
    "threads": [f"{what}-{count}" for what in ("forward", "inplace") for count in THREADS],
    "instruction_sets": [f"{what}-{name}" for what in ("forward", "inplace") for name in isa.NAMES],
}


class _Logits(torch.autograd.Function):
    """The end of a model: storage that is not a leaf, not a view, and requires grad; what flows back into it goes to `arrived`."""

    @staticmethod
    def forward(ctx, anchor, storage, arrived):  # type: ignore[no-untyped-def]
        ctx.arrived = arrived
        alias = torch.empty(0, dtype=storage.dtype, device=storage.device)
        return alias.set_(storage.untyped_storage(), 0, storage.shape, storage.stride())

    @staticmethod
    def backward(ctx, dlogits):  # type: ignore[no-untyped-def]
        ctx.arrived.append(dlogits)
        return None, None, None


Play = Callable[[Implementation, "AbstractContextManager[object]"], "tuple[Clocked, Answer]"]


class Arena:
    roofline = ROOFLINE

    def __init__(self, case: Case, implementations: dict[str, Implementation] = IMPLEMENTATIONS) -> None:
        self.case, self.implementations = case, implementations
        self.inputs = Inputs.make(case)
        self.scratch = self.inputs.logits.clone()  # what in-place contestants overwrite
        self._contests: dict[str, Contest] = {}

    def contest(self, kind: str, names: Iterable[str], verify_only: bool = False) -> Contest:
        """The contest of that kind among `names` and those they are compared with; held once, when first asked for."""
        rounds = 0 if verify_only else ROUNDS[self.case.size]
        if kind not in self._contests:
            with isa.Children(self.case) if kind == "instruction_sets" else nullcontext() as children:
                everybody = getattr(self, f"_{kind}")(*([children] if children else []))
                keep = {self.roofline}.union(*((name, everybody[name].baseline) for name in names))
                self._contests[kind] = contest.run({name: one for name, one in everybody.items() if name in keep}, rounds)
        return self._contests[kind]

    # -- the contests

    def _forward(self) -> dict[str, Contestant]:
        return {name: self.scores(name) for name in FORWARD} | {ROOFLINE: self._roofline()}

    def _forward_backward(self) -> dict[str, Contestant]:
        return {name: self.trains(name) for name in FORWARD_BACKWARD} | {ROOFLINE: self._roofline()}

    def _half_masked(self) -> dict[str, Contestant]:
        """Masked rows are not read, and their gradient is written as zeros."""
        half = self.inputs.half_masked()
        return {
            "forward-all": self.scores("ours", baseline="forward-all"),
            "forward-half": self.scores("ours", half, baseline="forward-all"),
            "inplace-all": self.trains("ours_inplace", baseline="inplace-all"),
            "inplace-half": self.trains("ours_inplace", half, baseline="inplace-all"),
        }

    def _threads(self) -> dict[str, Contestant]:
        return {
            f"{what}-{threads}": _on_threads(threads, one(name, baseline=f"{what}-1"))
            for what, one, name in (("forward", self.scores, "ours"), ("inplace", self.trains, "ours_inplace"))
            for threads in THREADS
        }

    def _instruction_sets(self, children: isa.Children) -> dict[str, Contestant]:
        return {
            f"{what}-{name}": Contestant(functools.partial(children.enter, what, name), f"{what}-{isa.NAMES[0]}")
            for what in ("forward", "inplace")
            for name in isa.NAMES
        }

    # -- the contestants

    def scores(self, name: str, inputs: Inputs | None = None, baseline: str = "naive") -> Contestant:
        """Log-probs under no_grad."""
        inputs = inputs or self.inputs

        def play(implementation: Implementation, around: AbstractContextManager[object]) -> tuple[Clocked, Answer]:
            logits = self._storage(implementation, inputs)
            with torch.no_grad(), around:
                clocked = clock(lambda: implementation.logps(logits, inputs), self.case.device)
            return clocked, Answer(logps=clocked.result)

        return self._contestant(name, inputs, baseline, writes=0, play=play)

    def trains(self, name: str, inputs: Inputs | None = None, baseline: str = "naive") -> Contestant:
        """Loss, and its gradient back at the logits."""
        inputs = inputs or self.inputs
        anchor = torch.zeros((), requires_grad=True)

        def play(implementation: Implementation, around: AbstractContextManager[object]) -> tuple[Clocked, Answer]:
            arrived: list[Tensor] = []
            storage = self._storage(implementation, inputs)
            logits = _Logits.apply(anchor, storage, arrived)

            def step() -> Tensor:
                loss = implementation.loss(logits, inputs)
                loss.backward()
                return loss.detach()

            with around:
                clocked = clock(step, self.case.device)
            if implementation.overwrites and arrived[0].data_ptr() != storage.data_ptr():
                raise WrongAnswer("dlogits: not in the logits' own storage")
            return clocked, Answer(loss=clocked.result, dlogits=arrived[0][:, : self.case.time])

        return self._contestant(name, inputs, baseline, writes=1, play=play)

    def _storage(self, implementation: Implementation, inputs: Inputs) -> Tensor:
        """What its logits are for one turn: the inputs' own, or a copy that is filled again."""
        if implementation.spare:
            self._scratch_with_spare[:, :-1].copy_(inputs.logits)
            return self._scratch_with_spare
        return self.scratch.copy_(inputs.logits) if implementation.overwrites else inputs.logits

    @functools.cached_property
    def _scratch_with_spare(self) -> Tensor:
        return self.inputs.logits.new_zeros(self.case.batch, self.case.time + 1, self.case.vocab)

    def _contestant(self, name: str, inputs: Inputs, baseline: str, writes: int, play: Play) -> Contestant:
        implementation = self.implementations[name]
        read = inputs.completion_mask.float().mean().item()
        facts: dict[str, Any] = {"bytes_needed": round((read + writes) * self.case.logits_bytes)}

        def enter() -> Turn:
            if implementation.only not in (None, self.case.dtype):
                raise Missing(f"the same as naive for {self.case.dtype}")
            implementation.needs()
            traffic = nullcontext() if implementation.opaque else Traffic(inputs.logits)
            check(play(implementation, traffic)[1], inputs.expected, implementation.rounds_logps and self.case.dtype != "float32")
            if isinstance(traffic, Traffic):
                facts["bytes_counted"] = traffic.bytes
            if name == "trl":
                facts["source"] = trl_source()
            facts.update(self._observe(lambda: play(implementation, nullcontext())[0]))
            return lambda: play(implementation, nullcontext())[0].seconds

        return Contestant(enter, baseline, facts)

    def _observe(self, play: Callable[[], Clocked]) -> dict[str, Any]:
        """What else one turn tells, once its answer is known to be right."""
        return {}

    def _roofline(self) -> Contestant:
        moved = 2 * self.case.logits_bytes
        return Contestant(
            lambda: lambda: clock(lambda: self.scratch.mul_(1.0)).seconds, "naive", {"bytes_needed": moved, "bytes_counted": moved}
        )


def _on_threads(count: int, contestant: Contestant) -> Contestant:
    def enter() -> Turn:
        if count > torch.get_num_threads():
            raise Missing(f"torch has {torch.get_num_threads()} thread(s)")
        turn = contestant.enter()

        def limited() -> float:
            before = torch.get_num_threads()
            torch.set_num_threads(count)
            try:
                return turn()
            finally:
                torch.set_num_threads(before)

        return limited

    return Contestant(enter, contestant.baseline, contestant.facts)


def figures(outcome: Contest, name: str, roofline: str) -> dict[str, Any]:
    """What a contest says of one contestant. Ratios are how many times faster it is, per round; the roofline's is compared by bytes."""
    contestant, seconds = outcome.contestants[name], outcome.seconds[name]
    found: dict[str, Any] = {**contestant.facts, "baseline": contestant.baseline, "roofline": roofline}
    if seconds:
        compiled = [peer for peer in outcome.seconds if peer.startswith("compile_")]
        best = min(compiled, key=lambda peer: statistics.median(outcome.seconds[peer]), default=None)
        found["faster_than_baseline"] = outcome.ratio(name, contestant.baseline)
        found["best_compile"] = best
        found["faster_than_best_compile"] = outcome.ratio(name, best)
        for peer in PEERS:
            found[f"faster_than_{peer}"] = outcome.ratio(name, re.sub("^[^-]*", peer, name))  # that of the same half
        if "bytes_needed" in found:
            found["gb_per_s"] = found["bytes_needed"] / statistics.median(seconds) / 1e9
        if ratio := outcome.ratio(name, roofline):
            share = found.get("bytes_needed", 1) / outcome.contestants[roofline].facts.get("bytes_needed", 1)
            found["share_of_roofline"] = {key: value * share for key, value in ratio.items()}
    return found
