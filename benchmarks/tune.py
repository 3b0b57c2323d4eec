"""Measures `bytescale tune` on three clusters, three models and three contexts: its time, and the step times it finds.

Run `python benchmarks/tune.py [NODES/MODEL/CONTEXT ...]`, for example `128/llama70b/2M`, when the planner is already
compiled, as after installation. Each cell is a new process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

NODES = (1, 16, 128)  # of 8 H100 GPUs
MODELS = ("llama3-8b", "llama70b", "mixtral8x22b")
CONTEXTS = ("8K", "256K", "2M")


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


if __name__ == "__main__":
    main()
