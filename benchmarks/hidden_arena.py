"""One case from hidden states on the CPU, and the contests that are held on it: arena.py for hidden.py's contestants."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks import contest, hidden
from benchmarks.contest import Contest, Contestant
from benchmarks.hidden import Hidden
from benchmarks.inputs import Case

ROUNDS = 5
# name -> hidden.py's name
LOSSES = {"naive": "naive", "naive_float": "naive_float", "trl_chunked": "trl_kernel", "liger": "liger", "verl": "verl", "ours": "cpu"}
FORWARD = {name: of for name, of in LOSSES.items() if of in hidden.LOGPS}

# contest -> its contestants' names, known before anything runs
NAMES = {
    "hidden": [*LOSSES, hidden.ROOFLINE],
    "hidden_forward": [*FORWARD, hidden.ROOFLINE],
    "hidden_half_masked": ["forward-all", "forward-half", "loss-all", "loss-half"],
}


class HiddenArena:
    roofline = hidden.ROOFLINE

    def __init__(self, case: Case) -> None:
        assert case.width is not None
        self.case, self.inputs = case, Hidden.make(case, case.width)
        self._contests: dict[str, Contest] = {}

    def contest(self, kind: str, names: Iterable[str], verify_only: bool = False) -> Contest:
        """The contest of that kind among `names` and those they are compared with; held once, when first asked for."""
        if kind not in self._contests:
            everybody = getattr(self, f"_{kind}")()
            keep = {self.roofline}.union(*((name, everybody[name].baseline) for name in names))
            chosen = {name: one for name, one in everybody.items() if name in keep}
            self._contests[kind] = contest.run(chosen, 0 if verify_only else ROUNDS)
        return self._contests[kind]

    def _hidden(self) -> dict[str, Contestant]:
        return {name: self._trains(of, self.inputs, "naive") for name, of in LOSSES.items()} | {self.roofline: self._products(True)}

    def _hidden_forward(self) -> dict[str, Contestant]:
        return {name: self._scores(of, self.inputs, "naive") for name, of in FORWARD.items()} | {self.roofline: self._products(False)}

    def _hidden_half_masked(self) -> dict[str, Contestant]:
        """Masked rows leave before the first product."""
        return {
            f"{what}-{part}": make("cpu", inputs, f"{what}-all")
            for what, make in (("forward", self._scores), ("loss", self._trains))
            for part, inputs in (("all", self.inputs), ("half", self.inputs.half_masked()))
        }

    def _trains(self, name: str, inputs: Hidden, baseline: str) -> Contestant:
        return hidden.contestant(name, self.case, inputs, baseline, lambda play: {})

    def _scores(self, name: str, inputs: Hidden, baseline: str) -> Contestant:
        return hidden.scores(name, self.case, inputs, baseline)

    def _products(self, gradients: bool) -> Contestant:
        return hidden.products(self.case, self.inputs, gradients)
