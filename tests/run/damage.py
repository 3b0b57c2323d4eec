"""A small checkpoint, and ways to damage one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple

from engine.config.schema import Model
from engine.control.control import Control
from engine.data.steps import Cursor
from engine.data.walk import Place
from engine.run.checkpoints import FILES, Range, Share, TrainState, _seal, _short_hash, read_manifest, write

FINGERPRINTS = {"data": "f"} | {f"source-{number}": "0123456789abcdef" * 2 for number in range(10)}
TOKEN = "0123456789abcdef"  # of the drafts of all ranks
VALUES = {"run.seed": 0} | {f"model.{name}": number for number, name in enumerate(Model.model_fields)}


def state(step: int, ranks: int = 1) -> TrainState:
    cursor = Cursor(step, 100 * step, {"data": Place(0, 0, 7 * step)}).to_json()
    return TrainState(step, cursor, ranks, fingerprints=FINGERPRINTS, must_match=VALUES)


class Together:
    """Exchanges of ranks that are threads of this process. Without `share` they may be called one after the other,
    rank 0 last."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.changed, self.found = Condition(), defaultdict[str, dict[int, Any]](dict)

    def of(self, rank: int) -> Member:
        return Member(self, rank)

    def exchange(self, name: str, rank: int, value: Any, waits: bool) -> dict[int, Any]:
        """Return the values of all ranks, if this one waits for them."""
        with self.changed:
            self.found[name][rank] = value
            self.changed.notify_all()
            if waits:
                assert self.changed.wait_for(lambda: len(self.found[name]) == self.ranks, 20)
            return dict(sorted(self.found[name].items()))


class Member(NamedTuple):
    """`Exchange` of a rank; all ranks are on one node."""

    together: Together
    rank: int

    def collect(self, name: str, value: Any) -> list[Any]:
        found = self.together.exchange(f"collect {name}", self.rank, value, waits=self.rank == 0)
        return [] if self.rank else [*found.values()]

    def share(self, name: str, value: Any) -> dict[int, Any]:
        return self.together.exchange(f"share {name}", self.rank, value, waits=True)


alone = Control(0)  # of a single rank


def none(folder: Path, share: Share) -> list[Range]:
    """Write nothing."""
    return []


def write_all(checkpoints: Path, state: TrainState, *names: str) -> Path:
    """Write a checkpoint as all of its ranks, of which rank 0 has files of these names."""

    def tensors(folder: Path, share: Share) -> list[Range]:
        for name in names:
            (folder / name).write_bytes(b"abc")
        return [Range(name, 0, 3) for name in names]

    together = Together(state.ranks)
    for rank in range(state.ranks - 1, 0, -1):
        write(checkpoints, state, rank, none, TOKEN, together.of(rank))
    return write(checkpoints, state, 0, tensors, TOKEN, together.of(0))


def save(checkpoints: Path, step: int) -> Path:
    def tensors(folder: Path, share: Share) -> list[Range]:
        (folder / "zero").mkdir()
        (folder / "zero" / "a.pt").write_bytes(b"a" * 3000)
        (folder / "zero" / "b.pt").write_bytes(bytes([step]) * 10)
        return [Range("zero/a.pt", 0, 3000), Range("zero/b.pt", 0, 10)]

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
    values["files"] = {name: hashes[0] for name, ((_, _, hashes),) in json.loads(page).items()}
    values["sizes"] = {name: size for name, ((_, size, _),) in json.loads(page).items()}
    del values["format"]
    change(values)
    (folder / "manifest.json").write_text(json.dumps(values) + "\n")


def make_format(folder: Path, number: int) -> None:
    """Replace the manifest of a checkpoint, each of whose files is of one rank, by one of format 2 or 3."""
    manifest = read_manifest(folder)
    files = {name: (size, list(hashes)) for name, ((_, size, hashes),) in manifest.files.items()}
    values = json.loads((folder / "manifest.json").read_text().splitlines()[0])
    del values["pages"], values["state"]["mesh"]
    if number == 2:
        (folder / FILES).unlink()
        values["files"] = {name: hashes for name, (_, hashes) in files.items()}
        values["sizes"] = {name: size for name, (size, _) in files.items()}
    else:
        line = json.dumps(files).encode() + b"\n"
        (folder / FILES).write_bytes(line)
        values["pages"] = [[sum(len(hashes) for _, hashes in files.values()), len(line), _short_hash(line)]]
    first = json.dumps(values | {"format": number}).encode()
    (folder / "manifest.json").write_bytes(first + b"\n" + _seal(first))


def named(line: bytes, manifest: bytes, name: str) -> tuple[bytes, bytes]:
    """Return the only line of files.jsonl and the manifest of a checkpoint whose file zero/a.pt has another `name`."""
    line = line.replace(b"zero/a.pt", name.encode())
    values = json.loads(manifest.splitlines()[0])
    ((blocks, _, _, first_rank),) = values["pages"]
    first = json.dumps(values | {"pages": [[blocks, len(line), _short_hash(line), first_rank]]}).encode()
    return line, first + b"\n" + _seal(first)


def renumber(folder: Path, number: object) -> None:
    """Give the manifest another format number, with its hash, and content that this version does not know."""
    values = json.loads((folder / "manifest.json").read_text().splitlines()[0])
    first = json.dumps(values | {"format": number, "files": 3}).encode()
    (folder / "manifest.json").write_bytes(first + b"\n" + _seal(first))
