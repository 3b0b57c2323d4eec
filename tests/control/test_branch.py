"""Agents pass values on over real connections, without waiting for an end that does not read."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from engine.control.branch import Branch
from engine.control.link import Link
from engine.control.protocol import At, Message, Reduce, Result
from engine.control.reduction import COLLECT, GATHER, MAX, SHARE, Operation
from engine.control.sockets import Listener, connect

SECRET = b"of this run"


class Agent:
    """A branch and the ends of its ranks' links; `ranks` are those of the ranks themselves."""

    def __init__(self, ranks: int, children: int = 0, parent: Agent | None = None) -> None:
        self.listener = Listener("127.0.0.1", SECRET) if children else None
        above = connect("127.0.0.1", parent.port, SECRET) if parent is not None else None
        self.port = self.listener.port if self.listener else 0
        self.branch = Branch(ranks, children, above, self.listener)
        pairs = [[end.detach() for end in socket.socketpair()] for _ in range(ranks)]
        self.links, self.ranks = ([Link(ends[side], ends[side]) for ends in pairs] for side in (0, 1))
        self.closed = False

    def work(self) -> None:
        """Take what is there."""
        with selectors.DefaultSelector() as selector:
            for link in [*self.links, self.branch]:
                selector.register(link, selectors.EVENT_READ)
            for key, _ in selector.select(0):
                if key.fileobj is self.branch:
                    self.branch.work()
                else:
                    link: Any = key.fileobj
                    for message in link.receive():
                        self.branch.take(link, message)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.branch.close()
            for link in [*self.links, *self.ranks]:
                link.close()


@pytest.fixture
def made() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tree(made: ExitStack) -> list[Agent]:
    """A root with two children, of which the second has a child. All have two ranks."""
    agents = [Agent(2, 2)]
    agents += [Agent(2, 0, agents[0]), Agent(2, 1, agents[0])]
    agents.append(Agent(2, 0, agents[2]))
    for agent in agents:
        made.callback(agent.close)
    return agents


def until(agents: list[Agent], link: Link, seconds: float = 20) -> Message:
    """Let the agents work until there is a message for a rank."""
    last, found = time.monotonic() + seconds, list[Message]()
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while not found:
            assert time.monotonic() < last, "no answer"
            for agent in agents:
                agent.work()
            if selector.select(0.001):
                found = link.receive()
    (message,) = found
    return message


def test_values_go_up_and_the_result_comes_down(made: ExitStack) -> None:
    agents = tree(made)
    ranks = [rank for agent in agents for rank in agent.ranks]
    for kind, values, expected in (
        (MAX, [[rank, -rank] for rank in range(8)], [7, 0]),
        (GATHER, [{str(rank): "x" * rank} for rank in range(8)], {str(rank): "x" * rank for rank in range(8)}),
    ):
        for rank, value in zip(ranks, values, strict=True):
            rank.send(At(1, "plan", 0))
            rank.send(Reduce(Operation(kind, kind, value)))
        assert [until(agents, rank) for rank in ranks] == [Result(Operation(kind, kind, expected))] * 8


def test_what_is_collected_goes_to_rank_0_alone(made: ExitStack) -> None:
    """Beside collectives that are open. Nothing of it stays in other agents, which get no result."""
    agents = tree(made)
    ranks = [rank for agent in agents for rank in agent.ranks]
    parts = [Reduce(Operation("step", COLLECT, {str(number): number})) for number in range(8)]
    for rank, part in zip(ranks[1:], parts[1:], strict=True):
        rank.send(part)
    for number, rank in enumerate(ranks):
        rank.send(Reduce(Operation("it", MAX, [number])))
    assert [until(agents, rank) for rank in ranks] == [Result(Operation("it", MAX, [7]))] * 8
    ranks[0].send(parts[0])
    whole = Result(Operation("step", COLLECT, {str(rank): rank for rank in range(8)}))
    assert until(agents, ranks[0]) == whole
    assert not any(agent.branch._reduction._open for agent in agents)
    for other in (ranks[1], ranks[7]):
        with pytest.raises(AssertionError, match="no answer"):
            until(agents, other, 0.1)


def test_what_is_shared_stays_at_a_node(made: ExitStack) -> None:
    """Whatever the other nodes do, and beside a collection of the same name."""
    agents = tree(made)
    ranks = [rank for agent in agents for rank in agent.ranks]
    for number, rank in enumerate(ranks[:7]):
        rank.send(Reduce(Operation("step", COLLECT, {str(number): "x"})))
        rank.send(Reduce(Operation("step", SHARE, {str(number): number})))
    for first in (0, 2, 4):
        whole = Result(Operation("step", SHARE, {str(rank): rank for rank in (first, first + 1)}))
        assert [until(agents, rank) for rank in ranks[first : first + 2]] == [whole] * 2
    with pytest.raises(AssertionError, match="no answer"):
        until(agents, ranks[6], 0.1)
    ranks[7].send(Reduce(Operation("step", SHARE, {"7": 7})))
    assert until(agents, ranks[6]) == Result(Operation("step", SHARE, {"6": 6, "7": 7}))
    assert not any(agent.branch._shared._open for agent in agents)


def test_a_listener_closes_when_all_children_have_connected(made: ExitStack) -> None:
    agents = tree(made)
    for agent in agents:
        for rank in agent.ranks:
            rank.send(Reduce(Operation("it", MAX, [])))
    until(agents, agents[3].ranks[0])
    for agent in agents:
        if agent.port:
            with pytest.raises(ConnectionRefusedError):
                connect("127.0.0.1", agent.port, SECRET)


def test_a_rank_that_does_not_read_delays_no_other(made: ExitStack) -> None:
    """It may be stopped while the result is larger than what the kernel keeps for it. It gets all of it later."""
    agents = tree(made)
    ranks, large = [rank for agent in agents for rank in agent.ranks], "x" * 100_000
    for number, rank in enumerate(ranks):
        rank.send(Reduce(Operation("it", GATHER, {str(number): large})))
    results = [until(agents, rank) for rank in reversed(ranks[1:])]
    results.append(until(agents, ranks[0]))
    assert results == [Result(Operation("it", GATHER, {str(number): large for number in range(8)}))] * 8


def test_a_rank_and_an_agent_that_are_gone_leave_the_others_waiting(made: ExitStack) -> None:
    """The launcher ends the run; until then, nobody gets a result that is not that of all."""
    agents = tree(made)
    ranks = [rank for agent in agents for rank in agent.ranks]
    for rank in ranks[1:]:
        rank.send(Reduce(Operation("it", MAX, [1])))
    for agent in agents:
        agent.work()
    gone = agents[0].links.pop(1)
    agents[0].branch.forget(gone)
    gone.close()
    agents.pop(1).close()
    for _ in range(20):
        for agent in agents:
            agent.work()
    with selectors.DefaultSelector() as selector:
        for rank in (ranks[0], *ranks[4:]):
            selector.register(rank, selectors.EVENT_READ)
        assert not selector.select(0.1)
    ranks[0].send(Reduce(Operation("it", MAX, [2])))  # the last: its result also goes to ends that are gone
    for rank in (ranks[0], *ranks[4:]):
        assert until(agents, rank) == Result(Operation("it", MAX, [2]))
