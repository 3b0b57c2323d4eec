"""What the agent of the first node tells the supervisor."""

from __future__ import annotations

import pytest

from engine.remote.plane import START, Plane, host_resource, namespace, of_same_run


def test_a_plane_survives_its_line() -> None:
    plane = Plane("/runs/one", [[0, 1], [2, 3]])
    assert "\n" not in plane.to_json()
    assert Plane.of_json(plane.to_json()) == plane


def test_runs_and_starts_and_hosts_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START, "first")
    first, other = namespace("/runs/one"), namespace("/runs/two")
    assert first == namespace("/runs/one") != other and not of_same_run(first, other)
    monkeypatch.setenv(START, "second")
    assert namespace("/runs/one") != first and of_same_run(namespace("/runs/one"), first)
    assert host_resource(1) != host_resource(11)
