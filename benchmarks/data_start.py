"""CPU seconds and memory that a start costs for more documents: 10M in a token file against 1,000.

    python benchmarks/data_start.py [--documents 10000000]

A dry run of `bytescale train` plans the first steps, and a process opens the documents as a rank does and reads a step.
CPU seconds are of the process and its children, resident memory is that of the process after it has read.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.data.token_file import write_index

RANK = """
import resource, sys
from pathlib import Path
import numpy as np
from engine.data.corpus import open_corpus
from engine.data.steps import Cursor, next_step, validation_table
before = resource.getrusage(resource.RUSAGE_SELF)
corpus, cursor = open_corpus(Path(sys.argv[1]), 0.05), Cursor()
validation_table(corpus, 8192, 65536)
for _ in range(20):
    table, cursor = next_step(corpus, cursor, 0, 65536, 8192)
    for document in table.document.tolist():
        corpus.tokens.read(document, 0, 100)
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, (after.ru_maxrss - before.ru_maxrss) / 1024)
"""


def main() -> None:
    """Print a row for each number of documents."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=10_000_000)
    arguments = parser.parse_args()
    print("| documents | dry run, CPU s | rank, CPU s | rank, MiB |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for documents in (1000, arguments.documents):
            prefix = made(Path(folder) / str(documents), documents)
            words = ["data=tokens", f"data.path={prefix}", f"run.out={folder}/run", "--dry-run", "--json"]
            before = children_s()
            shown = subprocess.run(
                [sys.executable, "-m", "bytescale_cli", "train", *words], check=True, capture_output=True
            )
            assert json.loads(shown.stdout)["dry_run"]["steps"]
            launcher_s = children_s() - before
            done = subprocess.run([sys.executable, "-c", RANK, str(prefix)], check=True, capture_output=True, text=True)
            rank_s, mib = map(float, done.stdout.split())
            print(f"| {documents:,} | {launcher_s:.2f} | {rank_s:.2f} | {mib:.0f} |")


def made(prefix: Path, documents: int) -> Path:
    """Write a token file of random documents of 2 to 60 tokens."""
    lengths = np.random.default_rng(0).integers(2, 60, documents).astype(np.int32)
    np.zeros(int(lengths.sum()), dtype=np.uint16).tofile(f"{prefix}.bin")
    write_index(prefix, np.dtype(np.uint16), lengths)
    return prefix


def children_s() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
