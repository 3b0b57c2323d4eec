"""What a rank reports of its place in a step."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from engine.control import progress
from engine.control.link import Link
from engine.control.protocol import At, Pace, Planned


@pytest.fixture
def agent() -> Iterator[Link]:
    """The agent's end of the link to which this process reports."""
    ours, theirs = (end.detach() for end in socket.socketpair())
    agent, rank = Link(ours, ours), Link(theirs, theirs)
    progress.report_to(rank)
    yield agent
    progress.report_to(None)
    rank.close()


def test_a_step_begins_with_its_first_report_and_lasts(agent: Link) -> None:
    progress.report("plan", step=7)
    progress.report("forward", 2)
    progress.report("update")
    assert agent.receive() == [At(7, "plan", 0), At(7, "forward", 2), At(7, "update", 0)]
    agent.close()


def test_what_the_plan_says_is_told(agent: Link) -> None:
    progress.tell_planned(2.5)
    progress.tell_pace(1.25)
    assert agent.receive() == [Planned(2.5), Pace(1.25)]
    agent.close()


def test_a_rank_whose_agent_is_gone_does_not_fail_there(agent: Link) -> None:
    """The thread that listens to the agent ends it, in order."""
    agent.close()
    progress.report("plan", step=8)
    progress.tell_planned(2.5)


def test_without_an_agent_nothing_is_reported() -> None:
    progress.report_to(None)
    progress.report("plan", step=9)
    progress.tell_planned(2.5)


def test_chaos_gets_each_phase_and_moment_after_the_agent_has(agent: Link) -> None:
    """So the launcher knows where the rank was when it was harmed."""
    passed = list[tuple[object, ...]]()
    progress.allow_chaos(lambda step, phase: passed.append((step, phase, agent.receive() if step else None)))
    progress.report("plan", step=7)
    progress.allow_chaos(lambda step, phase: passed.append((step, phase)))
    progress.reach("rename")
    progress.allow_chaos(None)
    progress.report("log")
    assert passed == [(7, "plan", [At(7, "plan", 0)]), (7, "rename")]
    agent.close()


def test_the_phases_of_micro_batches_are_phases() -> None:
    assert set(progress.OF_PASSES) < set(progress.PHASES)
    order = [progress.PHASES.index(phase) for phase in progress.OF_PASSES]
    assert order == list(range(order[0], order[0] + len(order))), "in one piece, in the order of a micro-batch"
