"""Views travel as lines."""

from __future__ import annotations

from engine.remote.view import PLANNER, Member, Process, View, host_of, host_role
from tests.remote.in_memory import MemoryBoard, view_of


def test_a_view_survives_its_line() -> None:
    view = View(3, 9, {"host-0": Member("a", 0, Process(1, 2), 9), "planner": Member("b", 1, Process(3, 4), 8)})
    assert View.of_json(view.to_json()) == view
    assert "\n" not in view.to_json()


def test_roles_name_their_hosts() -> None:
    assert [host_of(host_role(host)) for host in (0, 11)] == [0, 11] and host_of(PLANNER) is None


def test_a_version_is_published_once() -> None:
    board = MemoryBoard()
    assert board.newest() is None
    assert board.publish(view_of(1, planner=1)) and not board.publish(view_of(1, planner=2))
    assert board.newest() == view_of(1, planner=1) and board.newest(1) is None
