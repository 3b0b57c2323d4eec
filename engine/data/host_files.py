"""Whether each host of a run has the files of its documents, as the host that started it has.

The launcher of a run on several hosts writes a line for each file, `["web", "web/a.jsonl", 48211]`: source, path, and
bytes. Before training, each host looks at as many of them as some seconds suffice for; what is wrong with others shows
when their blocks are needed.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.data.sources.files import file_size
from engine.data.sources.source import Block
from engine.data.sources.urls import is_url
from engine.errors import DataError
from engine.files import write_durably
from engine.readers import open_regular, parse_line

_LOOK_S = 5.0
_HINT = "copy it there from the host that started the run, or use a file system that all hosts share"


@contextmanager
def on_host(host: str | None, source: str) -> Iterator[None]:
    """Name the host and the source in a DataError, as a context. Without a host, errors stay as they are."""
    try:
        yield
    except DataError as error:
        if host is None:
            raise
        (problem,) = error.problems
        message = f"source {source!r} on {host}: {problem.message}"
        raise DataError(message, key=problem.key, hint=problem.hint) from error


def write_files(path: Path, blocks: Mapping[str, Sequence[Block]]) -> None:
    """List the files of the blocks of all sources, but no URLs, which are the same on all hosts.

    Raises DataError for a file that is gone, OSError if writing fails.
    """
    found = dict.fromkeys((name, file) for name, listed in blocks.items() for block in listed for file in block.files)
    lines = [json.dumps([name, file, file_size(file)]) for name, file in found if not is_url(file)]
    write_durably(path, "".join(f"{line}\n" for line in lines).encode())


def check_files(path: Path, host: str) -> None:
    """Look at the files that `write_files` has listed, for some seconds at most, on the host with this name.

    Raises DataError, which names the host, the source and the file, for one that cannot be read, or has another size.
    """
    last = time.monotonic() + _LOOK_S
    with open_regular(path) as lines:
        for line in lines:
            source, file, size = parse_line(line)
            with on_host(host, source):
                _check(file, size)
            if time.monotonic() > last:
                return


def _check(file: str, size: int) -> None:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe could wait
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", key=file, hint=_HINT) from error
    found = os.fstat(descriptor)
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise DataError("is not a regular file", key=file, hint=_HINT)
    if found.st_size != size:
        message = f"has {found.st_size:,} bytes, but {size:,} on the host that started the run"
        raise DataError(message, key=file, hint=_HINT)
