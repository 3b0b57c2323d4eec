"""What the roles of a run take from its config, and which rank files a host removes."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.config.load import load
from engine.data.runtime import scaler
from engine.data.steps import Cursor
from engine.job import Job
from engine.remote import roles as module
from engine.remote.plane import Plane
from engine.remote.roles import Host, RunRoles


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
    assert roles.bounds == bounds and roles.loaders == -(-bounds[1] // 2)


def test_actors_have_the_number_of_loaders_of_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of cores their hosts have: it is that of the threads in which a host packs."""
    roles = RunRoles(Plane("", [[0, 1], [2, 3]]))
    roles.job = Job(load(["recipe=quickstart", "data.runtime=ray"]))
    monkeypatch.setattr(scaler, "cores", lambda: 8)
    assert roles.loaders == 4
    monkeypatch.setattr(scaler, "cores", lambda: 16)
    assert pickle.loads(pickle.dumps(roles)).bounds == (2, 8)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The actor of epoch 5, whose cursors are numbers of steps, and which writes nothing."""
    monkeypatch.setattr(
        module,
        "received_step",
        lambda step: SimpleNamespace(after=SimpleNamespace(step=step), table=None, plan=None),
    )
    made = cast(Any, Host.__new__(Host))
    made._caller = SimpleNamespace(call=lambda role, method, step, host: (step, {}))
    made._constructor = SimpleNamespace(build_step=lambda step, table, plan: None)
    made._blocks, made._host, made._files = SimpleNamespace(), 0, tmp_path
    made._lock, made._epoch, made._first = threading.Lock(), 5, None
    for name in ("epoch-4-old", "epoch-5-own", "epoch-11-next"):
        (tmp_path / name).mkdir()
    return cast(Host, made)


def test_files_of_who_was_here_before_are_removed_with_a_later_step(host: Host, tmp_path: Path) -> None:
    """Ranks may not have opened those of the step before the first one, also if that is asked for twice.

    Those of its successor are left: it may still be at work after it was replaced.
    """
    folders = {folder.name for folder in tmp_path.iterdir()}
    for _ in range(3):
        host.build(cast(Cursor, 7))
        assert {folder.name for folder in tmp_path.iterdir()} == folders
    host.build(cast(Cursor, 8))
    assert {folder.name for folder in tmp_path.iterdir()} == folders - {"epoch-4-old"}
