"""Simulated against measured step times: ten plans of one batch, good and bad, on two gloo ranks of one thread each.

`python benchmarks/simulator_vs_real.py` calibrates this machine (`bytescale profile-hardware`) and runs all plans
alternately. It prints measured and simulated makespans (time until the last rank finishes), the median error, and the
rank correlation. For comparison it does the same for two trivial predictors, scaled to fit best: the largest number of
tokens of a rank, and the largest sum of squared lengths of a rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
from engine.run.folder import RunFolder
from engine.simulator.timeline import simulate
from engine.units import Ints

REPEATS = 5
OVERRIDES = ["recipe=quickstart", "model.hidden=64", "model.heads=4", "model.ffn=192", "capacity=16K", "context=16K"]
LENGTHS = np.array([4000, 2500, 1500, 900, 600, *(24 + 7 * (number % 11) for number in range(120))])


def main() -> None:
    """Calibrate the machine, run the plans, and print the comparison."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as root:
        calibration = Path(root) / "calibration.json"
        command = [sys.executable, "-m", "bytescale_cli", "profile-hardware", *OVERRIDES, "--out", str(calibration)]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        config = load([*OVERRIDES, f"cluster.calibration={calibration}"])
        settings = PlanSettings.of(config).without_offload()
        measured = run_for_real(config, Path(root) / "run")
        report(plans(settings), settings, measured)


def plans(settings: PlanSettings) -> dict[str, StepPlan]:
    """Make ten plans and verify them: three by planners, seven by hand."""
    count = len(LENGTHS)
    order = range(count)
    both, ring = (0, 1), [(0, 1)] * count
    spread = [(s % 2,) for s in order]
    halves = [both if s < 3 else (s % 2,) for s in order]
    groups: dict[str, list[Group]] = {
        "all on rank 0, packed": [[(s, (0,)) for s in order if s != 0], [(0, (0,))]],
        "all on rank 0, one by one": [[(s, (0,))] for s in order],
        "a ring each, one by one": [[(s, ring[s])] for s in order],
        "a ring each, packed": [[(s, ring[s]) for s in order]],
        "alternating ranks, one by one": [[(s, spread[s])] for s in order],
        "the longest alone on rank 1": [[(s, (1 if s == 0 else 0,)) for s in order]],
        "three rings, others alternating, one by one": [[(s, halves[s])] for s in order],
    }
    made = {
        name: emit("by hand", "free", settings.ranks, settings.capacity, LENGTHS, chosen)
        for name, chosen in groups.items()
    }
    for plan in made.values():
        verify(plan, settings)
    return {name: plan_step(LENGTHS, settings.by(name)) for name in ("adaptive", "balanced", "static")} | made


def run_for_real(config: Config, root: Path) -> dict[str, float]:
    """Measure the median makespan of each plan in seconds: from a barrier until the slower rank finishes."""
    from engine.hardware.prepare import measuring, write_folder
    from engine.launch.commands import node_commands
    from engine.launch.ranks import run_ranks

    folder = RunFolder(root)
    root.mkdir()
    ours = measuring(config, 2, root)
    write_folder(ours, folder)
    (root / "config.json").write_text(json.dumps({"calibration": config.cluster.calibration}), encoding="utf-8")
    from engine.cluster.cluster import Cluster

    commands = node_commands(Cluster.of(ours.cluster), folder, None, ours)
    for command in commands:
        program = [sys.executable, str(Path(__file__).resolve()), "rank", str(root)]
        command.job["ranks"] = [[rank, program] for rank in command.ranks]
        command.job["environment"]["OMP_NUM_THREADS"] = "1"
    run_ranks(commands, folder, lambda: None, lambda text: None)
    found: dict[str, float] = json.loads((root / "measured.json").read_text(encoding="utf-8"))
    return found


def rank(root: Path) -> int:
    """Run all plans on this rank; rank 0 writes the measured times."""
    import torch.distributed as dist

    from engine.control.control import Control
    from engine.control.link import Link
    from engine.hardware.micro_batches import random_slices
    from engine.parallel.groups import join_groups
    from engine.trainer.loop import Trainer
    from engine.trainer.step import run_step

    folder = RunFolder(root)
    config = read_resolved(folder.resolved)
    groups = join_groups(config, Control(int(os.environ["RANK"]), Link.to_agent()))
    trainer = Trainer(folder, config, groups)
    path = json.loads((root / "config.json").read_text(encoding="utf-8"))["calibration"]
    settings = PlanSettings.of(load([*OVERRIDES, f"cluster.calibration={path}"])).without_offload()
    todo = plans(settings)
    slices = {
        name: {m.index: random_slices(m, config.model.vocab) for m in plan.of_rank(groups.hdp_rank) if m.shards}
        for name, plan in todo.items()
    }
    idle = next(part for found in slices.values() for part in found.values())
    times: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(REPEATS + 1):
        for name, plan in todo.items():
            dist.barrier()
            began = time.perf_counter()
            run_step(
                plan,
                trainer.engine.forward,
                lambda loss: trainer.engine.backward(loss, int(LENGTHS.sum())),
                lambda micro, name=name: slices[name].get(micro.index, idle_part(idle)),  # type: ignore[misc]
                trainer.context,
            )
            (slowest_s,) = trainer.control.largest(time.perf_counter() - began)
            trainer.engine.step(1e-6)
            if turn:  # the first round warms up
                times[name].append(slowest_s)
    if groups.rank == 0:
        medians = {name: float(np.median(found)) for name, found in times.items()}
        (root / "measured.json").write_text(json.dumps(medians), encoding="utf-8")
    trainer.close()
    return 0


def idle_part(some: Any) -> Any:
    """Slices for an idle micro-batch: one token without a loss."""
    from engine.data.slices import IGNORE, Slices

    return Slices(some.tokens[:1], np.full(1, IGNORE), some.positions[:1])


def report(made: dict[str, StepPlan], settings: PlanSettings, measured: dict[str, float]) -> None:
    """Print a line per plan, and the errors of the simulator and of both trivial predictors."""
    real = np.array([measured[name] for name in made])
    simulated = np.array([simulate(plan, settings).makespan / 1e9 for plan in made.values()])
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
    main()
