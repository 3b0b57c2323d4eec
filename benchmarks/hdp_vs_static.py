"""Compares training with the planners `balanced` and `static`, in tokens per second: same model, ranks and data.

    python benchmarks/hdp_vs_static.py [CONTEXT] [--steps N] [--rounds N] [--json]

For each cell, rounds of `bytescale train` with static and balanced alternate. A round's result is its tokens per second
after the first step. The best rounds are compared, because other load on the machine can only slow a round down. Next
to each ratio is the fraction of tokens in sequences that fit on one rank, which HDP does not split.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.random import Generator, Philox

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load
from engine.config.schema import Config
from engine.data.lengths import step_lengths
from engine.data.mixes import draw
from engine.data.sources.folder import folder_files

MODEL = ["model.layers=2", "model.hidden=64", "model.heads=2", "model.kv_heads=1", "model.ffn=176"]
QUIET = ["data.validation_tokens=0", "run.checkpoint_every=1000000"]
CONTEXTS = (8 * 1024, 32 * 1024)
BATCH_TOKENS = 128 * 1024  # so large that every step of the github mix has long documents
PLANNERS = ("static", "balanced")


@dataclass(frozen=True)
class Cell:
    """One row of the table: a context, a corpus, and overrides of the recipe."""

    context: int
    data: str
    overrides: tuple[str, ...]


def cells(folder: Path) -> list[Cell]:
    """Write the documents of the github mix, scaled to 32K, into `folder`; return the rows to measure."""
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


def write_jsonl(path: Path, lengths: Iterable[int], text: bytes, seed: int) -> None:
    """Write a JSONL file with a document for each of `lengths`, in input tokens: BOS and at least one byte of text.

    Each document is copied from a random position of `text`, and continues at the start of `text` after its end.
    Non-ASCII bytes become `?`, so that no character is split and every length is exact.
    """
    ascii_ = np.frombuffer(text, dtype=np.uint8)
    ascii_ = np.where(ascii_ < 128, ascii_, ord("?")).astype(np.uint8)
    random = Generator(Philox(key=seed))
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            places = (random.integers(len(ascii_)) + np.arange(length - 1)) % len(ascii_)  # BOS is the other input
            file.write(json.dumps({"text": ascii_[places].tobytes().decode("ascii")}) + "\n")


def _library_text() -> bytes:
    ((root, names),) = folder_files(load(["recipe=quickstart"]).data)
    return b"".join((root / name).read_bytes() for name in names[:400])


def tokens_per_s(cell: Cell, planner: str, steps: int, out: Path) -> float:
    """Train `steps` steps; return the tokens per second after the first step."""
    overrides = ["recipe=quickstart", *MODEL, *QUIET, *cell.overrides, f"planner={planner}", f"run.steps={steps}"]
    command = [sys.executable, "-m", "bytescale_cli", "train", *overrides, f"run.out={out}"]
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    return float(sum(line["tokens"] for line in lines) / sum(line["step_s"] for line in lines))


def needs_no_ring(cell: Cell, steps: int) -> float:
    """Fraction of the trained tokens that are in sequences that fit on one rank."""
    config: Config = load(["recipe=quickstart", *MODEL, *QUIET, *cell.overrides])
    every = np.concatenate(list(step_lengths(config, steps, print)))
    return float(every[every <= config.capacity].sum() / every.sum())


def measure(cell: Cell, steps: int, rounds: int, folder: Path) -> Iterator[driver.Row]:
    """Yield the row of a cell."""
    speeds: dict[str, list[float]] = {planner: [] for planner in PLANNERS}
    for number in range(rounds):
        for planner in PLANNERS:
            out = folder / f"{cell.context}-{cell.data.split()[0]}-{planner}-{number}"
            speeds[planner].append(tokens_per_s(cell, planner, steps, out))
    static, balanced = (max(speeds[planner]) for planner in PLANNERS)
    yield {
        "context": cell.context,
        "data": cell.data,
        "static_tokens_per_s": round(static),
        "balanced_tokens_per_s": round(balanced),
        "ratio": round(balanced / static, 3),
        "no_ring_share": round(needs_no_ring(cell, steps), 3),
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    with tempfile.TemporaryDirectory() as name:
        for cell in cells(Path(name)):
            work = partial(measure, cell, arguments.steps, arguments.rounds, Path(name))
            yield f"{cell.context}/{cell.data.split()[0]}", work


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
