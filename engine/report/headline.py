"""The headline of each page: the one figure that a reader should take away, and a sentence about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config.schema import BASELINE, BEST, Config
from engine.config.units import counted
from engine.fit.estimate import Estimate
from engine.job import Job
from engine.planner.plan.loads import unsplit_share
from engine.planner.plan.step_plan import StepPlan
from engine.report.words import hdp_ranks, long_seconds, memory_unit, short_seconds, short_tokens
from engine.run.speed import Line, Speed, faster

_EVEN = 1.005  # smaller ratios are shown as 1.00


@dataclass(frozen=True)
class Headline:
    """A figure with its unit, such as `2.30 times`, and a sentence about it."""

    figure: str
    text: str


def of_run(lines: Sequence[Line], speed: Speed | None) -> Headline:
    """The throughput of a run, its MFU and its last loss."""
    if speed is None:
        return Headline("No step", "was completed.")
    facts = [f"median of {_steps(speed.first, speed.last)}"]
    if speed.mfu is not None:
        facts.append(f"MFU {speed.mfu:.1%}")
    if speed.unsplit is not None:
        facts.append(f"{speed.unsplit:.0%} of the tokens in unsplit sequences")
    loss = lines[-1].get("loss")
    last = f"{loss:.3f}" if isinstance(loss, float) and math.isfinite(loss) else "not finite"
    facts.append(f"loss {last} after step {lines[-1]['step']:,}")
    rate = "unknown" if speed.tokens_per_s is None else f"{speed.tokens_per_s:,.0f}"
    return Headline(f"{rate} tokens/s", f"{'; '.join(facts)}.")


def of_runs(
    runs: Sequence[tuple[Sequence[Line], Sequence[int]]], configs: Sequence[Config], names: Sequence[str]
) -> Headline:
    """How many times as fast the fastest run is; `runs` are the arguments of `engine.run.speed.settled` of each."""
    planners = [config.planner.name for config in configs]
    found = faster(runs, planners)
    if found is None:
        return Headline("No comparison", "Fewer than two of the runs have completed a step.")
    pair = (found.fast, found.slow)
    fast, slow = (planners[at] if len(runs) == 2 else f"{names[at]} ({planners[at]})" for at in pair)
    if fast == slow or planners[found.fast] == planners[found.slow]:
        fast, slow = (names[at] for at in pair)
    ranks = [Job(configs[at]).cluster.ranks for at in pair]
    where = "" if ranks[0] == ranks[1] else f", on {counted(ranks[0], 'rank')} against {ranks[1]:,}"
    even = found.ratio < _EVEN
    text = f"{fast} and {slow} are equally fast" if even else f"{fast} is {found.ratio:.2f} times as fast as {slow}"
    text += f"{where}: "
    if found.seconds is not None:
        first, last = found.steps[0], found.steps[-1]
        same = _steps(first, last)
        if last - first >= len(found.steps):
            same = f"the same {len(found.steps):,} of {same}"
        quick, long = (short_seconds(each) if each < 600 else long_seconds(each) for each in found.seconds)
        text += f"{same} took {long} with {slow} and {quick} with {fast}."
    else:
        rates = [one.tokens_per_s for one in (Speed.of(*runs[at]) for at in pair) if one is not None]
        text += f"{rates[0]:,.0f} against {rates[1]:,.0f} tokens/s, the medians of their steps, which differ in tokens."
    if any(config.model != configs[0].model for config in configs):
        text += " Their models differ, so these speeds, and their losses, are not of the same work."
    return Headline("equally fast" if even else f"{found.ratio:.2f} times as fast", text)


def of_plan(plan: StepPlan, facts: Mapping[str, Any], config: Config) -> Headline:
    """The modelled time of a step."""
    ranks = hdp_ranks(plan.ranks, config.parallel.tp, config.parallel.pp)
    degree = int(facts["max_degree"])
    ring = f"the largest ring has {degree:,} of {ranks}" if degree > 1 else f"no sequence is split over the {ranks}"
    over = facts["makespan_s"] / facts["lower_bound_s"] - 1
    text = (
        f"per step, as modelled, {over:.1%} above the lower bound of any plan. "
        f"{unsplit_share(plan):.0%} of the tokens are in unsplit sequences; {ring}."
    )
    return Headline(short_seconds(facts["makespan_s"]), text)


def of_simulation(runs: Sequence[Mapping[str, Any]], tune: str) -> Headline:
    """The best speed-up over the fastest fixed mesh, of all points of a sweep.

    Of rows with the same speed-up as shown, it is that of the planner that hints recommend. If no planner is faster,
    `tune` is the command to recommend, which searches faster settings.
    """
    best: tuple[float, Mapping[str, Any], Mapping[str, Any]] | None = None
    for point in dict.fromkeys(run.get("sweep") for run in runs):
        here = [run for run in runs if run.get("sweep") == point]
        others = [run for run in here if run["planner"] != BASELINE]
        fixed = min((run for run in here if run["planner"] == BASELINE), key=_seconds, default=None)
        if fixed is not None and others:
            ratios = [_seconds(fixed) / _seconds(run) for run in others]
            even = [each for each in zip(ratios, others, strict=True) if f"{each[0]:.2f}" == f"{max(ratios):.2f}"]
            ratio, fastest = max(even, key=lambda each: (each[1]["planner"] == BEST, each[0]))
            if best is None or ratio > best[0]:
                best = ratio, fastest, fixed
    if best is None:
        return Headline(short_seconds(_seconds(runs[0])), f"per step of {runs[0]['planner']}, as simulated.")
    ratio, fastest, fixed = best
    if ratio <= 1 / _EVEN:
        return slower(fastest, fixed, tune)
    mesh = "the best fixed mesh (static, tuned)" if fixed.get("tuned") else "a fixed mesh (static)"
    at = f", at {fastest['sweep']}" if "sweep" in fastest else ""
    if ratio < _EVEN:
        text = (
            f"No planner is faster than {mesh}{at}: a simulated step takes {short_seconds(_seconds(fixed))}, with "
            f"{fastest['label']} {short_seconds(_seconds(fastest))}, on {counted(int(fastest['ranks']), 'rank')}."
        )
        return Headline("equally fast", text)
    text = (
        f"{fastest['label']} is {ratio:.2f} times as fast as {mesh}{at}: a simulated step takes "
        f"{short_seconds(_seconds(fastest))} instead of {short_seconds(_seconds(fixed))} on "
        f"{counted(int(fastest['ranks']), 'rank')}."
    )
    return Headline(f"{ratio:.2f} times as fast", text)


def slower(fastest: Mapping[str, Any], fixed: Mapping[str, Any], tune: str) -> Headline:
    """The fixed mesh `fixed` is faster than the fastest other row; `tune` is a command that searches settings."""
    ratio = _seconds(fastest) / _seconds(fixed)
    at = f", at {fixed['sweep']}" if "sweep" in fixed else ""
    text = (
        f"{fixed['label']} is {ratio:.2f} times as fast as {fastest['label']} with the settings of this recipe{at}: a "
        f"simulated step takes {short_seconds(_seconds(fixed))} instead of {short_seconds(_seconds(fastest))}. "
        f"To find faster settings for {fastest['planner']}: {tune}"
    )
    return Headline(f"{fixed['label']} is {ratio:.2f} times as fast", text)


def of_lengths(data: Mapping[str, Any]) -> Headline:
    """The lengths of the longest document and of the median."""
    ratio = data["max"] / max(1, data["p50"])
    text = (
        f"in the longest document, {ratio:,.0f} times as many as in the median one ({short_tokens(data['p50'])}; "
        "K = 1,024)."
    )
    if data["fits"]:
        text += f" Suggested capacity of a rank: {short_tokens(data['suggested_capacity'])} tokens."
    return Headline(f"{short_tokens(data['max'])} tokens", text)


def of_memory(found: Estimate) -> Headline:
    """The peak memory of a device."""
    name, unit = memory_unit(found.peak)
    spare = (found.device_total - found.headroom - found.peak) / unit
    verdict = f"it fits, with {spare:,.1f} {name} free besides the headroom" if found.fits else "it does not fit"
    return Headline(
        f"{found.peak / unit:,.1f} of {found.device_total / unit:,.1f} {name}", f"of a device at its peak: {verdict}."
    )


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _seconds(run: Mapping[str, Any]) -> float:
    return float(run["step_s"])
