"""Any damage to a checkpoint leads to the newest intact one, and is reported as what it is."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.run import checkpoints
from engine.run.checkpoints import MANIFEST
from engine.run.saved import choose, listed
from tests.run.damage import flip, save

FILES = ("zero/a.pt", "zero/b.pt")
Damages = Iterator[tuple[str, bytes]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path / "checkpoints", step)
    return tmp_path


def flips(content: bytes) -> Damages:
    """Each bit of the hash, every seventh before it, and 200 times up to 40 random bits. every_damage.py has all."""
    end = 8 * content.index(b"\n")
    for bit in (*range(0, end, 7), *range(end, 8 * len(content))):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(damaged)
    draw = random.Random(0)
    for number in range(200):
        damaged = bytearray(content)
        for bit in draw.sample(range(8 * len(content)), draw.randint(1, 40)):
            damaged[bit // 8] ^= 1 << bit % 8
        yield f"random flips {number}", bytes(damaged)


def cuts(content: bytes) -> Damages:
    """20 lengths: the special ones, and random ones; zeroed and removed tails."""
    first = content.index(b"\n")
    lengths = [0, 1, 2, first - 1, first, first + 1, first + 2, len(content) - 2, len(content) - 1]
    lengths += random.Random(1).sample(range(3, first - 1), 20 - len(lengths))
    for length in lengths:
        yield f"cut to {length}", content[:length]
        yield f"zeroed after {length}", content[:length] + bytes(len(content) - length)


def overwrite(path: Path, content: bytes) -> None:
    """Write in place: ext4 syncs a file that is first cut to nothing, which takes most of this test's time."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


@pytest.mark.parametrize("kind", [flips, cuts])
def test_no_damage_to_a_manifest_is_silent_or_has_a_false_reason(
    run: Path, kind: Callable[[bytes], Damages], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a hash of its own, 13 single bits resumed from a wrong position, and 1,926 were refused as mismatches."""
    newest, older = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
    content, said = (newest / MANIFEST).read_bytes(), list[str]()
    assert len(content.splitlines()) == 2 and 8 * len(content) > 9000, "about as many bits as a real one"
    reasons = ("does not match its hash", "is unreadable", "is cut short")
    for what, damaged in kind(content):
        overwrite(newest / MANIFEST, damaged)
        said.clear()
        assert choose(run / "checkpoints", said.append) == older, what
        (line,) = said
        told = [
            f"warning: {newest.name} is damaged ({MANIFEST} {reason}); using {older.name} instead" for reason in reasons
        ]
        assert line in told, what
    assert [one["damaged"] is None for one in listed(run)] == [False, True]


@pytest.mark.parametrize("name", FILES)
def test_no_damage_to_another_file_is_silent(run: Path, name: str) -> None:
    newest, older, said = run / "checkpoints/step-00000002", run / "checkpoints/step-00000001", list[str]()
    content, draw = (newest / name).read_bytes(), random.Random(2)
    positions = [draw.randrange(8 * len(content)) for _ in range(200)]
    damages = [content[: p // 8] + bytes([content[p // 8] ^ 1 << p % 8]) + content[p // 8 + 1 :] for p in positions]
    damages += [content[: draw.randrange(len(content))] for _ in range(20)]
    damages += [(kept := content[: draw.randrange(len(content))]) + bytes(len(content) - len(kept)) for _ in range(20)]
    for damaged in damages:
        overwrite(newest / name, damaged)
        said.clear()
        assert choose(run / "checkpoints", said.append) == older
        assert len(said) == 1 and f"{newest.name} is damaged ({name} " in said[0]


@pytest.mark.parametrize("name", [MANIFEST, *FILES, "zero"])
def test_a_missing_file_or_one_of_another_kind_is_damage(run: Path, name: str) -> None:
    newest, older, said = run / "checkpoints/step-00000002", run / "checkpoints/step-00000001", list[str]()
    path = newest / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert choose(run / "checkpoints", said.append) == older
    assert f"{newest.name} is damaged (" in said[0] and " is missing)" in said[0]
    path.write_text("") if name == "zero" else path.mkdir()
    assert choose(run / "checkpoints", said.append) == older


def test_several_damaged_checkpoints_are_reported_in_one_line(run: Path) -> None:
    newest, said = save(run / "checkpoints", 3), list[str]()
    flip(newest)
    (run / "checkpoints/step-00000002" / MANIFEST).unlink()
    assert choose(run / "checkpoints", said.append) == run / "checkpoints/step-00000001"
    assert said == [
        "warning: step-00000003 is damaged (zero/a.pt does not match its hash), step-00000002 is damaged "
        "(manifest.json is missing); using step-00000001 instead"
    ]


def test_a_disk_that_fails_while_a_file_is_read_is_reported_with_that_file(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reported as an unreadable manifest."""
    newest, hash_block, said = run / "checkpoints/step-00000002", checkpoints._hash, list[str]()

    def failing(path: Path, start: int, length: int) -> str:
        if path == newest / "zero/b.pt":
            raise OSError(5, "Input/output error")  # as `read` raises it: without a path
        return hash_block(path, start, length)

    monkeypatch.setattr(checkpoints, "_hash", failing)
    assert choose(run / "checkpoints", said.append) == run / "checkpoints/step-00000001"
    assert "step-00000002 is damaged (zero/b.pt cannot be read: Input/output error)" in said[0]
