"""The process of one tracker: `python -m engine.trackers RUN NAME`. It reads the lines that the ranks append to
RUN/metrics.jsonl.

It ends when its standard input is closed, after it has written the last steps. On its standard output it writes JSON
lines for its launcher: {"step": N} after a step was written, {"error": "..."} if it fails.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from engine.config.resolved import flat, read_resolved
from engine.files import write_json
from engine.readers import read_object
from engine.run.folder import RunFolder
from engine.run.metrics import read_from
from engine.trackers.tracker import Tracked, Tracker, Value, metrics_of
from engine.trackers.trackers import TRACKERS

_EVERY_S = 1.0  # between two reads of the metrics
_LAST_S = 120  # for the last steps, if the launcher is gone: it gives less


def track(folder: RunFolder, name: str, ended: TextIO, report: Callable[[Mapping[str, Any]], None]) -> None:
    """Pass the steps of a run on until `ended` is closed, beginning after the last one that the tracker has.

    A step that is run again after a resume has the same loss as before, and is not written again.
    """
    state: dict[str, Any] = {"id": None, "step": 0}
    if (file := folder.tracker(name)).exists():
        state |= read_object(file)
    folder.trackers.mkdir(exist_ok=True)
    tracker = _open(folder, name, state["id"])
    state["id"] = tracker.id
    write_json(file, state)
    report({"step": state["step"]})
    inode, offset, last = 0, 0, False
    while True:
        found = folder.metrics.stat()
        if found.st_ino != inode or found.st_size < offset:  # the run went back to a checkpoint, and cut its metrics
            inode, offset = found.st_ino, 0
        lines, offset = read_from(folder.metrics, offset)
        if new := [metrics_of(line) for line in lines if line["step"] > state["step"]]:
            tracker.log(new)
            state["step"] = new[-1].number
            write_json(file, state)
            report({"step": state["step"]})
        if last:
            break
        last = bool(select.select([ended], [], [], _EVERY_S)[0])
        if last:
            signal.alarm(_LAST_S)  # ends this process, also if its library hangs
    tracker.close()


def _open(folder: RunFolder, name: str, id_: str | None) -> Tracker:
    config = read_resolved(folder.resolved).model_dump(mode="json")
    values: dict[str, Value] = {
        key: value if isinstance(value, Value) else json.dumps(value) for key, value in flat(config).items()
    }
    return TRACKERS[name](Tracked(folder.root.name, folder.trackers, values, id_))


def main() -> int:
    root, name = Path(sys.argv[1]), sys.argv[2]
    # Libraries print: what goes to the standard output goes to the log from here on.
    launcher = os.dup(1)
    os.dup2(2, 1)

    def report(one: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the launcher was killed; the tracker still gets the last steps
            os.write(launcher, (json.dumps(one) + "\n").encode())

    try:
        track(RunFolder(root), name, sys.stdin, report)
    except Exception as error:  # whatever a library raises
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = f"; `pip install {name}` installs it" if isinstance(error, ImportError) else ""
        report({"error": f"{reason}{hint}"})
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # not through the exit handlers and threads of libraries, which may wait for a network
