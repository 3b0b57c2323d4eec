"""What the launcher makes of agents that are silent, with a stand-in for their launcher."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

from engine.control.link import SILENCE_S, Link
from engine.control.protocol import Hello
from engine.errors import ExitCode
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.launchers import Loss
from engine.launch.agents.nodes import Nodes
from engine.run.folder import RunFolder
from tests.launch.agents.nodes import node


class Brings:
    """A launcher whose agents can be reached at once, over these links."""

    answer_s, restarts = 60.0, True

    def __init__(self, *links: Link) -> None:
        self._new = list(enumerate(links))

    def start(self, commands: Sequence[NodeCommand], folder: RunFolder) -> None:
        pass

    def poll(self) -> list[tuple[int, Link]]:
        found, self._new = self._new, []
        return found

    def lost(self, node: int, answered: bool, silent_s: float | None) -> Loss:
        return Loss("was lost", ExitCode.HANG, "look there")

    def absent(self, node: int) -> Loss:
        raise NotImplementedError

    def secret_for(self, node: int) -> None:
        return None

    def stop(self) -> None:
        pass


def test_an_agent_is_lost_when_it_is_silent_after_it_has_answered(tmp_path: Path) -> None:
    """Not while its Python starts, which may take long where many hosts read it from one file system."""
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, agent = Link(ours, ours), Link(theirs, theirs)
    now = 0.0
    with Nodes(
        [node(RunFolder(tmp_path), "pass")], RunFolder(tmp_path), Brings(link), lambda rank, pace: None
    ) as nodes:
        nodes._clock = lambda: now  # type: ignore[assignment]
        nodes.look(0)
        now += 2 * SILENCE_S
        nodes.look(0)
        assert nodes.ends == {}
        agent.send(Hello())
        while not nodes.nodes[0].hello:
            nodes.look(0.1)
        now += 0.9 * SILENCE_S
        nodes.look(0)
        assert nodes.ends == {}
        now += 0.2 * SILENCE_S
        nodes.look(0)
        assert nodes.ends[0].code == ExitCode.HANG and "localhost" in str(nodes.ends[0].cause)
    for one in (link, agent):
        one.close()


def test_of_many_nodes_all_are_looked_at_each_second_only(tmp_path: Path) -> None:
    """Looking at thousands of ranks 20 times a second, or after each beat, would take a core of the launcher."""
    for many, times in ((256, 64), (257, 4)):
        folder = RunFolder(tmp_path)
        nodes = Nodes([node(folder, "pass")] * many, folder, Brings(), lambda rank, pace: None)
        nodes._clock = partial(next, count(0.0, 1 / 16))  # type: ignore[assignment]
        looked = 0
        for _ in range(64):
            nodes.look(0)
            looked += nodes.looked
        assert looked == times
        nodes._selector.close()
