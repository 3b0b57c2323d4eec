"""Runs a command in this process with stdout and stderr on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

import pytest

from bytescale_cli.main import run

_END = b"\x04"
_ERASED = re.compile(r"[^\n]*\x1b\[2K")  # a line of progress
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def open_terminal(columns: int) -> tuple[int, int]:
    """Open a pseudo-terminal of this width; return our end of it, and the end for a program."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    return ours, theirs


def read_all(ours: int) -> str:
    """Read what is written until the program's end is closed everywhere, or until _END."""
    found = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            read = b""
        found += read
        if not read or found.endswith(_END):
            return found.removesuffix(_END).decode()


def shown(words: list[str], columns: int = 80, code: int = 0) -> str:
    """Return what a command shows on a terminal, without styles; asserts its exit code."""
    ours, theirs = open_terminal(columns)
    texts = list[str]()
    reader = threading.Thread(target=lambda: texts.append(read_all(ours)))
    reader.start()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(columns))
        done = run(words)
        terminal.flush()
        os.write(theirs, _END)  # processes that stay, such as multiprocessing's, keep the terminal open
    reader.join()
    os.close(ours)
    text = _STYLE.sub("", _ERASED.sub("", texts[0].replace("\r\n", "\n")))
    assert done == code, text
    return text
