"""What the agent of the first node tells the supervisor."""

from __future__ import annotations

from engine.remote.plane import Plane, host_resource, namespace


def test_a_plane_survives_its_line() -> None:
    plane = Plane("/runs/one", [[0, 1], [2, 3]])
    assert "\n" not in plane.to_json()
    assert Plane.of_json(plane.to_json()) == plane


def test_runs_and_hosts_have_names_of_their_own() -> None:
    assert namespace("/runs/one") == namespace("/runs/one") != namespace("/runs/two")
    assert host_resource(1) != host_resource(11)
