"""A small checkpoint, and ways to damage one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config.schema import Model
from engine.data.steps import Cursor
from engine.data.walk import Place
from engine.run.checkpoints import TrainState, _seal, write

FINGERPRINTS = {"data": "f"} | {f"source-{number}": "0123456789abcdef" * 2 for number in range(10)}
TOKEN = "0123456789abcdef"  # of the drafts of all ranks
VALUES = {"run.seed": 0} | {f"model.{name}": number for number, name in enumerate(Model.model_fields)}


def state(step: int, ranks: int = 1) -> TrainState:
    cursor = Cursor(step, 100 * step, {"data": Place(0, 0, 7 * step)}).to_json()
    return TrainState(step, cursor, ranks, fingerprints=FINGERPRINTS, must_match=VALUES)


def write_all(checkpoints: Path, state: TrainState, *names: str) -> Path:
    """Write a checkpoint as all of its ranks, of which rank 0 has files of these names."""

    def tensors(folder: Path) -> list[str]:
        for name in names:
            (folder / name).write_bytes(b"abc")
        return list(names)

    for rank in range(state.ranks - 1, 0, -1):
        write(checkpoints, state, rank, lambda folder: [], TOKEN)
    return write(checkpoints, state, 0, tensors, TOKEN)


def save(checkpoints: Path, step: int) -> Path:
    def tensors(folder: Path) -> list[str]:
        (folder / "zero").mkdir()
        (folder / "zero" / "a.pt").write_bytes(b"a" * 3000)
        (folder / "zero" / "b.pt").write_bytes(bytes([step]) * 10)
        return ["zero/a.pt", "zero/b.pt"]

    return write(checkpoints, state(step), 0, tensors, TOKEN)


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


def make_older(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Replace the manifest by one of the version without a hash of its own, and `change` its content."""
    values = json.loads((folder / "manifest.json").read_text().splitlines()[0])
    del values["block"]
    values["files"] = {name: hashes[0] for name, hashes in values["files"].items()}
    change(values)
    (folder / "manifest.json").write_text(json.dumps(values) + "\n")


def renumber(folder: Path, number: object) -> None:
    """Give the manifest another format number, with its hash, and content that this version does not know."""
    values = json.loads((folder / "manifest.json").read_text().splitlines()[0])
    first = json.dumps(values | {"format": number, "files": 3}).encode()
    (folder / "manifest.json").write_bytes(first + b"\n" + _seal(first))
