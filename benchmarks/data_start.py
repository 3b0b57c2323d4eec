"""What a start and a resume cost for more documents: 10M in a token file and 1M in JSONL, against 1,000 each.

    python benchmarks/data_start.py [--tokens 10000000] [--lines 1000000]

A dry run of `bytescale train` plans the first steps. A process opens the documents as a rank does, and reads the tokens
of 20 steps of 256K tokens; another one does the same from the place where the first one ended, as after a resume. CPU
seconds are of the process and its children, resident memory is that of the process at its peak, bytes are those that it
has read when the resumed process knows the documents of its first step.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.data.token_file import write_index

TEXT = "the quick brown fox jumps over the lazy dog " * 60
RANK = """
import json, multiprocessing, resource, sys, time
from pathlib import Path
from engine.config.load import load
from engine.data.corpus import Reader
from engine.data.overview import Corpora
from engine.data.steps import Cursor
def used():
    while multiprocessing.active_children():
        time.sleep(0.01)
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
def read():
    return int(Path("/proc/self/io").read_text().split()[1])
config, place = load(sys.argv[2:]), Path(sys.argv[1])
before, bytes_before = used(), read()
corpora = Corpora(config)
cursor = Cursor.of_json(json.loads(place.read_text())) if place.exists() else Cursor()
corpora.pack_first(cursor, print)
reader = Reader(corpora.sources, config.model.vocab)
for step in range(20):
    table, cursor = corpora.steps.next(cursor)
    if step == 0:
        first = (read() - bytes_before) / 2**20
    for row in zip(table.source.tolist(), table.block.tolist(), table.document.tolist()):
        reader.tokens(*row, 0, 100)
place.write_text(json.dumps(cursor.to_json()))
(peak,) = (int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(used() - before, peak, first)
"""


def main() -> None:
    """Print a row for each kind and number of documents."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    arguments = parser.parse_args()
    titles = (
        "dry run, CPU s | rank, CPU s | rank, MiB | resumed rank, CPU s | MiB read for its first step | corpus, MiB"
    )
    print(f"| documents | {titles} |\n|{'---|' * 7}")
    for kind, many in (("tokens", arguments.tokens), ("jsonl", arguments.lines)):
        for documents in (1000, many):
            with tempfile.TemporaryDirectory() as folder:
                row = measured(Path(folder), kind, documents)
                print(f"| {documents:,} {kind} | {' | '.join(f'{value:.2f}' for value in row)} |", flush=True)


def measured(folder: Path, kind: str, documents: int) -> list[float]:
    """Return a row of the table."""
    path = (token_file if kind == "tokens" else jsonl)(folder, documents)
    cache = folder / "cache"
    words = [f"data={kind}", f"data.path={path}", f"data.cache={cache}", f"run.out={folder}/run", "batch_tokens=256K"]
    before = children_s()
    shown = subprocess.run(
        [sys.executable, "-m", "bytescale_cli", "train", *words, "--dry-run", "--json"], check=True, capture_output=True
    )
    assert json.loads(shown.stdout)["dry_run"]["steps"]
    row = [children_s() - before]
    shutil.rmtree(cache, ignore_errors=True)
    for _ in range(2):
        command = [sys.executable, "-c", RANK, f"{folder}/cursor.json", "recipe=quickstart", *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row += map(float, done.stdout.split()[-3:])
    del row[3]  # bytes of the first one
    del row[4]  # memory of the second one
    return [*row, sum(one.stat().st_size for one in folder.glob("corpus*")) / 2**20]


def token_file(folder: Path, documents: int) -> Path:
    """Write a token file of random documents of 2 to 60 tokens; return its prefix."""
    lengths = np.random.default_rng(0).integers(2, 60, documents).astype(np.int32)
    np.zeros(int(lengths.sum()), dtype=np.uint16).tofile(folder / "corpus.bin")
    write_index(folder / "corpus", np.dtype(np.uint16), lengths)
    return folder / "corpus"


def jsonl(folder: Path, documents: int) -> Path:
    """Write documents of 20 to 2,600 bytes, one per line; return the file."""
    lengths = np.random.default_rng(0).integers(20, len(TEXT), documents).tolist()
    with (folder / "corpus.jsonl").open("w") as file:
        for number, length in enumerate(lengths):
            file.write(json.dumps({"id": number, "text": f"{number} {TEXT[:length]}"}) + "\n")
    return folder / "corpus.jsonl"


def children_s() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
