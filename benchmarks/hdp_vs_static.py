"""Tokens per second of planner `balanced` against `static`: same model, same ranks, same data, runs taken in turn.

Usage: python benchmarks/hdp_vs_static.py [--steps N] [--rounds N] [--json]

Each cell trains for real through `bytescale train`, static and balanced in turn, and compares the best round of each
(all tokens after the first step over all seconds after it): whatever else the machine does only slows a round down.
Beside each ratio stands the share of tokens whose sequence needs no ring: what HDP need not cut.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config.load import load
from engine.config.schema import Config
from engine.data.index import build_index
from engine.data.mixes import draw, write_jsonl
from engine.data.source import open_source
from engine.data.steps import Cursor, next_step

MODEL = ["model.layers=2", "model.hidden=64", "model.heads=2", "model.kv_heads=1", "model.ffn=176"]
QUIET = ["data.validation_tokens=0", "run.checkpoint_every=1000000"]
CONTEXTS = (8 * 1024, 32 * 1024)
BATCH_TOKENS = 128 * 1024  # enough of them that a step of the github mix has long documents too
PLANNERS = ("static", "balanced")


@dataclass(frozen=True)
class Cell:
    """One row of the table: a context, a corpus, and how to train on it."""

    context: int
    data: str
    overrides: tuple[str, ...]


def cells(folder: Path) -> list[Cell]:
    """Return the rows; writes the documents of the github mix, scaled to 32K, into `folder`."""
    github = folder / "github.jsonl"
    mix = load(["recipe=quickstart", "lengths=github", "lengths.max=32K"]).lengths
    lengths = draw(mix, batch_tokens=8 * 1024 * 1024, context=32 * 1024, seed=7)
    write_jsonl(github, lengths, _library_text(), seed=7)
    corpora = {"standard library": (), "github mix, 32K": ("data=jsonl", f"data.path={github}")}
    return [
        Cell(
            context,
            name,
            (*overrides, f"context={context}", f"capacity={context // 2}", f"batch_tokens={BATCH_TOKENS}"),
        )
        for context in CONTEXTS
        for name, overrides in corpora.items()
    ]


def _library_text() -> bytes:
    source = open_source(load(["recipe=quickstart"]).data)
    return b"".join(source.read(number) for number in range(400))


def tokens_per_s(cell: Cell, planner: str, steps: int, out: Path) -> float:
    """Train `steps` steps and return tokens per second after the first."""
    overrides = ["recipe=quickstart", *MODEL, *QUIET, *cell.overrides, f"planner={planner}", f"run.steps={steps}"]
    command = [sys.executable, "-m", "bytescale_cli", "train", *overrides, f"run.out={out}"]
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    return float(sum(line["tokens"] for line in lines) / sum(line["step_s"] for line in lines))


def needs_no_ring(cell: Cell, steps: int) -> float:
    """Return the share of the trained tokens whose sequence fits one rank."""
    config: Config = load(["recipe=quickstart", *MODEL, *QUIET, *cell.overrides])
    index, cursor, lengths = build_index(config.data), Cursor(), []
    for _ in range(steps):
        table, cursor = next_step(index, cursor, config.run.seed, config.batch_tokens, config.context)
        lengths.append(table.length)
    every = np.concatenate(lengths)
    return float(every[every <= config.capacity].sum() / every.sum())


def measure(cell: Cell, steps: int, rounds: int, folder: Path) -> dict[str, object]:
    """Return one row of the table."""
    speeds: dict[str, list[float]] = {planner: [] for planner in PLANNERS}
    for number in range(rounds):
        for planner in PLANNERS:
            out = folder / f"{cell.context}-{cell.data.split()[0]}-{planner}-{number}"
            speeds[planner].append(tokens_per_s(cell, planner, steps, out))
    static, balanced = (max(speeds[planner]) for planner in PLANNERS)
    return {
        "context": cell.context,
        "data": cell.data,
        "static_tokens_per_s": round(static),
        "balanced_tokens_per_s": round(balanced),
        "ratio": round(balanced / static, 3),
        "no_ring_share": round(needs_no_ring(cell, steps), 3),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [measure(cell, arguments.steps, arguments.rounds, folder) for cell in cells(folder)]
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
