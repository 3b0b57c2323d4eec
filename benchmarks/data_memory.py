"""Memory of all loading processes of a host: 64 Parquet sources for 8 ranks, with our loaders and with DataLoaders.

    python benchmarks/data_memory.py [--rows 100]

Ours: 4 loaders, which pack blocks of all sources, and 8 processes that each choose the documents of 20 steps, as the
planning processes of ranks do. DataLoaders: 8 of PyTorch with a worker each, which has all 64 files open and a row
group of each in memory, as a reader that shuffles documents does. Memory is proportional (PSS): a page that n processes
share counts as 1/n in each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

SOURCES, RANKS, LOADERS, STEPS = 64, 8, 4, 20
GROUPS = 20  # row groups of a file


def main() -> None:
    """Print the memory of both, and their ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100, help="rows of a row group, each of 8 KB")
    parser.add_argument("--worker", choices=("ours", "dataloaders"))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.worker:
        measure = ours if arguments.worker == "ours" else dataloaders
        print(json.dumps(measure(arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.rows)
        found: dict[str, dict[str, float]] = {}
        for worker in ("dataloaders", "ours"):
            command = [sys.executable, __file__, "--worker", worker, "--folder", folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[worker] = json.loads(done.stdout.splitlines()[-1])
    print("| loading | processes | MiB |\n|---|---|---|")
    for worker, parts in found.items():
        for name, mib in parts.items():
            print(f"| {worker} | {name} | {mib:.0f} |")
    whole = {worker: sum(parts.values()) for worker, parts in found.items()}
    print(f"DataLoaders need {whole['dataloaders'] / whole['ours']:.2f} times as much")


def write(folder: Path, rows: int) -> None:
    """Write a Parquet file for each source."""
    import pyarrow as pa
    import pyarrow.parquet

    random = np.random.default_rng(0)
    for number in range(SOURCES):
        texts = [bytes(random.integers(97, 123, 8000, dtype=np.uint8)).decode() for _ in range(rows)] * GROUPS
        pyarrow.parquet.write_table(pa.table({"text": texts}), folder / f"{number}.parquet", row_group_size=rows)


def pss(processes: list[int]) -> float:
    """Proportional memory of processes in MiB."""
    total = 0
    for process in processes:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def descendants(process: int) -> list[int]:
    """All processes below one."""
    found = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return found + [below for child in found for below in descendants(child)]


def ours(folder: Path) -> dict[str, float]:
    """Memory of our loading, by kind of process."""
    context, clients = multiprocessing.get_context("spawn"), []
    for rank in range(RANKS):
        mine, theirs = context.Pipe()
        process = context.Process(target=choose, args=(folder, rank == 0, theirs))
        process.start()
        clients.append((process, mine))
    for _, connection in clients:
        connection.recv()
    time.sleep(1)
    ranks = [int(process.pid or 0) for process, _ in clients]
    below = [process for rank in ranks for process in descendants(rank)]
    found = {"8 that choose documents": pss(ranks), "loaders and their server": pss(below)}
    for process, connection in clients:
        connection.send(None)
        process.join()
    return found


def choose(folder: Path, loads: bool, connection: Connection) -> None:
    """Choose the documents of 20 steps; the first process has loaders."""
    from engine.config.load import load
    from engine.data.corpus import TextCorpus
    from engine.data.loaders import Loaders, Work, wait_for_others
    from engine.data.overview import Corpora
    from engine.data.steps import Cursor

    sources = [f"data.sources.s{number}.path={folder / str(number)}.parquet" for number in range(SOURCES)]
    mix = ", ".join(f"s{number}: 1" for number in range(SOURCES))
    words = ["data=parquet", *sources, f"data.mix={{{mix}}}", f"data.cache={folder / 'cache'}", "batch_tokens=1M"]
    corpora, cursor = Corpora(load(["recipe=quickstart", *words])), Cursor()
    loaders = Loaders(LOADERS, 1 << 36) if loads else None
    texts = {corpus.name: corpus for corpus in corpora.sources if isinstance(corpus, TextCorpus)}
    for corpus in texts.values():
        corpus.wait = loaders.wait if loaders else wait_for_others
    for _ in range(STEPS):
        if loaders:
            asked = [(texts[name], block) for name, block in corpora.steps.upcoming(cursor, 1)]
            loaders.ask(Work(corpus.tokens, corpus.folder, corpus.block_list[block]) for corpus, block in asked)
        found = corpora.steps.next(cursor)
        assert found is not None
        cursor = found[1]
    connection.send(None)
    connection.recv()
    if loaders:
        loaders.close()


def dataloaders(folder: Path) -> dict[str, float]:
    """Memory of the workers of 8 DataLoaders."""
    import pyarrow.parquet
    from torch.utils.data import DataLoader, IterableDataset

    class Shuffling(IterableDataset[int]):
        def __iter__(self) -> Any:
            opened = [pyarrow.parquet.ParquetFile(folder / f"{number}.parquet") for number in range(SOURCES)]
            self.groups = [file.read_row_group(number % GROUPS) for number, file in enumerate(opened)]
            self.opened = opened
            while True:
                yield os.getpid()

    loaders = [iter(DataLoader(Shuffling(), num_workers=1, batch_size=None)) for _ in range(RANKS)]
    workers = [next(loader) for loader in loaders]
    time.sleep(1)
    return {"8 workers": pss(workers)}


if __name__ == "__main__":
    main()
