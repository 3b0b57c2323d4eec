"""Faults that `bytescale chaos` plants in a run that allows them (run.chaos=true). A rank looks for them at each phase.

```
 RUN/chaos/rank-1/1763895000123456789.json   a Fault that waits for rank 1
          log.jsonl                          the faults that have happened: when, which, in which step and phase
```
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engine.control.progress import MOMENTS, OF_PASSES
from engine.files import append, write_json
from engine.readers import read_object

OF_RANKS = ("kill-rank", "stop-rank", "slow-rank", "cut-link")
FAULTS = (*OF_RANKS, "corrupt-checkpoint", "fill-disk")


@dataclass(frozen=True)
class Fault:
    """A fault of a rank. It happens when the rank begins the phase `at`, or any if it is None, from `step` on."""

    name: str  # one of OF_RANKS
    at: str | None = None
    step: int = 0
    times: int = 1
    factor: float = 1.0  # of slow-rank: how many times longer forward and backward passes take; it lasts


def plant(folder: Path, rank: int, fault: Fault) -> Path:
    """Plant a fault of a rank in the folder `RUN/chaos`. Returns its file, which vanishes when it happens.

    A slow-rank replaces an earlier one; with factor 1 the rank is as fast as before.
    """
    own = folder / f"rank-{rank}"
    own.mkdir(exist_ok=True)
    path = own / f"{'slow' if fault.name == 'slow-rank' else time.time_ns()}.json"
    write_json(path, asdict(fault))
    return path


class Chaos:
    """The faults of this rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """`folder` is RUN/chaos; it must exist."""
        self._folder, self._rank, self._own = folder, rank, folder / f"rank-{rank}"
        self._own.mkdir(exist_ok=True)
        self._before, self._since = "", time.perf_counter()
        self._lock = threading.Lock()  # the moments of a checkpoint are reached in a separate thread

    def reach(self, step: int, phase: str) -> None:
        """Trigger the faults planned for this phase, or for one of MOMENTS."""
        with self._lock:
            slower = self._trigger(step, phase)
        if phase in MOMENTS:
            return
        if self._before in OF_PASSES:
            time.sleep((slower - 1.0) * (time.perf_counter() - self._since))
        self._before, self._since = phase, time.perf_counter()

    def _trigger(self, step: int, phase: str) -> float:
        """Trigger the faults, and return the factor by which this rank is slower."""
        slower = 1.0
        for path in sorted(self._own.glob("*.json")):
            fault = Fault(**read_object(path))
            if step < fault.step or fault.at not in (None, phase):
                continue
            if fault.name == "slow-rank":
                slower = fault.factor
                continue
            # First the files: nothing can be written when it has happened.
            if fault.times > 1:
                write_json(path, asdict(replace(fault, times=fault.times - 1)))
            else:
                path.unlink()
            happened = {"time": time.time(), "fault": fault.name, "rank": self._rank, "step": step, "phase": phase}
            with append(self._folder / "log.jsonl") as file:
                file.write(json.dumps(happened).encode() + b"\n")
            _do(fault.name)
        return slower


def _do(name: str) -> None:
    """Let a fault happen to this process."""
    if name == "cut-link":
        _cut_connections()
    else:
        os.kill(os.getpid(), {"kill-rank": signal.SIGKILL, "stop-rank": signal.SIGSTOP}[name])


def _cut_connections() -> None:
    """End all TCP connections of this process, as a network that fails does. The link to the agent is none."""
    import socket  # slow to import, and `bytescale --help` imports this module

    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        connection.shutdown(socket.SHUT_RDWR)
