"""`python -m tests.runs.make` writes the run folders of the present format to tests/runs/FORMAT, with their texts.

A release runs it once, and the folders stay: tests/runs/README.md. `--program` names the `bytescale` of another version
and `--format` its format.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from engine.config import versions

STEPS, SAVED = 20, 10  # steps of a run, and the one whose checkpoint is kept
WRITTEN = 1_000_000_000  # when the texts were written, in seconds since 1970: it names their blocks in the cache
_SMALL = (
    *("model.hidden=16", "model.heads=4", "model.kv_heads=2", "model.ffn=32", "context=256", "capacity=128"),
    *("batch_tokens=1024", f"run.steps={STEPS}", "run.validate_every=10", f"run.checkpoint_every={SAVED}"),
    *("data.cache=cache", "data.validation_share=0.1"),
)
RUNS = {  # overrides of each run folder
    "dense": ["data=jsonl", "data.path=texts.jsonl", "parallel.tp=2", "cluster.ranks_per_node=4"],
    "experts": [
        *("data=tokens", "data.path=packed", "model.experts=4", "model.top_k=2", "parallel.ep=2"),
        *("cluster.ranks_per_node=2", "balance.by=bias", "zero.stage=2"),
    ],
}


def texts() -> str:
    """Lines of JSONL with documents of 2 to 200 words."""
    random, words = np.random.default_rng(1), ["the", "run", "of", "a", "step", "has", "its", "own", "plan", "and"]
    lengths = np.geomspace(2, 200, 60).astype(int)[random.permutation(60)]
    return "".join(json.dumps({"text": " ".join(random.choice(words, length))}) + "\n" for length in lengths)


def write_texts(folder: Path) -> None:
    path = folder / "texts.jsonl"
    path.write_text(texts(), encoding="utf-8")
    os.utime(path, (WRITTEN, WRITTEN))


def make(folder: Path, program: str) -> None:
    """Write the texts, their token file and the run folders. Removes what the tests do not read."""
    folder.mkdir(parents=True)
    write_texts(folder)
    pack = ["data", "pack", "recipe=quickstart", "data=jsonl", "data.path=texts.jsonl", "--out", "packed"]
    subprocess.run([program, *pack], cwd=folder, check=True)
    for name, overrides in RUNS.items():
        command = [program, "train", "recipe=quickstart", *_SMALL, *overrides, f"run.out={name}"]
        printed = subprocess.run(command, cwd=folder, check=True, stderr=subprocess.PIPE, text=True).stderr
        steps = [line for line in printed.splitlines(keepends=True) if line.startswith("step ")]
        (folder / f"{name}.txt").write_text("".join(steps), encoding="utf-8")
        shutil.rmtree(folder / name / "logs")
        shutil.rmtree(folder / name / "checkpoints" / f"step-{STEPS:08d}")
        (folder / name / "report.html").unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default=str(Path(sys.executable).with_name("bytescale")))
    parser.add_argument("--format", default=versions.newest(), type=int)
    parser.add_argument("--out", default=Path(__file__).parent, type=Path)
    chosen = parser.parse_args()
    make(chosen.out / str(chosen.format), chosen.program)
