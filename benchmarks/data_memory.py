"""Memory of all loading processes of a host: 64 Parquet sources for 8 ranks, with our loaders and with DataLoaders.

    python benchmarks/data_memory.py [--rows 100]

Ours: the planning process of the node with its 4 loaders, which pack blocks of all sources, and what 8 ranks need,
beside their code, to get 20 plans and to read their inputs. DataLoaders: 8 of PyTorch with a worker each, which has all
64 files open and a row group of each in memory, as a reader that shuffles documents does; what their ranks need is not
counted. Memory is proportional (PSS): a page that n processes share counts as 1/n in each.
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
    from engine.config.load import load, resolved_yaml
    from engine.data.overview import Corpora
    from engine.launch.prepare import write_facts
    from engine.run.folder import RunFolder

    sources = [f"data.sources.s{number}.path={folder / str(number)}.parquet" for number in range(SOURCES)]
    mix = ", ".join(f"s{number}: 1" for number in range(SOURCES))
    data = [f"data.mix={{{mix}}}", f"data.cache={folder / 'cache'}", f"data.loaders={LOADERS}", "batch_tokens=1M"]
    config = load(["recipe=quickstart", "data=parquet", *sources, *data, f"cluster.ranks_per_node={RANKS}"])
    run = RunFolder(folder / "run")
    run.root.mkdir()
    run.resolved.write_text(resolved_yaml(config))
    write_facts(run, config, Corpora(config), 0)
    context, clients = multiprocessing.get_context("spawn"), list[tuple[Any, Connection]]()
    pairs = [context.Pipe() for _ in range(RANKS - 1)]
    sockets = [[mine for mine, _ in pairs], *([theirs] for _, theirs in pairs)]
    for rank in range(RANKS):
        mine, theirs = context.Pipe()
        process = context.Process(target=train, args=(run.root, rank, sockets[rank], theirs))
        process.start()
        clients.append((process, mine))
    ranks = [int(process.pid) for process, _ in clients]
    before = 0.0
    for moment in range(2):  # with the code of a rank alone, and after 20 steps
        for _, connection in clients:
            connection.recv()
        time.sleep(1)
        if moment == 0:
            before = pss(ranks)
        else:
            # The first rank has started it, and multiprocessing's resource tracker.
            planning = max(descendants(ranks[0]), key=lambda process: len(descendants(process)))
            found = {
                "planning process": pss([planning]),
                "loaders and their server": pss([one for one in descendants(ranks[0]) if one != planning]),
                "8 ranks, beside their code": pss(ranks) - before,
            }
        for _, connection in clients:
            connection.send(None)
    for process, _ in clients:
        process.join()
    return found


def train(folder: Path, rank: int, sockets: list[Connection], connection: Connection) -> None:
    """Take 20 plans, and read the tokens of a rank."""
    from engine.config.load import read_resolved
    from engine.data.runtime.local import LocalRuntime
    from engine.data.steps import Cursor
    from engine.planner.settings import PlanSettings
    from engine.run.folder import RunFolder
    from engine.trainer import loop  # noqa: F401  (the code of a rank)

    connection.send(None)
    connection.recv()
    run = RunFolder(folder)
    config = read_resolved(run.resolved)
    given = [os.dup(one.fileno()) for one in sockets]
    data = LocalRuntime(run, config, PlanSettings.of(config), given, rank == 0)
    data.request(Cursor())
    for _ in range(STEPS):
        planned = data.take()
        data.request(planned.after)
        read_inputs = data.input_reader(planned)
        for micro in planned.plan.of_rank(rank):
            read_inputs(micro)
    connection.send(None)
    connection.recv()
    data.take()
    data.close()


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
