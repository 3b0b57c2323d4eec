"""How often several hosts tokenize each document: with a `data.cache` each, sharing blocks or not.

    python benchmarks/hosts.py [1 | 2 | 4] [--sources 8] [--megabytes 12] [--steps 3]

Hosts are processes with a cache and loaders each, which plan the same steps and write the rank files of their ranks.
No launcher has packed anything, so the hosts pack all blocks that the steps open. Documents are counted in the caches
of all hosts at the end; `ratio` is to those of one host. The target is 1.01, and equal steps on all hosts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from benchmarks.driver import Row
from engine.config.load import load
from engine.config.schema import Config
from engine.control.sockets import reserved
from engine.data.blocks.peers import Hosts
from engine.data.cache import identity_of
from engine.data.overview import Corpora
from engine.data.runtime.hosts import NodeHosts
from engine.data.runtime.local import NodePlanner
from engine.data.runtime.planner import received_step
from engine.data.steps import Cursor
from engine.data.token_file import TokenFile
from engine.job import Job
from engine.launch.prepare import write_facts
from engine.run.folder import RunFolder

TARGET = 1.01
RANKS = 2  # of a host
SECRET = b"of the run"


def write_sources(folder: Path, sources: int, megabytes: int) -> None:
    """Write JSON lines of random words, in documents of 100 B to 100 KB."""
    drawn = random.Random(0)
    for number in range(sources):
        with (folder / f"s{number}.jsonl").open("w") as file:
            while file.tell() < megabytes << 20:
                size = int(100 * 1000 ** drawn.random())
                file.write(json.dumps({"text": drawn.randbytes(size // 2).hex()}) + "\n")


def config_of(folder: Path, cache: Path, hosts: int, sources: int) -> Config:
    paths = [f"data.sources.s{number}.path={folder / f's{number}.jsonl'}" for number in range(sources)]
    mix = f"data.mix={{{', '.join(f's{number}: 1' for number in range(sources))}}}"
    cluster = ["cluster=local", f"cluster.nodes={hosts}", f"cluster.ranks_per_node={RANKS}"]
    sizes = ["context=64K", f"capacity={(64 << 10) // RANKS // hosts}", "batch_tokens=128K", "data.loaders=1"]
    return load(["recipe=quickstart", "data=jsonl", f"data.cache={cache}", *paths, mix, *cluster, *sizes])


def host(folder: RunFolder, config: Config, others: NodeHosts | None, steps: int, answers: Connection) -> None:
    """Plan the steps as the planning process of a host does; send their digests, and the processor seconds."""
    began, digests, cursor = time.process_time(), list[str](), Cursor()
    planner = NodePlanner.of(folder, Job(config), 0, others)
    planner.validation(Cursor().order)
    for _ in range(steps):
        planned = received_step(*planner.step(cursor))
        digests.append(planned.plan.digest)
        cursor = planned.after
    answers.send((digests, time.process_time() - began))
    answers.recv()  # others may still need blocks of this host
    planner.close()


def run(hosts: int, share: bool, sources: int, megabytes: int, steps: int) -> dict[str, Any]:
    """Return what is in the caches of all hosts after some steps, and the processor time of planning processes."""
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        top = Path(root)
        write_sources(top, sources, megabytes)
        caches = [top / f"cache-{number}" for number in range(hosts)]
        configs = [config_of(top, cache, hosts, sources) for cache in caches]
        folder = RunFolder(top / "run")
        folder.root.mkdir()
        corpora = Corpora(configs[0])
        corpora.are_few = False  # else they would be counted
        write_facts(folder, configs[0], corpora, 0)

        names = [identity_of(cache) for cache in caches]
        ports = [int(stack.enter_context(reserved("127.0.0.1")).getsockname()[1]) for _ in range(hosts)]
        context, running = multiprocessing.get_context("spawn"), list[tuple[Any, Connection]]()
        for number, config in enumerate(configs):
            places = {name: ("127.0.0.1", port) for name, port in zip(names, ports, strict=True)}
            place = places.pop(names[number])
            files = top / f"files-{number}"
            files.mkdir()
            ranks = range(number * RANKS, (number + 1) * RANKS)
            others = NodeHosts(Hosts(names[number], *place, SECRET, places), files, ranks) if share else None
            ours, theirs = Pipe()
            process = context.Process(target=host, args=(folder, config, others, steps, theirs))
            process.start()
            theirs.close()
            running.append((process, ours))
        found = [ours.recv() for _, ours in running]
        for process, ours in running:
            ours.send(None)
            process.join()
        assert all(digests == found[0][0] for digests, _ in found), "hosts plan different steps"
        parts = [[path.with_suffix("") for path in cache.rglob("*.idx")] for cache in caches]
        return {
            "documents": sum(len(TokenFile.open(part)) for of_host in parts for part in of_host),
            "blocks": " + ".join(str(len(of_host)) for of_host in parts),
            "planning_cpu_s": round(sum(seconds for _, seconds in found), 1),
            "digests": found[0][0],
        }


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    sizes = arguments.sources, arguments.megabytes, arguments.steps
    one = list[int]()

    def rows(hosts: int) -> Iterator[Row]:
        if not one:
            one.append(run(1, False, *sizes)["documents"])
        for share in (False, True) if hosts > 1 else (False,):
            found = run(hosts, share, *sizes)
            ratio = found["documents"] / one[0]
            row = {"hosts": hosts, "share": share, "ratio": round(ratio, 3), **found}
            yield row | {"holds": not (share or hosts == 1) or ratio <= TARGET}

    for hosts in (1, 2, 4):
        yield str(hosts), partial(rows, hosts)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=12, help="of each source")
    parser.add_argument("--steps", type=int, default=3)


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
