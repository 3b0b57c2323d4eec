from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.data.runtime.watching import Replaced, Role, loaders_of, plane_events, watched
from engine.errors import ConfigError, DataError
from engine.files import LOCK, locked
from engine.run.folder import RunFolder
from tests.data.runtime.planes import COST, event, write


def test_roles_and_what_became_of_actors_that_were_lost(tmp_path: Path) -> None:
    events = [
        event("taken", "planner", 1, "start"),
        event("taken", "host-0", 2, "start"),
        event("lost", "standby", 0, "ConnectionError", time=2.5),
        event("lost", "host-0", 2, "deadline", time=3.0),
        event("taken", "host-0", 3, "deadline", seconds=5.5),
        event("lost", "planner", 1, "ActorDiedError", time=4.0),
    ]
    found = watched(write(tmp_path / "run", events, [], "data.runtime=ray"))
    assert found.roles == [Role("planner", 0, 1, 101, 1.0, "ActorDiedError"), Role("host-0", 0, 3, 103, 3.0, None)]
    assert found.replaced == [
        Replaced(2.5, "standby", 0, 0, "ConnectionError", None, None),
        Replaced(3.0, "host-0", 0, 2, "deadline", 3, 5.5),
        Replaced(4.0, "planner", 0, 1, "ActorDiedError", None, None),
    ]
    assert (found.runtime, found.step, found.warnings) == ("ray", 0, [])


@pytest.mark.parametrize("why", ["start", "restart"])
def test_a_role_that_is_given_again_at_a_start_replaces_no_actor(tmp_path: Path, why: str) -> None:
    events = [event("lost", "planner", 4, "deadline"), event("taken", "planner", 5, why)]
    (found,) = watched(write(tmp_path / "run", events, [], "data.runtime=ray")).replaced
    assert (found.by, found.seconds) == (None, None)


def test_blocks_of_a_source_are_those_of_all_steps(tmp_path: Path) -> None:
    """With what an earlier version, or a damaged file, has instead."""
    lines: list[Mapping[str, Any]] = [
        {"step": 1, "packed": {"data": COST}, "plan_wait_s": 0.5, "step_s": 3.5},
        {"step": 2, "packed": {"data": COST | {"memory": 9}}},
        {"step": 3, "packed": {"data": COST | {"seconds": "x"}}},
        {"step": 4, "packed": {"data": 3}},
        {"step": 5, "packed": 3, "plan_wait_s": 0.125, "step_s": 0.5},
    ]
    found = watched(write(tmp_path / "run", [], lines))
    (source,) = found.sources
    assert (source.source, source.busy) == ("data", 0.25)  # 1 s of work in 4 s
    assert source.packed == (4, 60, 4000, 1800, 1.0, 9)
    assert (found.step, found.plan_wait_s, found.data_wait_s, found.roles) == (5, 0.125, None, [])


def scaled(step: int, host: int | None, before: int, after: int, source: str | None = None) -> dict[str, Any]:
    return {"time": 1, "what": "scaled", "step": step, "host": host, "before": before, "after": after, "source": source}


def test_loaders_are_those_of_the_last_change(tmp_path: Path) -> None:
    events = [scaled(1, None, 1, 2, "web"), scaled(4, None, 2, 5, "code"), {"time": 2, "what": "of a later version"}]
    found = watched(write(tmp_path / "run", events, []))
    assert (found.loaders, found.loaders_for) == (5, "code")
    found = watched(write(tmp_path / "new", [], []))
    assert (found.loaders, found.loaders_for) == (None, None)


def test_the_queue_is_the_last_that_was_noted(tmp_path: Path) -> None:
    events = [{"time": at, "what": "queue", "waiting": 9 - at, "packing": at} for at in (1, 2)]
    found = watched(write(tmp_path / "run", [*events, scaled(1, None, 1, 2)], []))
    assert (found.queue, found.queue_at) == ((7, 2), 2)
    found = watched(write(tmp_path / "new", [], []))
    assert (found.queue, found.queue_at) == (None, None)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], []),
        ([scaled(3, None, 1, 4), scaled(5, None, 4, 2)], [(0, 1), (3, 4), (5, 2)]),
        ([scaled(0, None, 1, 4)], [(0, 1), (1, 4)]),
        ([scaled(3, 0, 1, 4), scaled(5, 1, 2, 3)], [(0, 3), (3, 6), (5, 7)]),
        ([scaled(3, None, 1, 4), scaled(9, None, 4, 2), scaled(5, None, 4, 6)], [(0, 1), (3, 4), (5, 6)]),
    ],
    ids=["none", "changes", "before the first step", "two hosts", "steps that are run again"],
)
def test_loaders_over_steps(events: list[dict[str, Any]], expected: list[tuple[int, int]]) -> None:
    assert loaders_of(events) == expected


def test_whether_a_run_is_running_is_whether_its_folder_is_locked(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [], [])
    assert not watched(run).running
    with locked(run / LOCK):
        assert watched(run).running


@pytest.mark.parametrize(
    "line",
    [
        '{"what": "taken", "time": "x"}',
        '{"what": "x", "time": 1e300}',
        '{"what": "x", "time": true}',
        '{"what": [], "time": 1}',
        '{"what": "taken", "time": 1, "role": 3, "host": 0, "epoch": 1, "why": "", "seconds": 1}',
        '{"what": "lost", "time": 1, "role": "planner", "why": "", "seconds": 1}',
        '{"what": "lost", "time": 1, "role": "planner", "host": null, "epoch": 1, "why": "", "seconds": 1}',
        '{"what": "scaled", "time": 1, "before": 1, "after": 2}',
        '{"what": "scaled", "time": 1, "step": 1, "before": 1, "after": "b"}',
        '{"what": "scaled", "time": 1, "step": 1, "before": 1, "after": 2, "source": []}',
        '{"what": "queue", "time": 1, "waiting": 1}',
        '{"what": "queue", "time": 1, "waiting": 1, "packing": null}',
    ],
)
def test_events_with_values_of_other_types_are_left_out(tmp_path: Path, line: str) -> None:
    folder = RunFolder(tmp_path)
    folder.plane_events.mkdir()
    good = json.dumps(event("taken", "planner", 1, "start"))
    (folder.plane_events / "events-host-1.jsonl").write_text(f"{line}\n{good}\n{line}\n")
    assert plane_events(folder) == [json.loads(good)]


def test_events_that_are_no_regular_file_are_refused(tmp_path: Path) -> None:
    """A named pipe would wait for a writer."""
    folder = RunFolder(write(tmp_path / "run", [], []))
    (folder.plane_events / "events-host-1.jsonl").unlink()
    os.mkfifo(folder.plane_events / "events-host-1.jsonl")
    with pytest.raises(DataError):
        watched(folder.root)


def test_a_run_of_token_files_on_each_host_alone_has_no_data_plane(tmp_path: Path) -> None:
    tokens = ("data=tokens", "data.path=none", "model.vocab=300")
    with pytest.raises(ConfigError) as refused:
        watched(write(tmp_path / "run", [], [], *tokens))
    assert refused.value.problems[0].key == str(tmp_path / "run")
    assert watched(write(tmp_path / "ray", [], [], *tokens, "data.runtime=ray")).sources == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        watched(tmp_path)
