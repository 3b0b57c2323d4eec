"""Events of the data plane: several processes append them, and a crash may cut one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from engine.data.blocks.work import Queued
from engine.data.runtime import events
from engine.data.runtime.events import QUEUE, EventLog, QueueLog, read_events
from engine.run.folder import RunFolder


def test_events_of_several_writers_are_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process, of whichever host, has a file of its own."""
    folder = RunFolder(tmp_path)
    assert read_events(folder) == []
    with closing(EventLog(folder)) as one:
        monkeypatch.setattr(socket, "gethostname", lambda: "another host")
        other = EventLog(folder)
        one.scaled(3, 0, 1, 4, "web")
        other.note("lost", role="planner", host=1)
        one.scaled(4, None, 4, 1, None)
        other.close()
    assert len([*folder.plane_events.iterdir()]) == 2
    found = read_events(folder)
    times = [event.pop("time") for event in found]
    assert times == sorted(times)
    assert found == [
        {"what": "scaled", "step": 3, "host": 0, "before": 1, "after": 4, "source": "web"},
        {"what": "lost", "role": "planner", "host": 1},
        {"what": "scaled", "step": 4, "host": None, "before": 4, "after": 1, "source": None},
    ]


@pytest.mark.parametrize("rest", [b'{"time": 1, "wh', b"[1]\n", b"\xff\n", b'{"what": "lost"}\n'])
def test_what_a_crash_has_left_of_a_line_is_dropped(tmp_path: Path, rest: bytes) -> None:
    folder = RunFolder(tmp_path)
    with closing(EventLog(folder)) as log:
        log.note("lost")
    with next(folder.plane_events.iterdir()).open("ab") as file:
        file.write(rest)
    assert [event["what"] for event in read_events(folder)] == ["lost"]


def queues(folder: RunFolder, holds: Callable[[list[Queued]], bool] = bool) -> list[Queued]:
    """The queues that were noted, as soon as something holds for them."""
    last = time.monotonic() + 20
    while True:
        found = [Queued(one["waiting"], one["packing"]) for one in read_events(folder) if one["what"] == QUEUE]
        if holds(found) or time.monotonic() > last:
            return found
        time.sleep(0.005)


def test_a_queue_is_noted_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end, too, whatever the pause."""
    monkeypatch.setattr(events, "_PAUSE_S", 0.01)
    folder, now, asked = RunFolder(tmp_path), [Queued(3, 1)], list[int]()

    def queued() -> Queued:
        asked.append(len(asked))
        return now[0]

    log = QueueLog(folder, queued)
    while len(asked) < 5:
        time.sleep(0.005)
    assert queues(folder) == [(3, 1)]
    now[0] = Queued(0, 2)
    assert queues(folder, lambda found: len(found) == 2) == [(3, 1), (0, 2)]
    monkeypatch.setattr(events, "_PAUSE_S", 1000)
    time.sleep(0.05)
    now[0] = Queued(0, 0)
    log.close()
    assert queues(folder) == [(3, 1), (0, 2), (0, 0)]


def test_events_of_a_queue_are_rarer_the_more_there_are() -> None:
    """Else those of a long run would take too long to read: one a second for a month would be 2.6 million."""
    assert events.pause_s(0) == events.pause_s(3600) == 1
    assert sum(map(events.pause_s, range(140_000))) > 30 * 24 * 3600


def test_a_run_whose_events_cannot_be_written_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "data").write_text("no folder")
    QueueLog(RunFolder(tmp_path), lambda: Queued(0, 0)).close()
    assert "cannot be written" in caplog.text
