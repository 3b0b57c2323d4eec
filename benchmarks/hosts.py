"""How often several hosts tokenize each document: with a `data.cache` each, sharing blocks or not.

    python benchmarks/hosts.py [1 | 2 | 4 | 2/peers | ...] [--sources 8] [--megabytes 12] [--steps 3]

Hosts are processes with a cache and loaders each, which plan the same steps and write the rank files of their ranks:
those of the local runtime without sharing and with peers, or the actors of data.runtime=ray. No launcher has packed
anything, so the hosts pack all blocks that the steps open, and some that are packed ahead. `documents` are those in the
caches of all hosts at the end, `ratio` is to those of different blocks. The target is 1.01, and equal steps everywhere.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
from engine.remote.node import NodeRay, token_of
from engine.remote.plane import START, Plane, namespace
from engine.remote.view import host_role
from engine.run.folder import RunFolder

TARGET = 1.01
RANKS = 2  # of a host
SECRET = b"of the run"
MEMORY = 400 << 20  # of the Ray of a host


def write_sources(folder: Path, sources: int, megabytes: int) -> None:
    """Write JSON lines of random words, in documents of 100 B to 100 KB."""
    drawn = random.Random(0)
    for number in range(sources):
        with (folder / f"s{number}.jsonl").open("w") as file:
            while file.tell() < megabytes << 20:
                size = int(100 * 1000 ** drawn.random())
                file.write(json.dumps({"text": drawn.randbytes(size // 2).hex()}) + "\n")


def config_of(folder: Path, cache: Path | None, hosts: int, sources: int) -> Config:
    """Return the config of a host; without a cache it has the one of XDG_CACHE_HOME."""
    paths = [f"data.sources.s{number}.path={folder / f's{number}.jsonl'}" for number in range(sources)]
    mix = f"data.mix={{{', '.join(f's{number}: 1' for number in range(sources))}}}"
    cluster = ["cluster=local", f"cluster.nodes={hosts}", f"cluster.ranks_per_node={RANKS}"]
    sizes = ["context=64K", f"capacity={(64 << 10) // RANKS // hosts}", "batch_tokens=128K", "data.loaders=1"]
    runs = ["data.runtime=ray"] if cache is None else [f"data.cache={cache}"]
    return load(["recipe=quickstart", "data=jsonl", *paths, mix, *cluster, *sizes, *runs])


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


def prepare(top: Path, config: Config) -> RunFolder:
    """Make the run folder, as the launcher does."""
    folder = RunFolder(top / "run")
    folder.root.mkdir()
    corpora = Corpora(config)
    corpora.are_few = False  # else they would be counted
    write_facts(folder, config, corpora, 0)
    return folder


def locally(top: Path, caches: Sequence[Path], share: bool, sources: int, steps: int) -> Row:
    """Let the local runtime of all hosts take the steps."""
    hosts, names = len(caches), [identity_of(cache) for cache in caches]
    configs = [config_of(top, cache, hosts, sources) for cache in caches]
    folder = prepare(top, configs[0])
    with ExitStack() as stack:
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
    return {"planning_cpu_s": round(sum(seconds for _, seconds in found), 1), "digests": found[0][0]}


def actors(folder: RunFolder, hosts: int, steps: int, answers: Connection) -> None:
    """Call the actors of all hosts as their planning processes do; send the digests that each host got."""
    from engine.remote import cluster  # imports ray, which reads the environment

    ranks = [list(range(number * RANKS, (number + 1) * RANKS)) for number in range(hosts)]
    with subprocess.Popen([sys.executable, "-m", "engine.remote"], stdin=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdin is not None
        print(Plane(str(folder.root), ranks).to_json(), file=supervisor.stdin, flush=True)
        cluster.connect(namespace(folder.root))
        caller, roles = cluster.open_caller(namespace(folder.root)), [host_role(number) for number in range(hosts)]

        def of_all(method: str, *arguments: Any) -> list[Any]:
            return [answer.result() for answer in [caller.start(role, method, *arguments) for role in roles]]

        of_all("build_sets", Cursor().order)
        cursor, digests = Cursor(), list[list[str]]()
        for _ in range(steps):
            planned = [received_step(sent) for sent, _ in of_all("build", cursor)]
            digests.append([one.plan.digest for one in planned])
            cursor = planned[0].after
        caller.close()
        supervisor.stdin.close()
    cluster.disconnect()
    answers.send(digests)


def over_ray(top: Path, caches: Sequence[Path], sources: int, steps: int) -> Row:
    """Let a Ray of all hosts, on this machine, take the steps. Each has the cache of its XDG_CACHE_HOME."""
    nodes, token, kept = list[NodeRay](), token_of(SECRET), dict(os.environ)
    folder = prepare(top, config_of(top, None, len(caches), sources))
    try:
        for number, cache in enumerate(caches):
            log, variables = top / f"ray-{number}.log", {**kept, "XDG_CACHE_HOME": str(cache)}
            if number:
                nodes.append(NodeRay.join(nodes[0].address, "127.0.0.1", number, MEMORY, token, log, variables))
            else:
                nodes.append(NodeRay.start_head("127.0.0.1", number, MEMORY, token, log, variables))
        for node in nodes:
            assert all("up" in message for message in node.receive()), "Ray does not start"
        os.environ.update(nodes[0].environment | {START: "1"})
        ours, theirs = Pipe()
        process = multiprocessing.get_context("spawn").Process(target=actors, args=(folder, len(caches), steps, theirs))
        process.start()
        theirs.close()
        digests = ours.recv()
        process.join()
    finally:
        for node in reversed(nodes):
            node.end()
        os.environ.clear()
        os.environ.update(kept)
    assert all(len(set(of_step)) == 1 for of_step in digests), "hosts have different steps"
    return {"planning_cpu_s": None, "digests": [of_step[0] for of_step in digests]}


def run(hosts: int, sharing: str, sources: int, megabytes: int, steps: int) -> Row:
    """Return what is in the caches of all hosts after some steps, and the processor time of planning processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        top = Path(root)
        write_sources(top, sources, megabytes)
        caches = [top / f"cache-{number}" for number in range(hosts)]
        if sharing == "ray":
            found = over_ray(top, caches, sources, steps)
        else:
            found = locally(top, caches, sharing == "peers", sources, steps)
        parts = [[path.with_suffix("") for path in cache.rglob("*.idx")] for cache in caches]
        documents = [{part.name: len(TokenFile.open(part)) for part in of_host} for of_host in parts]
        once = sum({name: size for of_host in documents for name, size in of_host.items()}.values())
        packed = sum(sum(of_host.values()) for of_host in documents)
        blocks = " + ".join(str(len(of_host)) for of_host in parts)
        return {"ratio": round(packed / once, 3), "documents": packed, "blocks": blocks, **found}


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    sizes = arguments.sources, arguments.megabytes, arguments.steps

    def rows(hosts: int, sharing: str) -> Iterator[Row]:
        row = {"hosts": hosts, "sharing": sharing, **run(hosts, sharing, *sizes)}
        yield row | {"holds": (hosts > 1 and sharing == "none") or row["ratio"] <= TARGET}

    for hosts in (1, 2, 4):
        for sharing in ("none", "peers", "ray") if hosts > 1 else ("none", "ray"):
            yield f"{hosts}/{sharing}", partial(rows, hosts, sharing)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=12, help="of each source")
    parser.add_argument("--steps", type=int, default=3)


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
