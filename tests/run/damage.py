"""A small checkpoint, and ways to damage one."""

from __future__ import annotations

from pathlib import Path

from engine.data.steps import Cursor, Place
from engine.run.checkpoints import TrainState, write


def state(step: int, ranks: int = 1) -> TrainState:
    cursor = Cursor(step, 100 * step, {"data": Place(0, 0, 7 * step)}).to_json()
    return TrainState(step, cursor, ranks, fingerprints={"data": "f"}, must_match={"run.seed": 0})


def save(checkpoints: Path, step: int) -> Path:
    def tensors(folder: Path) -> None:
        (folder / "zero").mkdir()
        (folder / "zero" / "a.pt").write_bytes(b"a" * 3000)
        (folder / "zero" / "b.pt").write_bytes(bytes([step]) * 10)

    return write(checkpoints, state(step), 0, tensors, lambda hashes: [hashes])


def flip(folder: Path) -> None:
    data = bytearray((folder / "zero/a.pt").read_bytes())
    data[1234] ^= 1
    (folder / "zero/a.pt").write_bytes(data)


def truncate(folder: Path) -> None:
    (folder / "zero/b.pt").write_bytes(b"")


def remove(folder: Path) -> None:
    (folder / "zero/b.pt").unlink()


def unmanifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def mistype(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def scramble(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")
