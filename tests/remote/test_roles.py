"""What the roles of a run take from its config."""

from __future__ import annotations

import pytest

from engine.config.load import load
from engine.job import Job
from engine.remote.plane import Plane
from engine.remote.roles import RunRoles


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        (["data.loaders=3"], (6, 6)),
        (["data.ray.loaders=[4,9]", "data.loaders=3"], (4, 9)),
        (["data.ray.loaders=[1,1]"], (2, 2)),
    ],
    ids=["data.loaders", "data.ray.loaders", "each host has one"],
)
def test_the_number_of_loaders_of_all_hosts(given: list[str], bounds: tuple[int, int]) -> None:
    roles = RunRoles(Plane("", [[0, 1], [2, 3]]))
    roles.job = Job(load(["recipe=quickstart", "data.runtime=ray", *given]))
    assert roles.bounds == bounds
