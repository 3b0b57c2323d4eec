"""Latency of a fetch at the planner on Ray: light clients stand for the hosts of a run, and get the cut of each step.

    python benchmarks/clients.py [--clients 1024 4096] [--rounds 3] [--step-s 16] [--json]

The server is that of a run: Ray, the planner's actor, which plans steps of 64 sources for hosts of 8 ranks, and the
actor of one host, which packs them. A client calls the planner as the actor of its host does, and once a step. Calls of
many clients come from a few processes, so Ray has few connections; in a run it has one for each host.

Clients begin at random times of a step; latency counts from these times to the answer, so neither a slow server nor a
slow client hides. The smaller sizes are measured with two lengths of a step. With the longer one a client fetches as
often as with the most clients. With the shorter one the planner has as many fetches a second, so this row shows what
more clients alone cost: ratios, of the median and of the 99th percentile, are to it, and the target is 1.5.

`burst_s` is another step, in which all clients begin at once, as after a barrier, until the last one has its cut. Steps
are planned before. Rows take turns in each round. `cpu_ms` is processor time of the planner's actor for a fetch, and
`bytes` those of an answer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from benchmarks.driver import Row
from engine.config.load import load
from engine.data.overview import Corpora
from engine.data.steps import Cursor
from engine.launch.prepare import write_facts
from engine.remote.caller import Caller
from engine.remote.node import NodeRay, token_of
from engine.remote.plane import START, Plane, namespace
from engine.remote.roles import PlannedStep, RunRoles
from engine.remote.view import PLANNER, Member, View, host_role
from engine.run.folder import RunFolder
from engine.units import Floats

TARGET, SHARES = 1.5, (50, 99)
RANKS, CAPACITY = 8, 1024  # of a host; of a rank
PROCESSES = 2  # that have the clients
_SAMPLED = 64  # of so many answers the size of one is taken
_UP_S, _ANSWERS_S = 300.0, 600.0


def write_sources(folder: Path, sources: int, documents: int) -> None:
    """Write JSON lines of random letters, in documents of 40 to 220 bytes."""
    drawn = random.Random(0)
    letters = drawn.randbytes(1 << 16).hex()
    for number in range(sources):
        texts = [letters[at : at + drawn.randrange(40, 220)] for at in drawn.choices(range(1 << 16), k=documents)]
        (folder / f"s{number}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))


def prepare(folder: Path, hosts: int, sources: int) -> RunFolder:
    """Make the run folder of a run of so many hosts, as the launcher does."""
    paths = [f"data.sources.s{number}.path={folder / f's{number}.jsonl'}" for number in range(sources)]
    mix = f"data.mix={{{', '.join(f's{number}: {1 + number % 3}' for number in range(sources))}}}"
    cluster = [f"cluster.nodes={hosts}", f"cluster.ranks_per_node={RANKS}", "data.runtime=ray", "data.loaders=2"]
    sizes = [f"capacity={CAPACITY}", f"batch_tokens={hosts * RANKS * CAPACITY}", "data.validation_share=0"]
    config = load(["recipe=quickstart", "data=jsonl", *paths, mix, f"data.cache={folder / 'cache'}", *cluster, *sizes])
    run = RunFolder(folder / f"run-{hosts}")
    run.root.mkdir()
    corpora = Corpora(config)
    corpora.are_few = False  # else they would be counted
    write_facts(run, config, corpora, 0)
    return run


@contextmanager
def ray(folder: Path) -> Iterator[None]:
    """Run the Ray of one host; how to connect is in the environment."""
    node = NodeRay.start_head("127.0.0.1", 0, 1 << 30, token_of(b"of the run"), folder / "ray.log")
    try:
        os.environ.update(node.environment | {START: "1"})
        messages = list[Any]()
        while not messages:
            messages += node.receive()
        assert "up" in messages[0], messages
        yield
    finally:
        node.end()


class Server:
    """The planner of a run of so many hosts. Of the hosts only the first one exists, so it packs all blocks."""

    def __init__(self, folder: Path, hosts: int, sources: int) -> None:
        from engine.remote.cluster import RayBoard, RayFleet, open_caller

        self.hosts, self.run = hosts, prepare(folder, hosts, sources)
        space = namespace(self.run.root)
        plane = Plane(str(self.run.root), np.arange(hosts * RANKS).reshape(-1, RANKS).tolist())
        fleet, members = RayFleet(space, RunRoles(plane)), dict[str, Member]()
        for epoch, role in enumerate((host_role(0), PLANNER), start=1):
            actor = fleet.start(0)
            members[role] = Member(actor, 0, fleet.beat(actor).result(_UP_S).process, epoch)
        RayBoard(space).publish(View(1, len(members), members))
        for role, member in members.items():
            fleet.become(member.actor, role, member.epoch).result(_UP_S)
        self._process = psutil.Process(members[PLANNER].process.pid)
        self._caller, self.cursor = open_caller(space), Cursor()
        self.plan_s = list[float]()

    def plan(self) -> Cursor:
        """Let the planner plan the next step; return its cursor."""
        began, cursor = self.processor_s(), self.cursor
        found: PlannedStep = self._caller.call(PLANNER, "step", cursor, 1)
        self.plan_s.append(self.processor_s() - began)
        self.cursor = found.sent.after
        return cursor

    def processor_s(self) -> float:
        """Return the processor time of the planner's actor until now."""
        times = self._process.cpu_times()
        return float(times.user + times.system)


class Calls:
    """Calls of some clients in flight: when each is answered, and the bytes of some answers."""

    def __init__(self, count: int) -> None:
        self.latency, self.sizes, self._left = np.empty(count), list[int](), threading.Semaphore(0)

    def start(self, caller: Caller, number: int, due: float, cursor: Cursor, host: int) -> None:
        caller.start(PLANNER, "step", cursor, host).add_done_callback(partial(self._done, number, due))

    def _done(self, number: int, due: float, answer: Future[PlannedStep]) -> None:
        self.latency[number] = time.monotonic() - due
        if number % _SAMPLED == 0:
            self.sizes.append(len(pickle.dumps(answer.result())))
        self._left.release()

    def wait(self) -> None:
        for _ in self.latency:
            assert self._left.acquire(timeout=_ANSWERS_S)


def clients(orders: Connection) -> None:
    """Be some clients: at an order, each calls the planner at its time; send the latencies and bytes of the answers."""
    from engine.remote import cluster  # imports ray, which reads the environment

    callers = dict[str, Caller]()
    while True:
        space, cursor, hosts, times = orders.recv()
        if not callers:
            cluster.connect(space)
        if space not in callers:
            callers[space] = cluster.open_caller(space)
            callers[space].call(PLANNER, "step", cursor, 1)  # learns where the planner is
        orders.send(None)
        began, calls = orders.recv(), Calls(len(hosts))
        for number, (host, at) in enumerate(zip(hosts, times, strict=True)):
            time.sleep(max(0.0, began + at - time.monotonic()))
            calls.start(callers[space], number, began + at, cursor, host)
        calls.wait()
        orders.send((calls.latency, calls.sizes))


def fetches(server: Server, processes: Sequence[Connection], step_s: float, seed: int) -> tuple[Floats, list[int]]:
    """Let all clients fetch a step, at random times of it; return latencies in seconds, and bytes of some answers."""
    times = np.sort(np.random.default_rng(seed).uniform(0, step_s, server.hosts))
    hosts = np.random.default_rng(seed + 1).permutation(server.hosts)
    cursor = server.plan()
    for number, process in enumerate(processes):
        own = slice(number, None, len(processes))
        process.send((namespace(server.run.root), cursor, hosts[own].tolist(), times[own].tolist()))
    for process in processes:
        process.recv()
    began = time.monotonic() + 0.1
    for process in processes:
        process.send(began)
    found = [process.recv() for process in processes]
    return np.concatenate([latency for latency, _ in found]), [size for _, sizes in found for size in sizes]


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ExitStack() as stack:
        folder = Path(name)
        tokens = max(arguments.clients) * RANKS * CAPACITY
        write_sources(folder, arguments.sources, tokens // 100 // arguments.sources)  # about a step
        stack.enter_context(ray(folder))
        from engine.remote import cluster  # imports ray, which reads the environment

        pairs = [Pipe() for _ in range(PROCESSES)]
        spawn = multiprocessing.get_context("spawn")
        for _, theirs in pairs:
            process = spawn.Process(target=clients, args=(theirs,), daemon=True)
            process.start()
            stack.callback(process.kill)
        orders = [ours for ours, _ in pairs]
        cluster.connect("clients")
        stack.callback(cluster.disconnect)
        servers = [Server(folder, hosts, arguments.sources) for hosts in arguments.clients]
        for server in servers:
            fetches(server, orders, 0, 0)  # warms up
        most = max(arguments.clients)
        lengths = [(server, arguments.step_s * part) for server in servers for part in sorted({server.hosts / most, 1})]
        measured = [Measured(server, step_s) for server, step_s in lengths]
        for seed in range(arguments.rounds):
            for one in measured:
                one.take(orders, seed)
        for one in measured:
            yield one.row(measured[0])


class Measured:
    """What fetches of a server take, with steps of a length."""

    def __init__(self, server: Server, step_s: float) -> None:
        self.server, self.step_s = server, step_s
        self.latencies, self.sizes, self.bursts, self.used = list[Floats](), list[int](), list[float](), 0.0

    def take(self, orders: Sequence[Connection], seed: int) -> None:
        """Let all clients fetch a step at random times, and another one at once."""
        before, planned = self.server.processor_s(), sum(self.server.plan_s)
        latency, sizes = fetches(self.server, orders, self.step_s, seed)
        self.used += self.server.processor_s() - before - (sum(self.server.plan_s) - planned)
        self.latencies.append(latency)
        self.sizes += sizes
        self.bursts.append(float(fetches(self.server, orders, 0, seed)[0].max()))

    def percentile(self, share: int) -> float:
        """Return that of the latencies, in seconds."""
        return float(np.percentile(np.concatenate(self.latencies), share))

    def row(self, first: Measured) -> Row:
        """Return the figures, with ratios to the first ones."""
        count = sum(map(len, self.latencies))
        ratios = {f"p{share}_ratio": round(self.percentile(share) / first.percentile(share), 2) for share in SHARES}
        return {
            "clients": self.server.hosts,
            "step_s": self.step_s,
            "fetches": count,
            **{f"p{share}_ms": 1000 * self.percentile(share) for share in SHARES},
            **ratios,
            "cpu_ms": 1000 * self.used / count,
            "bytes": int(np.median(self.sizes)),
            "plan_s": float(np.median(self.server.plan_s)),
            "burst_s": float(np.median(self.bursts)),
            "holds": max(ratios.values()) <= TARGET,
        }


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    yield "ray", partial(measure, arguments)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--sources", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=16.0, help="the longer one")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(driver.main(__doc__, cases, options))
