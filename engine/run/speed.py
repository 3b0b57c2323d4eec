"""How fast a run is, mostly medians over its steps, and which of several runs is the fastest. Imports no torch.

The first step after each start does not count: it also compiles, allocates and opens connections. If a run has no
other steps, they count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from engine.config.schema import BASELINE

Line = Mapping[str, Any]  # a step, as in metrics.jsonl


@dataclass(frozen=True)
class Speed:
    """Medians over the steps that count, from `first` to `last`. A metric that no step has is None.

    `unsplit` is no median: the fraction of the tokens of all these steps that were in unsplit sequences, 0 to 1.
    """

    first: int
    last: int
    tokens_per_s: float | None
    step_s: float | None
    mfu: float | None
    unsplit: float | None

    @classmethod
    def of(cls, lines: Sequence[Line], starts: Sequence[int]) -> Speed | None:
        """Compute the speed of a run; arguments as of `settled`. None if no step was completed."""
        steps = settled(lines, starts)
        if not steps:
            return None
        names = ("tokens_per_s", "step_s", "mfu")
        found = {name: [value for one in steps if (value := _number(one, name)) is not None] for name in names}
        medians = {name: median(values) if values else None for name, values in found.items()}

        # Steps with many tokens count more: the median of steps is no share of the tokens.
        shares = [(_number(one, "unsplit"), _number(one, "tokens")) for one in steps]
        known = [(share, tokens) for share, tokens in shares if share is not None and tokens is not None]
        total = sum(tokens for _, tokens in known)
        unsplit = sum(share * tokens for share, tokens in known) / total if total else None
        return cls(steps[0]["step"], steps[-1]["step"], **medians, unsplit=unsplit)


@dataclass(frozen=True)
class Faster:
    """How many times as fast one of several runs is as another. `fast` and `slow` are their indices.

    `seconds` is the time that (fast, slow) took for `steps` steps, of which both had the same number of tokens; it
    decides. If no steps have the same tokens, `seconds` is None and the medians of tokens/s decide.
    """

    fast: int
    slow: int
    ratio: float
    steps: Sequence[int]
    seconds: tuple[float, float] | None


def settled(lines: Sequence[Line], starts: Sequence[int]) -> list[Line]:
    """Return the steps that count. `starts` are the first steps of all starts, in order; old runs have no record."""
    begun = [line["step"] for line in lines[:1]]
    for start in starts:
        # A start from an earlier step runs the steps after it again.
        begun = [*(step for step in begun if step < start), start]
    return [line for line in lines if line["step"] not in begun] or list(lines)


def faster(runs: Sequence[tuple[Sequence[Line], Sequence[int]]], planners: Sequence[str]) -> Faster | None:
    """Compare the fastest of some runs with the slowest; None if fewer than two have a speed.

    `runs` are the arguments of `settled` of each run. If some have the planner `static` and others not, the fastest of
    each kind are compared.
    """
    speeds = [Speed.of(*run) for run in runs]
    rates = {at: one.tokens_per_s for at, one in enumerate(speeds) if one is not None and one.tokens_per_s}
    order = sorted(rates, key=lambda at: -rates[at])
    if len(order) < 2:
        return None
    kinds = [[at for at in order if (planners[at] == BASELINE) == baseline] for baseline in (False, True)]
    first, second = (kinds[0][0], kinds[1][0]) if all(kinds) else (order[0], order[-1])

    # The same number of tokens means the same documents, unless the data differs.
    pair = [
        {(line["step"], line.get("tokens")): float(line["step_s"]) for line in steps if _number(line, "step_s")}
        for steps in (settled(*runs[first]), settled(*runs[second]))
    ]
    same = sorted(pair[0].keys() & pair[1].keys())
    times = [sum(one[step] for step in same) for one in pair]
    ratio = times[1] / times[0] if same else rates[first] / rates[second]
    if ratio < 1:
        first, second, ratio, times = second, first, 1 / ratio, times[::-1]
    return Faster(first, second, ratio, [step for step, _ in same], (times[0], times[1]) if same else None)


def _number(line: Line, name: str) -> float | None:
    """The value of a metric if it is a finite number, else None."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
