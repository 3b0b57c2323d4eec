"""Measures `bytescale tune` on three clusters, three models and three contexts: its time, and the step times it finds.

Run `python benchmarks/tune.py [NODES/MODEL/CONTEXT ...]`, for example `128/llama70b/2M`, when the planner is already
compiled, as after installation. Each cell is a new process.

`python benchmarks/tune.py --static [RECIPE ...]` compares each packaged recipe, or the given ones, with what the search
finds on its own cluster for its lengths, and with static at its best settings. A search ends when it is complete, or
begins no simulation after `SECONDS` of processor time; the row then says how many settings were left. The command exits
with 1 if a recipe is more than 2 % slower than what is found. That does not hold for `APART`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.config import tree
from engine.config.load import load
from engine.data.lengths import step_lengths
from engine.fit.suggestions import as_overrides
from engine.tune.search import Search, search, tuned_static

NODES = (1, 16, 128)  # of 8 H100 GPUs
MODELS = ("llama3-8b", "llama70b", "mixtral8x22b")
CONTEXTS = ("8K", "256K", "2M")
SECONDS = 40  # processor time of each search
CLOSE = 1.02  # a recipe's step time / the best that is found, at most
APART = ("quickstart", "h200-1b-8k", "-paper")  # shows rings on two ranks; was measured as it is; have the paper's mesh


def main() -> None:
    """Print a row for each cell."""
    cells = [text.split("/") for text in sys.argv[1:]] or product(map(str, NODES), MODELS, CONTEXTS)
    print("| GPUs | model | context | tune, s | simulated | recipe, s a step | best, s a step | best |")
    print("|---|---|---|---|---|---|---|---|")
    for nodes, model, context in cells:
        print(row(nodes, model, context), flush=True)


def row(nodes: str, model: str, context: str) -> str:
    """Tune the recipe of the model for the cluster and the context."""
    # There is no recipe of 8K: that of 256K with shorter sequences.
    recipe = [f"recipe={model}-{context.lower()}"] if context != "8K" else [f"recipe={model}-256k", "context=8K"]
    command = [sys.executable, "-m", "bytescale_cli", "tune", *recipe, f"cluster.nodes={nodes}", "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    seconds = time.perf_counter() - began
    place = f"| {8 * int(nodes):,} | {model} | {context} | {seconds:.1f}"
    if done.returncode:
        return f"{place} | | | | {json.loads(done.stdout)['error']['message']} |"
    found = json.loads(done.stdout)["tune"]
    own, best = found["recipe_step_s"], found["best"][0]
    shipped = f"{own:.3f}" if own else "does not fit"
    return f"{place} | {found['simulated']} | {shipped} | {best['step_s']:.3f} | {best['set']} |"


def recipes(names: list[str]) -> bool:
    """Print a row for each recipe; returns whether all are as fast as what the search finds, within `CLOSE`."""
    print("| recipe | s a step | best found | ratio | search | best | static | static, tuned | over static, tuned |")
    print("|---|---|---|---|---|---|---|---|---|")
    close, clock = True, time.process_time
    for name in names or tree.recipes():
        config = load([f"recipe={name}"])
        steps = list(step_lengths(config, 1))
        ours = search(config, steps, clock() + SECONDS, shown=1, clock=clock)
        static = tuned_static(config, steps, clock() + SECONDS, with_own=True, clock=clock)
        if ours.own is None or static.own is None:
            raise ValueError(f"{name} does not fit")
        own, (best,), (mesh,) = ours.own.step_s, ours.best(), static.best()
        close = close and (own <= CLOSE * best.step_s or name.endswith(APART))
        figures = f"{own:.3f} | {best.step_s:.3f} | {own / best.step_s:.3f} | {_state(ours)}"
        figures += f" | {as_overrides(best.candidate.changes)} | {static.own.step_s:.3f}"
        print(f"| {name} | {figures} | {mesh.step_s:.3f}, {_state(static)} | {mesh.step_s / own:.2f} |", flush=True)
    return close


def _state(found: Search) -> str:
    return f"{found.left:,} left after {SECONDS} s" if found.left else "complete"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--static"]:
        sys.exit(not recipes(sys.argv[2:]))
    main()
