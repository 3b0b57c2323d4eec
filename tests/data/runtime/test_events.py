"""Events of the data plane: several processes append them, and a crash may cut one."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from engine.data.runtime.events import EventLog, read_events
from engine.run.folder import RunFolder


def test_events_of_several_writers_are_read_in_their_order(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_events(folder) == []
    with closing(EventLog(folder)) as one, closing(EventLog(folder)) as other:
        one.scaled(3, 0, 1, 4, "web")
        other.note("lost", role="planner", host=1)
        one.scaled(4, None, 4, 1, None)
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
    with folder.plane_events.open("ab") as file:
        file.write(rest)
    assert [event["what"] for event in read_events(folder)] == ["lost"]
