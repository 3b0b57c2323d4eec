"""A small checkpoint, and ways to damage one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import Condition
from typing import Any

from engine.config.schema import Model
from engine.data.steps import Cursor
from engine.data.walk import Place
from engine.run.checkpoints import FILES, TrainState, _seal, _short_hash, write

FINGERPRINTS = {"data": "f"} | {f"source-{number}": "0123456789abcdef" * 2 for number in range(10)}
TOKEN = "0123456789abcdef"  # of the drafts of all ranks
VALUES = {"run.seed": 0} | {f"model.{name}": number for number, name in enumerate(Model.model_fields)}


def state(step: int, ranks: int = 1) -> TrainState:
    cursor = Cursor(step, 100 * step, {"data": Place(0, 0, 7 * step)}).to_json()
    return TrainState(step, cursor, ranks, fingerprints=FINGERPRINTS, must_match=VALUES)


class Together:
    """`Control.collect` of ranks that are threads of this process, or are called one after the other, rank 0 last."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.changed, self.found = Condition(), defaultdict[str, dict[int, Any]](dict)

    def of(self, rank: int) -> Callable[[str, Any], list[Any]]:
        def collect(name: str, value: Any) -> list[Any]:
            with self.changed:
                self.found[name][rank] = value
                self.changed.notify_all()
                if rank:
                    return []
                self.changed.wait_for(lambda: len(self.found[name]) == self.ranks)
                return [value for _, value in sorted(self.found.pop(name).items())]

        return collect


def alone(name: str, value: Any) -> list[Any]:
    """`Control.collect` of a single rank."""
    return [value]


def write_all(checkpoints: Path, state: TrainState, *names: str) -> Path:
    """Write a checkpoint as all of its ranks, of which rank 0 has files of these names."""

    def tensors(folder: Path) -> list[str]:
        for name in names:
            (folder / name).write_bytes(b"abc")
        return list(names)

    together = Together(state.ranks)
    for rank in range(state.ranks - 1, 0, -1):
        write(checkpoints, state, rank, lambda folder: [], TOKEN, together.of(rank))
    return write(checkpoints, state, 0, tensors, TOKEN, together.of(0))


def save(checkpoints: Path, step: int) -> Path:
    def tensors(folder: Path) -> list[str]:
        (folder / "zero").mkdir()
        (folder / "zero" / "a.pt").write_bytes(b"a" * 3000)
        (folder / "zero" / "b.pt").write_bytes(bytes([step]) * 10)
        return ["zero/a.pt", "zero/b.pt"]

    return write(checkpoints, state(step), 0, tensors, TOKEN, alone)


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
    del values["block"], values["pages"]
    (page,) = (folder / FILES).read_text().splitlines()
    (folder / FILES).unlink()
    values["files"] = {name: hashes[0] for name, (_, hashes) in json.loads(page).items()}
    values["sizes"] = {name: size for name, (size, _) in json.loads(page).items()}
    change(values)
    (folder / "manifest.json").write_text(json.dumps(values) + "\n")


def named(line: bytes, manifest: bytes, name: str) -> tuple[bytes, bytes]:
    """Return the only line of files.jsonl and the manifest of a checkpoint whose file zero/a.pt has another `name`."""
    line = line.replace(b"zero/a.pt", name.encode())
    values = json.loads(manifest.splitlines()[0])
    ((blocks, _, _),) = values["pages"]
    first = json.dumps(values | {"pages": [[blocks, len(line), _short_hash(line)]]}).encode()
    return line, first + b"\n" + _seal(first)


def renumber(folder: Path, number: object) -> None:
    """Give the manifest another format number, with its hash, and content that this version does not know."""
    values = json.loads((folder / "manifest.json").read_text().splitlines()[0])
    first = json.dumps(values | {"format": number, "files": 3}).encode()
    (folder / "manifest.json").write_bytes(first + b"\n" + _seal(first))
