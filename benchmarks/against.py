"""Compares this checkout with another commit: planning, a step, the start of a run, `plan` and `--help`.

    python benchmarks/against.py COMMIT [planning engine start plan help] [--sizes 64/512] [--turns 3] [--json]

Makes a temporary worktree of COMMIT, and measures both in turn, each in processes of its own that import its code. All
times are processor time, so other work on the machine matters little; the least one of all turns counts, after a turn
that is not counted, in which code is compiled. A ratio above 1 means that this checkout is slower.

- planning: a plan with its verification, by each checkout's own benchmarks/planning.py, over its traces; also the
  balance (compute only) and the makespan, in the mean over seeds. They depend on the cost model, too.
- engine: one rank trains a model of 0.5M parameters on documents of one length; steps after the first.
- start: `train recipe=quickstart run.steps=1`, all its processes together.
- plan, help: `bytescale plan recipe=quickstart`, `bytescale --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from benchmarks.driver import Row

_HERE = Path(__file__).parent.parent
_SIZES = "64/512,512/4096,1024/8192,16384/131072"
_SEEDS = {64: 4, 512: 4, 1024: 3}  # by ranks; 1 for more
_PLANNING = """
import json, sys, time
time.perf_counter = time.process_time  # the clock of benchmarks/planning.py
from benchmarks.planning import measure
from benchmarks.traces import TRACES
size, seeds = sys.argv[1:]
step = tuple(map(int, size.split("/")))
found = {trace: [measure("adaptive", trace, *step, seed, "free", 5) for seed in range(int(seeds))] for trace in TRACES}
print(json.dumps(found))
"""
_RANK = (  # names what the recipes of the two commits do not have in common
    "recipe=quickstart data=jsonl cluster.ranks_per_node=1 capacity=2K batch_tokens=16K "
    "model.hidden=128 model.layers=3 model.heads=2 model.kv_heads=1 model.ffn=384"
)
_LATER_STEPS = 12  # that the engine's measurement counts


@contextmanager
def checkout(commit: str, repository: Path = _HERE) -> Iterator[Path]:
    """Yield a temporary worktree of a commit. Raises CalledProcessError for one that the repository does not have."""
    git = ["git", "-C", str(repository), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def processor_time(tree: Path, *arguments: str) -> tuple[float, str]:
    """Run Python in a tree; return the processor time of all its processes, in seconds, and its output."""
    unset = (
        "PYTHONDONTWRITEBYTECODE",
        "NUMBA_CACHE_DIR",
    )  # both trees cache what they compile, each beside its sources
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.run(
        [sys.executable, *arguments], check=True, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def command(tree: Path, words: str) -> float:
    """Return the processor time of a command of `bytescale`, in seconds."""
    return processor_time(tree, "-m", "bytescale_cli", *words.split())[0]


def start(tree: Path) -> float:
    """Return the processor time of a run of one step, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        return command(tree, f"train recipe=quickstart run.steps=1 run.out={folder}/run")


def engine(tree: Path) -> tuple[float, float, int]:
    """Return the processor time of a run of one step and of one with more, in seconds, and the tokens of the others."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "documents.jsonl")
        file.write_text("".join(json.dumps({"text": f"{number:1000d}"}) + "\n" for number in range(200)))
        long, short = Path(folder, "long"), Path(folder, "short")
        run = f"train {_RANK} data.path={file} run.validate_every=1000"
        seconds = (
            command(tree, f"{run} run.steps=1 run.out={short}"),
            command(tree, f"{run} run.steps={_LATER_STEPS + 1} run.out={long}"),
        )
        steps = [json.loads(line) for line in (long / "metrics.jsonl").read_text().splitlines()]
        return *seconds, sum(step["tokens"] for step in steps[1:])


def step(turns: list[tuple[float, float, int]]) -> float:
    """Return the processor time per 1,000 tokens of the steps after the first one, in ms, from `engine` of each turn.

    The least time of each run counts: the least difference would be that of a turn whose short run was slow.
    """
    short, long, tokens = (min(values) for values in zip(*turns, strict=True))
    return 1e6 * (long - short) / tokens


def planning(tree: Path, size: str) -> dict[str, list[dict[str, float]]]:
    """Return what benchmarks/planning.py of a tree measures at a size, for each trace and seed."""
    seeds = _SEEDS.get(int(size.split("/")[0]), 1)
    found: dict[str, list[dict[str, float]]] = json.loads(processor_time(tree, "-c", _PLANNING, size, str(seeds))[1])
    return found


def alternate(trees: tuple[Path, Path], measure: Callable[[Path], Any], turns: int) -> tuple[list[Any], list[Any]]:
    """Measure both trees in turn, once without counting it, then `turns` times; return what each gave."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for turn in range(turns + 1):
        for tree, results in zip(trees, found, strict=True):
            result = measure(tree)
            if turn:
                results.append(result)
    return found


def planning_rows(size: str, then: list[Any], now: list[Any]) -> Iterator[Row]:
    """Yield a row for each trace from what `planning` gave in each turn."""
    for trace in then[0]:
        row: Row = {"measure": f"planning {size} {trace}, ms"}
        for name, turns in (("then", then), ("now", now)):
            seeds = list(zip(*(turn[trace] for turn in turns), strict=True))  # by seed, of all turns
            row[name] = mean([min(turn["ms"] for turn in of_seed) for of_seed in seeds])
            for quality in ("balance", "over_bound", "makespan_s"):
                row[f"{quality}_{name}"] = mean([of_seed[0][quality] for of_seed in seeds])
        yield row | {"ratio": row["now"] / row["then"]}


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    with checkout(arguments.commit) as other:
        trees = (other, _HERE)
        for size in arguments.sizes.split(","):
            yield f"planning/{size}", partial(of_planning, trees, size, arguments.turns)
        single: dict[str, tuple[str, Callable[[Path], Any], Callable[[list[Any]], float]]] = {
            "engine": ("a step, CPU ms per 1,000 tokens", engine, step),
            "start": ("a run of one step, CPU s", start, min),
            "plan": ("plan recipe=quickstart, CPU s", partial(command, words="plan recipe=quickstart"), min),
            "help": ("--help, CPU s", partial(command, words="--help"), min),
        }
        for name, how in single.items():
            yield name, partial(of_one, trees, *how, arguments.turns)


def of_planning(trees: tuple[Path, Path], size: str, turns: int) -> Iterator[Row]:
    yield from planning_rows(size, *alternate(trees, partial(planning, size=size), turns))


def of_one(
    trees: tuple[Path, Path],
    title: str,
    measure: Callable[[Path], Any],
    least: Callable[[list[Any]], float],
    turns: int,
) -> Iterator[Row]:
    """Measure one figure in both trees and yield its row."""
    then, now = (least(found) for found in alternate(trees, measure, turns))
    yield {"measure": title, "then": then, "now": now, "ratio": now / then}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--sizes", default=_SIZES)
    parser.add_argument("--turns", type=int, default=3)


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
