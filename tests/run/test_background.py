"""Checkpoints are written in the background, one at a time, and an error there is not lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.folders import remove_ruins
from engine.run.background import BackgroundWriter
from engine.run.checkpoints import Range, Share, folder_name, newest_first, read
from tests.run.damage import TOKEN, Together, alone, none, state


def ignore(written: Path) -> None:
    pass


def test_two_ranks_write_one_checkpoint_while_their_main_threads_go_on(tmp_path: Path) -> None:
    go, published, together = threading.Event(), list[Path](), Together(2)
    writers = [BackgroundWriter(tmp_path, rank, TOKEN, together.of(rank)) for rank in range(2)]

    for step in (1, 2):
        go.clear()
        for rank, writer in enumerate(writers):

            def tensors(folder: Path, share: Share, rank: int = rank) -> list[Range]:
                assert go.wait(20)
                (folder / f"rank{rank}.pt").write_bytes(bytes(100 + rank))
                return [Range(f"rank{rank}.pt", 0, 100 + rank)]

            writer.start(state(step, 2), tensors, published.append)
        assert not (tmp_path / folder_name(step)).exists(), "it is being written, and `start` has returned"
        go.set()
        for writer in reversed(writers):
            writer.wait()
        assert published[-1] == tmp_path / folder_name(step)
        assert read(published[-1]) == state(step, 2)
        assert sorted(path.name for path in published[-1].iterdir()) == [
            "files.jsonl",
            "manifest.json",
            "rank0.pt",
            "rank1.pt",
        ]
    assert published == [tmp_path / folder_name(step) for step in (1, 2)], "once, by rank 0"
    assert sorted(tmp_path.iterdir()) == sorted(published), "what the ranks exchanged is gone"


def test_a_checkpoint_that_is_due_waits_until_the_last_one_is_written(tmp_path: Path) -> None:
    """Its states would replace those in the copy, which are still being written."""
    writer, go, order = BackgroundWriter(tmp_path, 0, TOKEN, alone), threading.Event(), list[str]()

    def slow(folder: Path, share: Share) -> list[Range]:
        assert go.wait(20)
        order.append("first")
        return []

    writer.start(state(1), slow, ignore)
    second = threading.Thread(
        target=lambda: writer.start(state(2), lambda folder, share: order.append("second") or [], ignore)
    )
    second.start()
    second.join(0.2)
    assert second.is_alive() and order == []
    go.set()
    second.join(20)
    writer.wait()
    assert order == ["first", "second"]
    assert [path.name for path in newest_first(tmp_path)] == [folder_name(2), folder_name(1)]


def test_an_error_of_the_background_is_raised_by_the_next_check(tmp_path: Path) -> None:
    """A run that goes on without checkpoints would lose all its work at the next failure."""
    writer = BackgroundWriter(tmp_path, 0, TOKEN, alone)
    writer.check()
    writer.wait()

    def fails(folder: Path, share: Share) -> list[Range]:
        (folder / "half.pt").write_bytes(b"half")
        raise ValueError("lost")

    writer.start(state(1), fails, ignore)
    with pytest.raises(ValueError, match="lost"):
        writer.wait()
    with pytest.raises(ValueError, match="lost"):
        writer.check()
    with pytest.raises(ValueError, match="lost"):
        writer.start(state(2), none, ignore)
    assert newest_first(tmp_path) == []
    remove_ruins(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_after_publishing_is_raised_too(tmp_path: Path) -> None:
    def fails(written: Path) -> None:
        raise OSError("cannot remove an old one")

    writer = BackgroundWriter(tmp_path, 0, TOKEN, alone)
    writer.start(state(1), none, fails)
    with pytest.raises(OSError, match="cannot remove an old one"):
        writer.wait()
    assert read(tmp_path / folder_name(1)) == state(1)
