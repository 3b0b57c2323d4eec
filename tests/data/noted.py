"""A block that notes when it is read, waits while a test wants it to, and ends its process if it is told so."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.data.sources.source import Block, Document
from engine.errors import DataError


@dataclass(frozen=True)
class Noted(Block):
    """Lines of a file. `path.notes` gets a line of the process when a pass begins, and another when it ends.

    While `path.held` exists, a pass waits after the first document. If `path.deadly` exists, it ends its process unless
    that is the one whose number is in the file. If `path.broken` exists, the documents cannot be used.
    """

    path: Path

    @classmethod
    def write(cls, path: Path, texts: Sequence[bytes]) -> Noted:
        """Write the file of a block."""
        path.write_bytes(b"".join(text + b"\n" for text in texts))
        return cls(path)

    @property
    def files(self) -> list[str]:
        return [str(self.path)]

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def documents(self) -> Iterator[Document]:
        self._note("begin")
        deadly = self._beside("deadly")
        if deadly.exists() and deadly.read_text() != str(os.getpid()):
            os._exit(1)
        if self._beside("broken").exists():
            raise DataError("is broken", key=str(self.path), hint="mend it")
        for number, line in enumerate(self.path.read_bytes().splitlines()):
            while number == 1 and self._beside("held").exists():
                time.sleep(0.01)
            yield Document(f"{self.path}:{number}", line)
        self._note("end")

    def hold(self) -> None:
        """Let passes wait."""
        self._beside("held").touch()

    def release(self) -> None:
        """Let passes go on."""
        self._beside("held").unlink()

    def kill(self, but: int) -> None:
        """Let passes end their process, except in process `but`."""
        self._beside("deadly").write_text(str(but))

    def break_(self) -> None:
        """Let passes fail."""
        self._beside("broken").touch()

    def notes(self) -> list[tuple[str, int]]:
        """What was noted, and the process that noted it."""
        try:
            lines = self._beside("notes").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(what, int(process)) for what, process in map(str.split, lines)]

    def _note(self, what: str) -> None:
        with self._beside("notes").open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def _beside(self, ending: str) -> Path:
        return Path(f"{self.path}.{ending}")


def starts(block: Noted) -> int:
    """How often a block was begun to be read."""
    return sum(what == "begin" for what, _ in block.notes())


def ends(block: Noted) -> int:
    """How often a block was read to its end."""
    return sum(what == "end" for what, _ in block.notes())
