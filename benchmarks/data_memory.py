"""Memory of all processes that load the data of a host, against DataLoaders of PyTorch over the same files.

    python benchmarks/data_memory.py [8MB | 0.8MB] [--runtime local|ray] [--sources 64] [--ranks 8] [--loaders 4]

Sources are Parquet files; cases are sizes of row groups. Ours are all processes that the data runtime needs beside the
ranks, with the settings of a run: with Ray also its own processes, a warm standby and the supervisor. What ranks need
for plans and inputs is added. The sample with the largest sum is printed; samples are taken after each step. The
DataLoaders have a worker each, with all files open and a row group of each in memory, as a reader that shuffles
documents has; what their ranks need is not counted. Memory is proportional (PSS), in MiB: a page that n processes share
counts as 1/n in each. The target is 1/3.6 of the DataLoaders with row groups of 8 MB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from socket import socketpair
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from benchmarks.driver import Row

if TYPE_CHECKING:
    import psutil

    from engine.data.runtime.runtime import DataRuntime
    from engine.job import Job
    from engine.run.folder import RunFolder

CASES = {"8MB": (1000, 3.6), "0.8MB": (100, None)}  # documents of a row group, and the target
DOCUMENT_BYTES, GROUPS = 8000, 4  # of a document; row groups of a file
_UP_S, _SETTLE_S = 300.0, 1.0


def write_sources(folder: Path, sources: int, rows: int) -> None:
    """Write a Parquet file for each source, of random letters."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet

    drawn = np.random.default_rng(0)
    for number in range(sources):
        texts = [drawn.integers(97, 123, DOCUMENT_BYTES, dtype=np.uint8).tobytes().decode() for _ in range(rows)]
        table = pa.table({"text": texts})
        with pyarrow.parquet.ParquetWriter(folder / f"{number}.parquet", table.schema) as file:
            for _ in range(GROUPS):
                file.write_table(table)


def prepare(folder: Path, arguments: argparse.Namespace) -> tuple[RunFolder, Job]:
    """Make the run folder, as the launcher does."""
    from engine.config.load import load
    from engine.data.overview import Corpora
    from engine.job import Job
    from engine.launch.prepare import write_facts
    from engine.run.folder import RunFolder

    names = [str(number) for number in range(arguments.sources)]
    sources = [f"data.sources.s{name}.path={folder / name}.parquet" for name in names]
    data = [f"data.mix={{{', '.join(f's{name}: 1' for name in names)}}}", f"data.cache={folder / 'cache'}"]
    data += [f"data.loaders={arguments.loaders}", f"data.runtime={arguments.runtime}", "batch_tokens=1M"]
    config = load(["recipe=quickstart", "data=parquet", *sources, *data, f"cluster.ranks_per_node={arguments.ranks}"])
    run = RunFolder(folder / "run")
    (run.root / "logs").mkdir(parents=True)
    corpora = Corpora(config)
    corpora.are_few = False  # else they would be counted
    write_facts(run, config, corpora, 0)
    return run, Job(config)


@contextmanager
def ray(folder: RunFolder, job: Job) -> Iterator[None]:
    """Run Ray and the supervisor, as the agent of a host does."""
    from engine.control.protocol import RayNode
    from engine.data.runtime.events import read_events
    from engine.launch.agents.data_plane import DataPlane
    from engine.remote.checks import version

    hosts = [sorted({job.mesh.place(rank).hdp for rank in range(job.config.cluster.ranks_per_node)})]
    node = RayNode(0, version() or "", job.config.data.ray.memory, None, hosts, "1")
    with closing(DataPlane(node, folder, os.environ, "127.0.0.1", None, b"of the run")) as plane:
        os.environ.update(plane.environment)
        last = time.monotonic() + _UP_S
        while sum(event["what"] == "taken" for event in read_events(folder)) < 2:
            failed = plane.look()
            assert failed is None and time.monotonic() < last, failed
            time.sleep(0.1)
        yield


def ours(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the memory of the data plane by kind of process, while it gives all ranks their inputs."""
    import psutil

    from engine.control.control import Control
    from engine.data.runtime import local  # noqa: F401  (the code of ranks does not count)
    from engine.data.runtime.runtimes import RUNTIMES
    from engine.data.steps import Cursor
    from engine.remote import bridge  # noqa: F401

    (run, job), ranks = prepare(folder, arguments), range(arguments.ranks)
    pairs = [[end.detach() for end in socketpair()] for _ in ranks[1:]]
    sockets = [[mine for mine, _ in pairs], *([theirs] for _, theirs in pairs)]
    samples, this = list[dict[str, float]](), psutil.Process()
    with ExitStack() as stack:
        if arguments.runtime == "ray":
            stack.enter_context(ray(run, job))
        before = pss(this)
        runtimes: list[DataRuntime] = []
        for rank in ranks:
            made = RUNTIMES[arguments.runtime](run, job, Control(rank), sockets[rank], rank == 0)
            runtimes.append(stack.enter_context(closing(made)))

        def sample() -> None:
            found = defaultdict[str, float](float, ranks=pss(this) - before)
            for process in this.children(recursive=True):
                found[kind(process, this)] += pss(process)
            samples.append(found)

        cursor = Cursor()
        for _ in range(arguments.steps):
            for runtime in runtimes:
                runtime.request(cursor)
            for rank, runtime in enumerate(runtimes):
                planned = runtime.take()
                read_inputs = runtime.input_reader(planned)
                for micro in planned.plan.of_rank(job.mesh.place(rank).hdp):
                    read_inputs(micro)
            cursor = planned.after
            sample()
        time.sleep(_SETTLE_S)
        sample()
    return max(samples, key=lambda found: sum(found.values()))


def kind(process: psutil.Process, rank: psutil.Process) -> str:
    """Return what a process of the data plane is; the `rank` started them all."""
    words = " ".join(process.cmdline())
    if words.startswith("ray::") and "Agent" not in words:
        return "actors"
    if "-m engine.remote" in words and "guard" not in words:
        return "supervisor"
    if "multiprocessing" not in words:
        return "Ray"
    return "planning process" if process.ppid() == rank.pid else "loaders"


def pss(process: psutil.Process) -> float:
    """Return the proportional memory of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def data_loaders(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the memory of the workers of a DataLoader for each rank."""
    import psutil
    import pyarrow.parquet
    from torch.utils.data import DataLoader, IterableDataset

    class Shuffling(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            opened = [pyarrow.parquet.ParquetFile(folder / f"{number}.parquet") for number in range(arguments.sources)]
            groups = [file.read_row_group(number % GROUPS) for number, file in enumerate(opened)]
            while groups:
                yield os.getpid()

    loaders = [
        iter(DataLoader(Shuffling(), num_workers=1, batch_size=None, multiprocessing_context="fork"))
        for _ in range(arguments.ranks)
    ]
    workers = [psutil.Process(next(loader)) for loader in loaders]
    time.sleep(_SETTLE_S)
    return {"workers": sum(map(pss, workers))}


def _answer(measure: Callable[..., dict[str, float]], connection: Connection, *arguments: Any) -> None:
    connection.send(measure(*arguments))


def apart(measure: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Call a function in a new process."""
    receives, sends = Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(measure, sends, *arguments))
    process.start()
    sends.close()
    found: dict[str, float] = receives.recv()
    process.join()
    return found


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    def rows(case: str) -> Iterator[Row]:
        documents, target = CASES[case]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_sources(folder, arguments.sources, documents)
            parts = apart(ours, folder, arguments)
            shutil.rmtree(folder / "cache")
            workers = apart(data_loaders, folder, arguments)["workers"]
        whole = sum(parts.values())
        figures = {name: round(mib) for name, mib in {**parts, "all": whole, "DataLoaders": workers}.items()}
        row = {"row_groups": case, "runtime": arguments.runtime, **figures, "ratio": round(workers / whole, 2)}
        yield row | {"target": target, "holds": target is None or row["ratio"] >= target}

    for case in CASES:
        yield case, partial(rows, case)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime", choices=("local", "ray"), default="local")
    parser.add_argument("--sources", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--loaders", type=int, default=4, help="of the host")
    parser.add_argument("--steps", type=int, default=20)


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
