"""Simulated against measured step times: plans of one batch, good and bad, on gloo ranks of one thread each.

`python benchmarks/simulator_vs_real.py` calibrates this machine (`bytescale profile-hardware`) and runs all plans
alternately. It prints measured and simulated step times, the median error, and the rank correlation. For comparison it
does the same for two trivial predictors, scaled to fit best: the largest number of tokens of a rank, and the largest
sum of squared lengths of a rank.

- `--ranks N` (2): HDP ranks.
- `--stage Z` (1): the ZeRO stage; 2 and 3 run their plans in lockstep.
- `--processor-time`: for more ranks than cores. A micro-batch takes the median of its processor time over all steps,
  and a gang the mean over its ranks, or the longest if their work is not equal; a step takes the makespan of these
  durations. So ranks that take turns on a core are not counted as slow. The machine is calibrated with as many ranks,
  in processor time too: waiting for messages takes none, and ranks that share a core slow each other down. The
  calibration's micro-batches run again in turn with the plans, because the same micro-batch may take 30 % longer a
  minute later. The simulator uses their new times. With ZeRO-3, that of its gathers is new too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load, read_resolved
from engine.config.schema import Config
from engine.cost.calibration import Calibration
from engine.hardware.measured import RESULT, Case, Measured, read
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan import loads
from engine.planner.plan.emit import Group, emit
from engine.planner.plan.loads import micro_tokens
from engine.planner.plan.step_plan import StepPlan
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import Gangs
from engine.planner.time.makespan import timing
from engine.run.folder import RunFolder
from engine.simulator.timeline import simulate
from engine.units import Floats, Ints

if TYPE_CHECKING:
    from engine.parallel.groups import Groups
    from engine.trainer.loop import Trainer

REPEATS, REPEATS_PROCESSOR_TIME = 5, 9  # ranks that share a core disturb each other
LONGEST_S = 2.0  # micro-batches of a calibration that take longer are left out when the others run again
OVERRIDES = ["recipe=quickstart", "model.hidden=64", "model.heads=4", "model.ffn=192", "capacity=16K", "context=16K"]
LENGTHS = np.array([4000, 2500, 1500, 900, 600, *(24 + 7 * (number % 11) for number in range(120))])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true")


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    yield "plans", partial(measure, arguments)


def measure(given: argparse.Namespace) -> Iterator[driver.Row]:
    """Calibrate the machine, run the plans, and yield the comparison."""
    keys = [*OVERRIDES, f"zero.stage={given.stage}", f"cluster.ranks_per_node={given.ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        root, calibration = Path(folder), Path(folder) / "calibration.json"
        if given.processor_time:
            calibrate_processor_time(root / "profile", keys).write(calibration)
        else:
            command = [sys.executable, "-m", "bytescale_cli", "profile-hardware", *OVERRIDES, "--out", str(calibration)]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        keys.append(f"cluster.calibration={calibration}")
        settings = Job(load(keys)).settings.without_offload()
        made = plans(settings)
        steps = run_for_real(root / "run", Asked(keys, str(root / "profile") if given.processor_time else None))
        if given.processor_time:
            calibration = root / "calibration-repeated.json"
            fit_calibration(root / "run", keys).write(calibration)
            settings = Job(load([*keys, f"cluster.calibration={calibration}"])).settings.without_offload()
        yield from report(made, settings, steps)


class Asked(NamedTuple):
    """What a rank is told."""

    keys: list[str]
    profile: str | None  # the folder of a calibration in processor time; None: the plans are measured in wall time


def plans(settings: PlanSettings) -> dict[str, StepPlan]:
    """Make plans and verify them: three by planners, the others by hand."""
    count, ranks = len(LENGTHS), settings.ranks
    order = range(count)
    every = tuple(range(ranks))
    spread = [(s % ranks,) for s in order]
    halves = [every if s < 3 else (s % ranks,) for s in order]
    groups: dict[str, list[Group]] = {
        "all on rank 0, packed": [[(s, (0,)) for s in order if s != 0], [(0, (0,))]],
        "a ring each, packed": [[(s, every) for s in order]],
        "the longest alone on rank 1": [[(s, (1 if s == 0 else 0,)) for s in order]],
    }
    one_by_one: dict[str, list[Group]] = {
        "all on rank 0, one by one": [[(s, (0,))] for s in order],
        "a ring each, one by one": [[(s, every)] for s in order],
        "alternating ranks, one by one": [[(s, spread[s])] for s in order],
        "three rings, others alternating, one by one": [[(s, halves[s])] for s in order],
    }
    made = {
        name: emit("by hand", settings.mode, ranks, settings.capacity, LENGTHS, chosen)
        for name, chosen in (groups | one_by_one).items()
    }
    for plan in made.values():
        verify(plan, settings)
    return {name: plan_step(LENGTHS, settings.by(name)) for name in ("adaptive", "balanced", "static")} | made


def calibrate_processor_time(root: Path, keys: list[str]) -> Calibration:
    """Calibrate in processor time, measured with as many ranks as the plans have."""
    from engine.hardware.prepare import measuring

    config = load(keys)
    root.mkdir()
    run("calibrate", measuring(config, config.cluster.ranks_per_node, root), root)
    return fit_calibration(root, keys)


def fit_calibration(root: Path, keys: list[str]) -> Calibration:
    """Fit a calibration to the measurements in `root`."""
    from engine.hardware.fit import calibrate
    from engine.hardware.prepare import measuring

    config, measured = load(keys), read(root / RESULT)
    # Outside its micro-batches a step is compared by its update alone (`rank`), not by planning and waiting.
    measured = replace(measured, fixed_s=measured.updates[0][1])
    return calibrate(measured, measuring(config, config.cluster.ranks_per_node, root))


def run_for_real(root: Path, asked: Asked) -> dict[str, float]:
    """Measure the median step time of each plan in seconds."""
    from engine.hardware.prepare import measuring

    config = load(asked.keys)
    root.mkdir()
    (root / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    ours = measuring(config, config.cluster.ranks_per_node, root)
    run("rank", ours.model_copy(update={"zero": config.zero}), root)
    found: dict[str, float] = json.loads((root / "steps.json").read_text(encoding="utf-8"))
    return found


def run(work: str, config: Config, root: Path) -> None:
    """Run this file with the arguments `work` and `root` on all ranks."""
    from engine.hardware.prepare import write_folder
    from engine.launch.agents.commands import NodeCommand, node_commands
    from engine.launch.agents.ranks import run_ranks

    folder = RunFolder(root)
    write_folder(config, folder)
    program, commands = [sys.executable, str(Path(__file__).resolve()), work, str(root)], list[NodeCommand]()
    for command in node_commands(Job(config), folder, None):
        environment = {**command.work.environment, "OMP_NUM_THREADS": "1"}
        given = replace(command.work, ranks=[(rank, program) for rank in command.ranks], environment=environment)
        commands.append(replace(command, work=given))
    run_ranks(commands, folder, lambda: None, lambda text: None)


def calibrate_rank(root: Path) -> int:
    """Measure on this rank what `profile-hardware` measures, in processor time."""
    from engine.trainer.rank import importing, run_rank

    with importing():
        from engine.hardware.profile import SECONDS
        from engine.hardware.rank import measure
        from engine.hardware.timing import Stopwatch

    Stopwatch.now = lambda self: time.process_time()  # type: ignore[method-assign]
    folder = RunFolder(root)
    return run_rank(folder, lambda stop, control: measure(folder, SECONDS, control), saves=False)


def rank(root: Path) -> int:
    """Run all plans on this rank; rank 0 writes the measured times, and those of a calibration's micro-batches."""
    from engine.trainer.rank import importing

    with importing():  # as in training and in `profile-hardware`, or these ranks would be slower: they collect garbage
        import torch.distributed as dist

        from engine.control.control import Control
        from engine.control.link import Link
        from engine.hardware.micro_batches import random_inputs
        from engine.hardware.timing import Stopwatch
        from engine.parallel.groups import join_groups
        from engine.trainer import step
        from engine.trainer.loop import Trainer

    folder = RunFolder(root)
    config = read_resolved(folder.resolved)
    groups = join_groups(config, Control(int(os.environ["RANK"]), Link.to_agent()))
    trainer = Trainer(folder, config, groups)
    asked = Asked(*json.loads((root / "asked.json").read_text(encoding="utf-8")))
    # With a profile, calibration and plans are both measured in processor time, on these ranks: other programs then
    # have little influence.
    clock = time.process_time if asked.profile else time.perf_counter
    step._mark = lambda device: clock()
    Stopwatch.now = lambda self: clock()  # type: ignore[method-assign]
    settings = Job(load(asked.keys)).settings.without_offload()
    todo = plans(settings)
    inputs = {
        name: {m.index: random_inputs(m, config.model.vocab) for m in plan.of_rank(groups.hdp_rank) if m.shards}
        for name, plan in todo.items()
    }
    idle = idle_part(random_inputs(next(todo["a ring each, packed"].of_rank(0)), config.model.vocab))
    repeated = Repeated(read(Path(asked.profile) / RESULT), config, groups, trainer) if asked.profile else None
    times: dict[str, list[float]] = {name: [] for name in todo}  # of the slowest rank, or the mean of its update
    durations: dict[str, list[dict[int, float]]] = {name: [] for name in todo}  # of micro-batches
    # Plans alternate, so that a change in the speed of the machine affects all of them.
    for turn in range(1 + (REPEATS_PROCESSOR_TIME if asked.profile else REPEATS)):
        for name, plan in todo.items():
            dist.barrier()
            began = clock()
            _, measured = step.run_step(
                plan,
                trainer.engine.forward,
                lambda loss: trainer.engine.backward(loss, int(LENGTHS.sum())),
                lambda micro, name=name: inputs[name].get(micro.index, idle),  # type: ignore[misc]
                trainer.context,
            )
            ran = clock()
            trainer.engine.step(1e-6)
            whole_s, update_s = clock() - began, clock() - ran
            found = trainer.control.gather(
                (whole_s, update_s, [(at, stop - start) for at, start, stop in measured.spans()])
            )
            if groups.rank == 0 and turn:  # the first round warms up
                wholes, updates, spans = zip(*found, strict=True)
                times[name].append(float(np.mean(updates)) if asked.profile else max(wholes))
                durations[name].append(dict(span for some in spans for span in some))
        if repeated:
            repeated.run()
    calibrated = repeated.measured() if repeated else None
    if groups.rank == 0:
        medians = {name: float(np.median(found)) for name, found in times.items()}
        if calibrated:
            calibrated.write(root / RESULT)
            for name, turns in durations.items():
                typical = {number: float(np.median([turn[number] for turn in turns])) for number in turns[0]}
                medians[name] += makespan_of(todo[name], typical, settings)
        (root / "steps.json").write_text(json.dumps(medians), encoding="utf-8")
    trainer.close()
    return 0


class Repeated:
    """Micro-batches of a calibration, which run again on this rank, in processor time."""

    def __init__(self, profiled: Measured, config: Config, groups: Groups, trainer: Trainer) -> None:
        """Build their models, with ZeRO-1 as in `profile-hardware`. With ZeRO-3, one also runs on that of `trainer`."""
        from engine.hardware.micro_batches import runs
        from engine.hardware.prepare import with_layers
        from engine.hardware.rank import build_engine

        self._profiled, self._stage, self._control = profiled, config.zero.stage, trainer.control
        self._cases = [case for case, timing in profiled.micro_batches if timing.total_s < LONGEST_S]
        self._short = Case(config.model.layers, (32,))  # the one that `profile-hardware` also runs with ZeRO-3
        whole = config.model_copy(update={"zero": config.zero.model_copy(update={"stage": 1})})
        engines = {
            layers: build_engine(with_layers(whole, layers), groups) for layers in {c.layers for c in self._cases}
        }
        context, ranks, vocab = trainer.context, groups.mesh.hdp, config.model.vocab
        self._runs = runs(self._cases, engines, context, ranks, vocab)
        if self._stage == 3:
            self._runs += runs([self._short], {self._short.layers: trainer.engine}, context, ranks, vocab)
        self._samples: list[list[tuple[float, float]]] = [[] for _ in self._runs]

    def run(self) -> None:
        """Run each once, together with the other ranks."""
        import torch.distributed as dist

        for samples, run_once in zip(self._samples, self._runs, strict=True):
            dist.barrier()
            samples.append(run_once())

    def measured(self) -> Measured:
        """Return all measurements, with the new times of what ran again. All ranks must call it.

        The first time of each is left out, because it warmed up.
        """
        from engine.hardware.timing import timing_of

        of_ranks = self._control.gather([samples[1:] for samples in self._samples])
        timings = [timing_of(samples) for samples in zip(*of_ranks, strict=True)]
        found = dict(zip(self._cases, timings[: len(self._cases)], strict=True))
        sharded = (found[self._short], timings[-1]) if self._stage == 3 else self._profiled.sharded
        return replace(self._profiled, micro_batches=tuple(found.items()), sharded=sharded)


def makespan_of(plan: StepPlan, seconds: dict[int, float], settings: PlanSettings) -> float:
    """Compute the makespan of a plan whose micro-batches take `seconds`, for `--processor-time`.

    A gang takes the mean of its ranks if their shards are equal, and else the longest. The longest of noisy medians is
    too long: on three ranks, in the plan of 125 rings one by one, by 6 to 10 %. That remains where the gangs of a slot,
    or ranks without a common gang, have equal work.
    """
    taken = np.array([seconds[number] for number in range(plan.micro_batches)])
    longest, equal = np.zeros(plan.gangs), np.full(plan.gangs, True)
    np.maximum.at(longest, plan.gang, taken)
    for shares in (micro_tokens(plan), np.bincount(plan.shard_micro, minlength=plan.micro_batches)):
        most, least = np.zeros(plan.gangs), np.full(plan.gangs, np.inf)
        np.maximum.at(most, plan.gang, shares)
        np.minimum.at(least, plan.gang, shares)
        equal &= most - least <= np.maximum(1, most / 100)
    mean = np.bincount(plan.gang, taken) / np.bincount(plan.gang)
    durations = np.where(equal, mean, longest)
    if plan.mode == "lockstep":
        slots = np.zeros(int(plan.slot.max()) + 1)
        np.maximum.at(slots, plan.slot, durations[plan.gang])
        return float(slots.sum())
    none = np.zeros_like(durations)
    return timing(plan, Gangs(durations, none, none, none), settings.costs).makespan


def idle_part(some: Any) -> Any:
    """Inputs of an idle micro-batch: one token without a loss."""
    from engine.data.inputs import IGNORE, RankInputs

    return RankInputs(some.tokens[:1], np.full(1, IGNORE), some.positions[:1])


def simulated_s(plan: StepPlan, settings: PlanSettings) -> float:
    """Return the simulated seconds of a step."""
    return settings.costs.seconds(simulate(plan, settings).step_ns(settings.costs))


def report(made: dict[str, StepPlan], settings: PlanSettings, measured: dict[str, float]) -> Iterator[driver.Row]:
    """Yield a row for each plan, then the errors of the simulator and of both trivial predictors."""
    real = np.array([measured[name] for name in made])
    simulated = np.array([simulated_s(plan, settings) for plan in made.values()])
    for name, was, expected in zip(made, real, simulated, strict=True):
        yield {
            "plan": name,
            "measured_s": float(was),
            "simulated_s": float(expected),
            "error_%": float(100 * (expected / was - 1)),
        }
    rates = settings.costs.rates
    loaded = [
        [largest(plan, shards) for shards in (loads.shard_tokens(plan), loads.shard_pairs(plan, rates))]
        for plan in made.values()
    ]
    tokens, squares = np.array(loaded, dtype=float).T
    for name, guess in (("simulator", simulated), ("largest tokens", tokens), ("largest sum of s^2", squares)):
        if name != "simulator":
            guess = guess * float(np.median(real / guess))  # scaled to fit best
        error = 100 * float(np.median(np.abs(guess / real - 1)))
        figures = {"median_error_%": error, "rank_correlation": correlation(guess, real)}
        yield {"predictor": name, **figures, "slowest_over_fastest": float(real.max() / real.min())}


def largest(plan: StepPlan, shards: Ints | Floats) -> int:
    """Sum the values of `shards` [K] over each rank's shards; return the largest sum."""
    return int(np.bincount(plan.ring_ranks, weights=shards, minlength=plan.ranks).max())


def correlation(a: Any, b: Any) -> float:
    """Compute Spearman's rank correlation."""
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank(Path(sys.argv[2])))
    if sys.argv[1:2] == ["calibrate"]:
        sys.exit(calibrate_rank(Path(sys.argv[2])))
    sys.exit(driver.main(__doc__, cases, options))
