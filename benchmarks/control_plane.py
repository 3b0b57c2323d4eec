"""Connections, descriptors and bytes of the control plane, and its time in a step of 16,384 ranks.

`python benchmarks/control_plane.py [real | simulated | step]` prints three tables:

1. Real agents, each with eight real processes that import no torch and call the collectives of a training step.
2. Up to 512 agents with eight simulated ranks each, in a few processes. Agents are those of the engine (`Branch`) and
   connected over TCP; a rank is the end of a connection, with the messages that `Control` sends.
3. A simulated step of 16,384 ranks, with the message costs of an agent that were measured here.

A target is missed if a rank's connections, descriptors or bytes grow with the world, or if coordination takes 1 % of a
step of 5 s or more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.control.branch import Branch
from engine.control.control import Control
from engine.control.link import Link
from engine.control.protocol import Message, Reduce, Work, line_of
from engine.control.reduction import FAN_OUT, MAX, Operation, children
from engine.control.sockets import Listener, connect
from engine.launch.agents.agent import Agent
from engine.launch.agents.commands import NodeCommand
from engine.run.folder import RunFolder

RANKS = 8  # of an agent
REAL = (1, 8)  # agents
SIMULATED = (8, 64, 512)
WORKERS = 4  # processes, among which simulated agents are divided
STEPS = 10
SECRET = b"of this benchmark"

LARGEST = 2048  # agents of 16,384 ranks
STEP_S = 5.0
MOST = 0.01  # of a step
LATENCIES_S = (50e-6, 1e-3)  # of a message between hosts: a data centre's, and a slow one


def step(control: Control) -> None:
    """Call the collectives of a training step (engine/trainer/loop.py), with values of usual lengths."""
    control.check_same("0123456789abcdef" * 2)
    control.gather(None)  # problems with the host's memory
    control.largest(0.012345678901234567, 34_359_738_368, 0, False)


CALLS = 3


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    yield "real", of_real
    yield "simulated", of_simulated
    yield "step", of_a_step


def of_real() -> Iterator[driver.Row]:
    """Yield a row for each number of real agents: the same descriptors, threads and bytes hold."""
    first = None
    for agents in REAL:
        rank, ms = real(agents)
        same = (rank.descriptors, rank.threads, rank.sent, rank.received)
        first = first or same
        counts = {"real_agents": agents, "ranks": agents * RANKS}
        yield counts | asdict(rank) | {"collective_ms": ms, "holds": same == first}


def of_simulated() -> Iterator[driver.Row]:
    """Yield a row for each number of agents with simulated ranks: the same bytes of a rank hold."""
    first = None
    for agents in SIMULATED:
        world = simulated(agents)
        first = first or (world.rank_sent, world.rank_received)
        holds = (world.rank_sent, world.rank_received) == first
        yield {"agents": agents, "ranks": agents * RANKS} | asdict(world) | {"holds": holds}


def of_a_step() -> Iterator[driver.Row]:
    """Yield the measured costs of an agent, in us, then a row for each number of agents and latency."""
    costs = Costs.measured()
    yield {"take_us": 1e6 * costs.take_s, "send_us": 1e6 * costs.send_s, "look_us": 1e6 * costs.look_s}
    for agents in (*SIMULATED, LARGEST):
        for latency_s in LATENCIES_S:
            seconds = collective_s(agents, costs, latency_s)
            share = CALLS * seconds / STEP_S
            counts = {"agents": agents, "ranks": agents * RANKS, "us_between_hosts": round(1e6 * latency_s)}
            yield counts | {"collective_ms": 1e3 * seconds, "step_%": 100 * share, "holds": share < MOST}


# 1. Real agents and processes.


@dataclass(frozen=True)
class Rank:
    """The busiest rank of a world, and the agent with the most descriptors. Bytes are those of a step."""

    descriptors: int
    threads: int
    sent: int
    received: int
    agent_descriptors: int
    agent_threads: int


def real(agents: int, ranks: int = RANKS) -> tuple[Rank, float]:
    """Run processes as ranks; return the maxima over all ranks, and milliseconds per collective."""
    from engine.launch.agents.ranks import run_ranks

    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root))
        folder.logs.mkdir()
        program = [sys.executable, str(Path(__file__).resolve()), "rank", root]
        commands = []
        for first in range(0, agents * ranks, ranks):
            numbers = range(first, first + ranks)
            work = Work(root, [(rank, program) for rank in numbers], {}, gpus=False, alone=True, peer=None)
            commands.append(NodeCommand("localhost", (sys.executable, "-m", "engine.launch.agents.agent"), {}, work))
        run_ranks(commands, folder, lambda: None, lambda text: None)
        found = json.loads((folder.root / "found.json").read_text())
    return Rank(*map(max, zip(*(one["rank"] for one in found), strict=True))), median(one["ms"] for one in found)


def rank(root: Path) -> None:
    """Call the collectives of some steps on this rank; rank 0 writes what all have found."""
    link, counted = Link.to_agent(), {"sent": 0, "received": 0}
    assert link is not None
    _count(link, counted)
    control = Control(int(os.environ["RANK"]), link)
    control.largest()  # all ranks are there
    counted.update(sent=0, received=0)
    began = time.perf_counter()
    for _ in range(STEPS):
        step(control)
    ms = 1e3 * (time.perf_counter() - began) / STEPS / CALLS
    bytes_ = [round(counted[name] / STEPS) for name in ("sent", "received")]
    here, agent = (Path(f"/proc/{pid}") for pid in (os.getpid(), os.getppid()))
    numbers = [len(list((process / what).iterdir())) for process in (here, agent) for what in ("fd", "task")]
    found = control.gather({"rank": [*numbers[:2], *bytes_, *numbers[2:]], "ms": ms})
    if control.rank == 0:
        (root / "found.json").write_text(json.dumps(found))


def _count(link: Link, counted: dict[str, int]) -> None:
    """Count the bytes that are sent over a link, and those of the messages that are received."""
    write, receive = link.write, link.receive

    def counting_write(line: bytes = b"") -> bool:
        counted["sent"] += len(line)
        return write(line)

    def counting_receive() -> list[Message]:
        messages = receive()
        counted["received"] += sum(len(line_of(message)) for message in messages)
        return messages

    link.write, link.receive = counting_write, counting_receive  # type: ignore[method-assign]


# 2. Simulated ranks.


@dataclass(frozen=True)
class Simulated:
    """Maxima over the ranks and agents of a world. Bytes are those of a step."""

    rank_sent: int
    rank_received: int
    agent_connections: int
    agent_sent: int
    messages: int  # that an agent sends in a step
    cpu_us: int  # microseconds of CPU per message of any agent or rank, in all processes


class Recorded(Control):
    """Notes the operations of a rank instead of sending them: it is its own agent, whose result is the operation."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.agent: Any = self
        self.operations = list[Operation]()

    def send(self, message: Reduce) -> None:
        self.operations.append(message.operation)
        self._results.put(message.operation)


class SimulatedRank:
    """A rank's end of a connection: sends an operation, waits for the result, and sends the next."""

    def __init__(self, number: int, link: Link, steps: int) -> None:
        self.link, self.counted, self.done = link, {"sent": 0, "received": 0}, False
        _count(link, self.counted)
        control = Recorded(number)
        for _ in range(steps):
            step(control)
        self._operations = iter(control.operations)

    def go_on(self) -> None:
        """Send the next operation."""
        operation = next(self._operations, None)
        if operation is None:
            self.done = True
        else:
            self.link.send(Reduce(operation))

    def read(self) -> None:
        """Take what has arrived."""
        for _ in self.link.receive():
            self.go_on()


class SimulatedAgent:
    """A branch and its simulated ranks."""

    def __init__(self, number: int, ranks: int, below: int, parent: int | None, steps: int) -> None:
        """`parent` is the port of the parent."""
        listener = Listener("127.0.0.1", SECRET) if below else None
        self.port = listener.port if listener is not None else None
        above = connect("127.0.0.1", parent, SECRET) if parent is not None else None
        self.branch = Branch(ranks, below, above, listener)
        self.counted = {"sent": 0, "messages": 0}
        self.connections = ranks + below + (above is not None)
        pairs = [[end.detach() for end in socket.socketpair()] for _ in range(ranks)]
        self.links = [Link(ours, ours) for ours, _ in pairs]
        self.ranks = [
            SimulatedRank(number * ranks + index, Link(theirs, theirs), steps)
            for index, (_, theirs) in enumerate(pairs)
        ]
        send = self.branch._send

        def counting(links: Iterable[Link], message: Message | None = None) -> None:
            links = list(links)
            if message is not None:
                self.counted["sent"] += len(links) * len(line_of(message))
                self.counted["messages"] += len(links)
            send(links, message)

        self.branch._send = counting  # type: ignore[method-assign]

    def take(self, link: Link) -> None:
        """Take what a rank has sent."""
        for message in link.receive():
            self.branch.take(link, message)

    def close(self) -> None:
        """Close all connections."""
        self.branch.close()
        for link in (*self.links, *(rank.link for rank in self.ranks)):
            link.close()


def simulated(agents: int, ranks: int = RANKS, workers: int = WORKERS, steps: int = STEPS) -> Simulated:
    """Run the steps of simulated ranks on `agents` agents."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(min(workers, agents))]
    processes = [context.Process(target=_work, args=(theirs, ranks, steps)) for _, theirs in pipes]
    ends = [ours for ours, _ in pipes]
    for process in processes:
        process.start()
    try:
        ports: dict[int, int | None] = {}
        for first, last in _levels(agents):  # parents listen before their children are made
            of_worker = [range(first, last)[worker :: len(ends)] for worker in range(len(ends))]
            for end, numbers in zip(ends, of_worker, strict=True):
                end.send([(n, len(children(n, agents)), ports[(n - 1) // FAN_OUT] if n else None) for n in numbers])
            for end in ends:
                ports |= end.recv()
        for end in ends:
            end.send(None)
        found = [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
    rank_sent, rank_received, connections, sent, messages = map(max, zip(*(most for most, *_ in found), strict=True))
    cpu_us = 1e6 * sum(cpu_s for _, cpu_s, _ in found) / sum(count for *_, count in found)
    per_step = [round(value / steps) for value in (rank_sent, rank_received, sent, messages)]
    return Simulated(per_step[0], per_step[1], connections, per_step[2], per_step[3], round(cpu_us))


def _levels(agents: int) -> Iterator[tuple[int, int]]:
    """Yield the first agent of each level of the tree, and the first of the next."""
    first, last = 0, 1
    while first < agents:
        yield first, min(last, agents)
        first, last = last, FAN_OUT * last + 1


def _work(main_: Connection, ranks: int, steps: int) -> None:
    """Make the agents that the main process asks for, and run their ranks when it asks for no more."""
    agents = list[SimulatedAgent]()
    while (wanted := main_.recv()) is not None:
        made = {number: SimulatedAgent(number, ranks, below, parent, steps) for number, below, parent in wanted}
        agents += made.values()
        main_.send({number: agent.port for number, agent in made.items()})
    began = time.process_time()
    with selectors.EpollSelector() as selector:
        for agent in agents:
            selector.register(agent.branch, selectors.EVENT_READ, agent.branch.work)
            for link in agent.links:
                selector.register(link, selectors.EVENT_READ, partial(agent.take, link))
            for rank in agent.ranks:
                selector.register(rank.link, selectors.EVENT_READ, rank.read)
                rank.go_on()
        while not all(rank.done for agent in agents for rank in agent.ranks):
            for key, _ in selector.select():
                key.data()
    cpu_s = time.process_time() - began
    of_ranks = [rank.counted for agent in agents for rank in agent.ranks]
    most = (
        max(one["sent"] for one in of_ranks),
        max(one["received"] for one in of_ranks),
        max(agent.connections for agent in agents),
        max(agent.counted["sent"] for agent in agents),
        max(agent.counted["messages"] for agent in agents),
    )
    count = sum(agent.counted["messages"] for agent in agents) + len(of_ranks) * CALLS * steps
    main_.send((most, cpu_s, count))
    with suppress(EOFError):
        main_.recv()  # other processes may still need these agents


# 3. A step of many ranks.


@dataclass(frozen=True)
class Costs:
    """Seconds that an agent takes for a message."""

    take_s: float  # to wait for one message, receive and combine it
    send_s: float  # per message that is sent
    look_s: float  # after each time it has waited, to look whether its ranks have ended

    @classmethod
    def measured(cls, repeats: int = 300) -> Costs:
        """Measure an agent with as many members as any agent has."""
        members = RANKS + FAN_OUT
        pairs = [[end.detach() for end in socket.socketpair()] for _ in range(members)]
        ours, theirs = ([Link(ends[side], ends[side]) for ends in pairs] for side in (0, 1))
        branch, taken, sent = Branch(members), list[float](), list[float]()
        with selectors.DefaultSelector() as selector:
            for link in ours:
                selector.register(link, selectors.EVENT_READ)
            for turn in range(repeats):
                for number, link in enumerate(theirs):
                    value = [0.012345678901234567, 34_359_738_368, 0, 0.0]
                    link.send(Reduce(Operation(f"/{turn}", MAX, value)))
                    began = time.perf_counter()
                    ((key, _),) = selector.select()
                    found: Any = key.fileobj
                    for message in found.receive():
                        branch.take(found, message)
                    (sent if number == members - 1 else taken).append(time.perf_counter() - began)
                for link in theirs:
                    link.receive()
        for link in (*ours, *theirs):
            link.close()
        branch.close()
        take_s = median(taken)
        return cls(take_s, max(0.0, median(sent) - take_s) / members, _look_s(repeats))


def _look_s(repeats: int) -> float:
    """Measure how long an agent with eight ranks takes to look whether they have ended."""
    with tempfile.TemporaryDirectory() as root:
        RunFolder(Path(root)).logs.mkdir()
        ends = [end.detach() for end in socket.socketpair()]
        launcher, other = (Link(end, end) for end in ends)
        agent = Agent(launcher)
        ranks = [(rank, ["sleep", "60"]) for rank in range(RANKS)]
        agent._start(Work(root, ranks, {}, gpus=False, alone=True, peer=None), None)
        taken = []
        try:
            for _ in range(repeats):
                began = time.perf_counter()
                agent._report()
                taken.append(time.perf_counter() - began)
        finally:
            agent.close()
            launcher.close()
            other.close()
    return median(taken)


def collective_s(agents: int, costs: Costs, latency_s: float, ranks: int = RANKS) -> float:
    """Simulate a collective: seconds from when all ranks call it until the last has its result.

    Each agent takes one message at a time. It looks after its ranks after each, as if no two arrived together, and a
    message to a child is always the last that it sends.
    """
    take_s = costs.take_s + costs.look_s
    sent = [0.0] * agents  # when an agent has combined all values
    for number in reversed(range(agents)):
        arrivals = sorted([0.0] * ranks + [sent[child] + latency_s for child in children(number, agents)])
        now = 0.0
        for arrival in arrivals:
            now = max(now, arrival) + take_s
        sent[number] = now + costs.send_s
    last, answered = 0.0, [sent[0]] + [0.0] * (agents - 1)
    for number in range(agents):
        members = children(number, agents)
        done = answered[number] + (ranks + len(members)) * costs.send_s
        last = max(last, done)
        for child in members:
            answered[child] = done + latency_s + take_s
    return last


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(Path(sys.argv[2]))
    else:
        sys.exit(driver.main(__doc__, cases))
