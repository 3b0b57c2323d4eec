"""Measures `bytescale tune` on three clusters, three models and three contexts: its time, and the step times it finds.

`python benchmarks/tune.py search[/GPUS[/MODEL[/CONTEXT]]]`, for example `search/1024/llama70b/2M`, when the planner is
already compiled, as after installation. Each cell is a new process.

`python benchmarks/tune.py static[/RECIPE]` compares each packaged recipe with what the search finds on its own cluster
for its lengths, and with static at its best settings. A search ends when it is complete, or begins no simulation after
`SECONDS` of processor time; the row then says how many settings were left. A recipe that is more than 2 % slower than
what is found misses its target, but for those in `APART`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config import tree
from engine.config.load import load
from engine.data.lengths import step_lengths
from engine.fit.suggestions import as_overrides
from engine.job import Job
from engine.tune.search import Search, search, tuned_static

NODES = (1, 16, 128)  # of 8 H100 GPUs
MODELS = ("llama3-8b", "llama70b", "mixtral8x22b")
CONTEXTS = ("8K", "256K", "2M")
SECONDS = 40  # processor time of each search
CLOSE = 1.02  # a recipe's step time / the best that is found, at most
APART = ("quickstart", "h200-1b-8k", "-paper")  # shows rings on two ranks; was measured as it is; have the paper's mesh


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for nodes, model, context in product(NODES, MODELS, CONTEXTS):
        yield f"search/{8 * nodes}/{model}/{context}", partial(cell, nodes, model, context)
    for recipe in tree.recipes():
        yield f"static/{recipe}", partial(beside_static, recipe)


def cell(nodes: int, model: str, context: str) -> Iterator[driver.Row]:
    """Tune the recipe of the model for the cluster and the context."""
    # There is no recipe of 8K: that of 256K with shorter sequences.
    recipe = [f"recipe={model}-{context.lower()}"] if context != "8K" else [f"recipe={model}-256k", "context=8K"]
    command = [sys.executable, "-m", "bytescale_cli", "tune", *recipe, f"cluster.nodes={nodes}", "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    row: driver.Row = {"gpus": 8 * nodes, "model": model, "context": context, "tune_s": time.perf_counter() - began}
    answer = json.loads(done.stdout)
    found = answer["tune"] if done.returncode == 0 else {"simulated": None, "recipe_step_s": None, "best": [{}]}
    best = found["best"][0]
    row |= {"simulated": found["simulated"], "recipe_s": found["recipe_step_s"], "best_s": best.get("step_s")}
    yield row | {"best": best.get("set", answer.get("error", {}).get("message"))}


def beside_static(name: str) -> Iterator[driver.Row]:
    """Compare a recipe with what the search finds, and with static at its best."""
    clock, config = time.process_time, load([f"recipe={name}"])
    steps = list(step_lengths(config, 1))
    ours = search(Job(config), steps, clock() + SECONDS, shown=1, clock=clock)
    static = tuned_static(Job(config), steps, clock() + SECONDS, with_own=True, clock=clock)
    if ours.own is None or static.own is None:
        raise ValueError(f"{name} does not fit")
    own, (best,), (mesh,) = ours.own.step_s, ours.best(), static.best()
    yield {
        "recipe": name,
        "step_s": own,
        "best_s": best.step_s,
        "ratio": own / best.step_s,
        "search": _state(ours),
        "best": str(as_overrides(best.candidate.changes)),
        "static_s": static.own.step_s,
        "static_tuned_s": mesh.step_s,
        "search_static": _state(static),
        "over_static_tuned": mesh.step_s / own,
        "holds": own <= CLOSE * best.step_s or name.endswith(APART),
    }


def _state(found: Search) -> str:
    return f"{found.left:,} left after {SECONDS} s" if found.left else "complete"


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases))
