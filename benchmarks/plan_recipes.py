"""Measures the time of `bytescale plan` for each recipe at its full size, each in a new process.

Run `python benchmarks/plan_recipes.py [NAME ...]` when the planner is already compiled, as after installation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.config import tree


def main() -> None:
    """Print the table and the slowest recipe."""
    print("| recipe | ranks | sequences | plan, s |\n|---|---|---|---|")
    rows = [measure(name) for name in sys.argv[1:] or tree.recipes()]
    print(f"slowest: {max(rows):.1f} s")


def measure(name: str) -> float:
    """Plan a recipe and print its row; return the seconds."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "bytescale_cli", "plan", f"recipe={name}", "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["plan"]
    seconds = time.perf_counter() - began
    print(f"| {name} | {shown['ranks']:,} | {shown['sequences']:,} | {seconds:.1f} |", flush=True)
    return seconds


if __name__ == "__main__":
    main()
