"""Processes that pack blocks of texts before steps need them: each block once per host.

They only make token files available earlier: a caller that needs a missing block packs it. A loader that is killed,
stopped or slow therefore costs time and changes nothing else. Loaders of several hosts may pack into one folder: one
that meets a block that another process is packing takes the next.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

from engine.control.processes import end_with_parent, is_stopped, processor_seconds
from engine.data.blocks.spool import MARGIN, bytes_of, trim
from engine.data.blocks.work import Cost, Work, pack_and_measure
from engine.data.parts import Tokens, is_packed
from engine.errors import BytescaleError, DataError
from engine.safe_path import starting_safely

_LOOK_S = 0.2  # between two checks of the loaders
_ATTEMPTS = 3  # loaders that may die of a block
# Neither a fork, which would copy threads, nor the fork server of multiprocessing, which nothing would monitor, and
# which connects to this process through a socket in TMPDIR, whose path may be too long.
_CONTEXT: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
_BUSY_S = 1.0  # until blocks that other processes were packing are tried again: those processes may have died


class Loaders:
    """Keeps processes busy with blocks to pack. One that dies, or that a signal has stopped, is replaced.

    They end with this process, however it ends. If no process can be started, nothing waits for loaders.
    """

    def __init__(self, count: int, spool: int) -> None:
        """Start `count` processes. The folders that they pack into are kept below `spool` bytes."""
        self._changed = threading.Condition()
        self._queue = deque[tuple[Path, Work]]()
        self._busy, self._retry = list[tuple[Path, Work]](), 0.0  # other processes are packing them; time of a next try
        self._asked = dict[tuple[Tokens, Path, int], tuple[Path, Work]]()  # of the last `ask`, by id of the block
        self._spool, self._room = spool, dict[Path, int]()  # bytes that still fit into a folder
        # Blocks of the next step, of the step that runs, and of validation.
        self._wanted, self._before, self._kept = set[Path](), set[Path](), set[Path]()
        self._died = Counter[Path]()
        self._costs = dict[str, Cost]()  # by source, since they were taken
        self._closed = False
        self._wakes, self._wake = Pipe(duplex=False)
        self._count, self._start = count, 0.0  # time of a next try to start missing ones
        self._refused = False  # whether the system has refused to start one at the last try
        self._loaders = list[_Loader]()
        self._fill()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        # multiprocessing waits for all children when this process exits, and loaders ignore its SIGTERM.
        self._at_exit = Finalize(None, self.close, exitpriority=1)

    def ask(self, works: Iterable[Work]) -> None:
        """Pack these blocks next, in this order, instead of those of the last call.

        Files are looked up only for blocks that were not in the last call, because consecutive steps request mostly the
        same ones. The name of a token file follows from the state of its files. If one changes after that, the reader
        asks for another name than the one that is stored here: it does not wait for a loader, and packs the block
        itself unless a loader has already packed it from the changed file. So a change costs only time.
        """
        asked = dict[tuple[Tokens, Path, int], tuple[Path, Work]]()
        for work in works:
            # By id, because hashing a block, which may name 64 files, takes as long as the look-up that it would save.
            key = work.tokens, work.folder, id(work.block)
            with suppress(DataError):  # a file is gone: the caller that needs the block raises the error
                asked[key] = asked.get(key) or self._asked.get(key) or (work.part(), work)
        self._asked = asked  # holds the blocks, so that no other one gets the id of one of them
        wanted = list(asked.values())
        with self._changed:
            if self._closed:
                return
            self._before, self._wanted = self._wanted, {part for part, _ in wanted}
            packing = {loader.part for loader in self._loaders}
            self._queue = deque(one for one in wanted if one[0] not in packing and not is_packed(one[0]))
            self._busy.clear()  # they are in the queue again
            self._wake.send(None)

    def add(self, work: Work) -> None:
        """Pack a block next, before those of the last `ask`, unless several loaders have died of it."""
        try:
            part = work.part()
        except DataError:
            return
        with self._changed:
            if self._closed or self.has(part) or is_packed(part) or self._died[part] >= _ATTEMPTS:
                return
            self._wanted.add(part)
            self._queue.appendleft((part, work))
            self._wake.send(None)

    def keep(self, works: Iterable[Work]) -> None:
        """Never remove the token files of these blocks."""
        self._kept |= {work.part() for work in works}

    def resize(self, count: int) -> None:
        """Set the number of processes. Those that are too many end when they have packed their block."""
        with self._changed:
            if self._closed or count == self._count:
                return
            if count > self._count and not self._refused:
                self._start = 0.0
            self._count = count
            self._wake.send(None)

    @property
    def count(self) -> int:
        """The number of processes that there should be."""
        return self._count

    def missing(self) -> list[Work]:
        """Return the blocks of the last `ask` that are not packed yet, as far as is known; those of `add`, too."""
        with self._changed:
            begun = [(loader.part, loader.work) for loader in self._loaders if loader.part and loader.work]
            return [work for part, work in (*begun, *self._queue, *self._busy) if part in self._wanted]

    def running(self) -> list[tuple[str, float]]:
        """Return the source of each block that is being packed, and the processor time of its loader for it so far.

        The first block of each loader is left out: starting takes a loader about as long as packing.
        """
        with self._changed:
            return [(one.work.source, one.seconds()) for one in self._loaders if one.work is not None and one.warm]

    def wait(self, part: Path, seconds: float | None = None) -> bool:
        """Wait while the block of this token file is being packed, here or by another host, or is to be packed.

        Returns False if that is still so after some seconds; by default there is no limit. Afterwards it may still not
        be packed: then the block was not requested from this process or cannot be packed, and packing it here raises
        the error.
        """

        def settled() -> bool:
            none = self._refused and not self._loaders
            return not self.has(part) or none or self._closed or is_packed(part)

        with self._changed:
            return self._changed.wait_for(settled, seconds)

    def has(self, part: Path) -> bool:
        """Return whether a block is being packed, or is to be."""
        return any(part == one for one, _ in (*self._queue, *self._busy)) or any(
            part == loader.part for loader in self._loaders
        )

    def packed(self) -> dict[str, Cost]:
        """Return what the blocks have cost that loaders packed since the last call, by source."""
        with self._changed:
            costs, self._costs = self._costs, {}
        return costs

    def close(self) -> None:
        """Kill all loaders. Blocks that they have not finished are packed again later."""
        self._at_exit.cancel()
        with self._changed:
            self._changed.notify_all()
            if not self._closed:
                self._closed = True
                self._wake.send(None)
        self._thread.join()
        for loader in self._loaders:
            loader.kill()

    def _run(self) -> None:
        """Assign blocks to loaders and monitor them, until `close`."""
        try:
            while not self._closed:
                self._look()
        finally:  # if it fails, for example because no process can be started, no caller keeps waiting
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _look(self) -> None:
        """Assign blocks, wait for an event, and replace loaders that have died or were stopped."""
        with self._changed:
            self._fill()
            # Another process was packing these blocks. It may have died since, so they are tried again.
            if time.monotonic() > self._retry:
                self._queue.extendleft(reversed(self._busy))  # they are needed sooner than the others
                self._busy.clear()
                self._retry = time.monotonic() + _BUSY_S
            # A block may have been packed since it was asked for: by the caller itself, or by a process of another run.
            for loader in self._loaders:
                while loader.part is None and self._queue:
                    part, work = self._queue.popleft()
                    if not is_packed(part):
                        loader.begin(part, work)
            self._changed.notify_all()
            busy = [loader.connection for loader in self._loaders]
        # Outside the lock, so that callers can request blocks during this wait, which a request ends.
        ready = wait([self._wakes, *busy], _LOOK_S)
        if self._wakes in ready:
            self._wakes.recv()
        with self._changed:
            # A stopped loader is killed first, so that `end` finds its connection closed, and the block goes back into
            # the queue.
            for loader in list(self._loaders):
                if loader.stopped():
                    logging.getLogger(__name__).warning("a loader was stopped by a signal; another one replaces it")
                    loader.kill()
                elif loader.connection not in ready:
                    continue
                try:
                    part, work, settled, cost = loader.end()
                except (OSError, EOFError):  # it has died
                    self._remove(loader)
                    continue
                if cost is not None:
                    self._costs[work.source] = self._costs.get(work.source, Cost()).plus(cost)
                if settled:
                    self._room[work.folder] = self._room.get(work.folder, 0) - bytes_of(part)
                elif part in self._wanted:
                    self._busy.append((part, work))
            kept = self._wanted | self._before | self._kept
        # `_room` counts down the bytes that may still be written. Only when it is used up is the folder itself read,
        # which takes long if it has many blocks.
        for folder, room in self._room.items():
            if room <= 0:
                left = trim(folder, self._spool, kept)
                self._room[folder] = max(self._spool - left, int(self._spool * MARGIN))

    def _remove(self, loader: _Loader) -> None:
        """Remove a loader that has died; its block is packed next, unless it has killed several loaders."""
        if loader.part is not None and loader.work is not None:
            self._died[loader.part] += 1
            if self._died[loader.part] < _ATTEMPTS:
                self._queue.appendleft((loader.part, loader.work))
        loader.kill()
        self._loaders.remove(loader)

    def _fill(self) -> None:
        """End free loaders that are too many. Start missing ones.

        That is tried at most once a second: all may die, or the system may not allow new processes.
        """
        free = [loader for loader in self._loaders if loader.part is None]
        for loader in free[: max(0, len(self._loaders) - self._count)]:
            loader.kill()
            self._loaders.remove(loader)
        if len(self._loaders) >= self._count or time.monotonic() < self._start:
            return
        self._start, self._refused = time.monotonic() + _BUSY_S, False
        try:
            while len(self._loaders) < self._count:
                self._loaders.append(_Loader())
        except OSError as error:  # too many processes or files, or too little memory
            self._refused = True
            logging.getLogger(__name__).warning("a loader cannot be started: %s; trying again", error)


class _Loader:
    """A process that packs one block at a time."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self._process: BaseProcess = _CONTEXT.Process(target=_pack, args=(theirs,), daemon=True)
        try:
            with starting_safely():
                self._process.start()
        except OSError:
            self.connection.close()
            raise
        finally:
            theirs.close()
        self.part: Path | None = None  # the block that is being packed
        self.work: Work | None = None
        self.warm, self._before = False, 0.0  # whether it has packed one; processor time of the process before it

    def begin(self, part: Path, work: Work) -> None:
        """Begin to pack a block."""
        self.part, self.work, self._before = part, work, self._used()
        with suppress(OSError):  # it has died; `end` will see it
            self.connection.send(work)

    def end(self) -> tuple[Path, Work, bool, Cost | None]:
        """End a block; return it, and False if another process is packing it, else its cost if this one has packed it.

        Raises OSError or EOFError if dead.
        """
        settled, cost = self.connection.recv()
        assert self.part is not None
        assert self.work is not None
        part, work, self.part, self.work, self.warm = self.part, self.work, None, None, True
        return part, work, settled, cost

    def seconds(self) -> float:
        """Return the processor time of the process for its block so far."""
        return self._used() - self._before

    def _used(self) -> float:
        return processor_seconds(self._process.pid or 0)

    def stopped(self) -> bool:
        """Return whether a signal has stopped the process, which would never finish its block."""
        return is_stopped(self._process.pid or 0)

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _pack(connection: Connection) -> None:
    """Pack blocks in a loader until the pipe to the process that started it closes."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # a scheduler may send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, EOFError):
        while True:
            work: Work = connection.recv()
            settled, cost = True, None
            with suppress(BytescaleError):  # the caller that needs the block raises the error
                settled, cost = pack_and_measure(work)
            connection.send((settled, cost))
