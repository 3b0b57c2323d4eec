"""Simulated against measured step times: plans of one batch, good and bad, on gloo ranks of one thread each.

`python benchmarks/simulator_vs_real.py` calibrates this machine (`bytescale profile-hardware`) and runs all plans
alternately. It prints measured and simulated step times, the median error, and the rank correlation. For comparison it
does the same for two trivial predictors, scaled to fit best: the largest number of tokens of a rank, and the largest
sum of squared lengths of a rank.

- `--ranks N` (2): HDP ranks.
- `--stage Z` (1): the ZeRO stage; 2 and 3 run their plans in lockstep.
- `--processor-time`: for more ranks than cores. A micro-batch takes the processor time of its slowest rank, the median
  over all steps, and a step the makespan of these durations. So ranks that take turns on a core are not counted as
  slow. The machine is calibrated with as many ranks, and with medians of processor time too: waiting for messages takes
  none, and ranks that share a core slow each other down.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.config.load import load, read_resolved
from engine.config.schema import Config
from engine.planner.make import plan_step
from engine.planner.plan import loads
from engine.planner.plan.emit import Group, emit
from engine.planner.plan.step_plan import StepPlan
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import Gangs
from engine.planner.time.makespan import timing
from engine.run.folder import RunFolder
from engine.simulator.timeline import simulate
from engine.units import Ints

REPEATS = 5
OVERRIDES = ["recipe=quickstart", "model.hidden=64", "model.heads=4", "model.ffn=192", "capacity=16K", "context=16K"]
LENGTHS = np.array([4000, 2500, 1500, 900, 600, *(24 + 7 * (number % 11) for number in range(120))])


def main() -> None:
    """Calibrate the machine, run the plans, and print the comparison."""
    options = argparse.ArgumentParser()
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--stage", type=int, default=1)
    options.add_argument("--processor-time", action="store_true")
    given = options.parse_args()
    keys = [*OVERRIDES, f"zero.stage={given.stage}", f"cluster.ranks_per_node={given.ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as root:
        calibration = Path(root) / "calibration.json"
        if given.processor_time:
            calibrate_processor_time(Path(root) / "profile", keys, calibration)
        else:
            command = [sys.executable, "-m", "bytescale_cli", "profile-hardware", *OVERRIDES, "--out", str(calibration)]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        keys.append(f"cluster.calibration={calibration}")
        settings = PlanSettings.of(load(keys)).without_offload()
        measured = run_for_real(Path(root) / "run", Job(keys, given.processor_time))
        report(plans(settings), settings, measured)


class Job(NamedTuple):
    """What a rank is told."""

    keys: list[str]
    processor_time: bool


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


def calibrate_processor_time(root: Path, keys: list[str], calibration: Path) -> None:
    """Write a calibration to processor time, measured with as many ranks as the plans have."""
    from engine.hardware.fit import calibrate
    from engine.hardware.measured import RESULT, read
    from engine.hardware.prepare import measuring

    config = load(keys)
    root.mkdir()
    ours = measuring(config, config.cluster.ranks_per_node, root)
    run("calibrate", ours, root)
    measured = read(root / RESULT)
    # Outside its micro-batches a step is compared by its update alone (`rank`), not by planning and waiting.
    calibrate(replace(measured, fixed_s=measured.updates[0][1]), ours).write(calibration)


def run_for_real(root: Path, job: Job) -> dict[str, float]:
    """Measure the median step time of each plan in seconds."""
    from engine.hardware.prepare import measuring

    config = load(job.keys)
    root.mkdir()
    (root / "job.json").write_text(json.dumps(job), encoding="utf-8")
    ours = measuring(config, config.cluster.ranks_per_node, root)
    run("rank", ours.model_copy(update={"zero": config.zero}), root)
    found: dict[str, float] = json.loads((root / "measured.json").read_text(encoding="utf-8"))
    return found


def run(work: str, config: Config, root: Path) -> None:
    """Run this file with the arguments `work` and `root` on all ranks."""
    from engine.cluster.cluster import Cluster
    from engine.hardware.prepare import write_folder
    from engine.launch.commands import node_commands
    from engine.launch.ranks import run_ranks

    folder = RunFolder(root)
    write_folder(config, folder)
    commands = node_commands(Cluster.of(config.cluster), folder, None, config)
    for command in commands:
        program = [sys.executable, str(Path(__file__).resolve()), work, str(root)]
        command.job["ranks"] = [[rank, program] for rank in command.ranks]
        command.job["environment"]["OMP_NUM_THREADS"] = "1"
    run_ranks(commands, folder, lambda: None, lambda text: None)


def calibrate_rank(root: Path) -> int:
    """Measure on this rank what `profile-hardware` measures, as medians of processor time."""
    from engine.hardware import timing
    from engine.hardware.profile import SECONDS
    from engine.trainer.rank import run_rank

    timing.Stopwatch.now = lambda self: time.process_time()  # type: ignore[method-assign]
    timing.QUANTILE = 0.5
    from engine.hardware.rank import measure  # after the changes, because it imports QUANTILE

    folder = RunFolder(root)
    return run_rank(folder, lambda stop, control: measure(folder, SECONDS, control), saves=False)


def rank(root: Path) -> int:
    """Run all plans on this rank; rank 0 writes the measured times."""
    import torch.distributed as dist

    from engine.control.control import Control
    from engine.control.link import Link
    from engine.hardware.micro_batches import random_inputs
    from engine.parallel.groups import join_groups
    from engine.trainer import step
    from engine.trainer.loop import Trainer

    folder = RunFolder(root)
    config = read_resolved(folder.resolved)
    groups = join_groups(config, Control(int(os.environ["RANK"]), Link.to_agent()))
    trainer = Trainer(folder, config, groups)
    job = Job(*json.loads((root / "job.json").read_text(encoding="utf-8")))
    clock = time.process_time if job.processor_time else time.perf_counter
    step._mark = lambda device: clock()
    settings = PlanSettings.of(load(job.keys)).without_offload()
    todo = plans(settings)
    inputs = {
        name: {m.index: random_inputs(m, config.model.vocab) for m in plan.of_rank(groups.hdp_rank) if m.shards}
        for name, plan in todo.items()
    }
    idle = idle_part(random_inputs(next(todo["a ring each, packed"].of_rank(0)), config.model.vocab))
    times: dict[str, list[float]] = {name: [] for name in todo}  # of the slowest rank; in processor time, of the update
    durations: dict[str, list[dict[int, float]]] = {name: [] for name in todo}  # of micro-batches
    for turn in range(REPEATS + 1):
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
            (slowest_s, update_s) = trainer.control.largest(clock() - began, clock() - ran)
            spans = trainer.control.gather([(number, stop - start) for number, start, stop in measured.spans()])
            if groups.rank == 0 and turn:  # the first round warms up
                times[name].append(update_s if job.processor_time else slowest_s)
                durations[name].append(dict(span for some in spans for span in some))
    if groups.rank == 0:
        medians = {name: float(np.median(found)) for name, found in times.items()}
        if job.processor_time:
            for name, turns in durations.items():
                typical = {number: float(np.median([turn[number] for turn in turns])) for number in turns[0]}
                medians[name] += makespan_of(todo[name], typical, settings)
        (root / "measured.json").write_text(json.dumps(medians), encoding="utf-8")
    trainer.close()
    return 0


def makespan_of(plan: StepPlan, seconds: dict[int, float], settings: PlanSettings) -> float:
    """Compute the makespan of a plan whose micro-batches take `seconds`; a gang takes the longest of its own."""
    durations = np.zeros(plan.gangs)
    np.maximum.at(durations, plan.gang, [seconds[number] for number in range(plan.micro_batches)])
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
    return settings.costs.seconds(simulate(plan, settings).makespan + settings.costs.step)


def report(made: dict[str, StepPlan], settings: PlanSettings, measured: dict[str, float]) -> None:
    """Print a line per plan, and the errors of the simulator and of both trivial predictors."""
    real = np.array([measured[name] for name in made])
    simulated = np.array([simulated_s(plan, settings) for plan in made.values()])
    for name, was, said in zip(made, real, simulated, strict=True):
        print(f"{name}: measured {was:.3f} s, simulated {said:.3f} s ({said / was - 1:+.1%})")
    print(f"spread of step times: {real.max() / real.min():.2f}x")
    loaded = [[largest(plan, shards) for shards in loads.shard_loads(plan)] for plan in made.values()]
    tokens, squares = np.array(loaded, dtype=float).T
    for name, guess in (("simulator", simulated), ("largest tokens", tokens), ("largest sum of s^2", squares)):
        if name != "simulator":
            guess = guess * float(np.median(real / guess))  # scaled to fit best
        error = np.abs(guess / real - 1)
        print(f"{name}: median error {np.median(error):.1%}, rank correlation {correlation(guess, real):.3f}")


def largest(plan: StepPlan, shards: Ints) -> int:
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
    main()
