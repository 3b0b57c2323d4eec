"""Checkpoints are complete or absent, and a damaged one is never used."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.data.steps import Cursor, Place
from engine.errors import CheckpointError
from engine.files import remove_ruins
from engine.run.checkpoints import (
    abandon,
    newest_first,
    prune,
    read,
    read_state,
    write,
)
from engine.run.saved import choose
from engine.trainer.loop import Trainer
from tests.run.damage import flip, mistype, remove, save, scramble, state, truncate, unmanifest


def test_a_checkpoint_reads_back_its_state(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert folder.name == "step-00000003"
    assert read(folder) == state(3)


def save_in_two(checkpoints: Path) -> Path:
    """Save step 1 from two ranks, which are the threads rank-0 and rank-1."""
    barrier, boxes = threading.Barrier(2), [{}, {}]  # type: ignore[var-annotated]

    def gather(rank: int) -> Callable[[dict[str, str]], list[dict[str, str]]]:
        def exchange(hashes: dict[str, str]) -> list[dict[str, str]]:
            boxes[rank] = hashes
            barrier.wait(10)
            both = list(boxes)
            barrier.wait(10)
            return both

        return exchange

    def one(rank: int) -> None:
        def tensors(folder: Path) -> None:
            (folder / f"rank{rank}.pt").write_bytes(bytes(100 + rank))

        write(checkpoints, state(1, 2), rank, tensors, gather(rank))

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank-{rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return checkpoints / "step-00000001"


def test_two_ranks_share_the_hashing(tmp_path: Path) -> None:
    """If the files of a rank were missing from the manifest, damage in them would not be detected."""
    folder = save_in_two(tmp_path)
    assert read(folder).ranks == 2
    for rank in range(2):
        (folder / f"rank{rank}.pt").write_bytes(b"x")
        with pytest.raises(CheckpointError, match=f"rank{rank}"):
            read(folder)
        (folder / f"rank{rank}.pt").write_bytes(bytes(100 + rank))


def test_ranks_with_lagging_views_of_the_folder_hash_the_same_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system, files of other ranks may become visible late."""
    seen = Path.rglob

    def lagging(folder: Path, pattern: str) -> list[Path]:
        behind = threading.current_thread().name == "rank-1"
        return [p for p in seen(folder, pattern) if not (behind and p.name == "rank0.pt")]

    monkeypatch.setattr(Path, "rglob", lagging)
    folder = save_in_two(tmp_path)
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == {"rank0.pt", "rank1.pt"}


def test_a_kill_while_a_checkpoint_is_replaced_leaves_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, 1)

    def killed(removed: Path, **options: Any) -> None:
        if removed.exists():
            (removed / "zero" / "a.pt").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert read(folder) == state(1)


def test_a_manifest_without_sizes_is_of_an_older_version_and_still_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sizes"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert read(folder) == state(1)


def test_a_manifest_with_the_first_name_of_a_field_is_still_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state"]["lineage"] = manifest["state"].pop("must_match")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert read(folder) == state(1)


def test_a_checkpoint_of_an_older_order_of_documents_can_be_read_for_export_only(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    for new in ("cursor", "fingerprints"):
        del manifest["state"][new]
    manifest["state"] |= {"epoch": 2, "position": 7, "fingerprint": "g"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = read(folder)
    assert (found.step, found.cursor, found.fingerprints) == (1, {}, {"data": "g"})
    assert found.must_match == state(1).must_match


@pytest.mark.parametrize("damage", [flip, truncate, remove, unmanifest, mistype, scramble])
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_is_used(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    damage(folder)
    with pytest.raises(CheckpointError, match="damaged"):
        read(folder)
    said: list[str] = []
    chosen = choose(tmp_path, said.append)
    assert chosen is not None and chosen.name == "step-00000001"
    assert "step-00000002" in said[0]
    assert newest_first(tmp_path) == [folder, chosen], "choosing changes nothing"
    abandon(tmp_path, 1, said.append)
    assert newest_first(tmp_path) == [chosen]
    assert len(list(tmp_path.glob("abandoned-step-00000002-*"))) == 1, "a damaged checkpoint is kept for inspection"


def test_ranks_read_the_state_and_hash_nothing(tmp_path: Path) -> None:
    """The launcher has verified every byte; otherwise the whole checkpoint would be read once per rank."""
    folder = save(tmp_path, 1)
    flip(folder)
    assert read_state(folder) == state(1)
    asked: list[Any] = []
    trainer = SimpleNamespace(
        fingerprints={"data": "f"},
        tokenizer=None,
        engine=SimpleNamespace(load=asked.append),
        trace=SimpleNamespace(resume=asked.append),
        control="control",
        ahead=SimpleNamespace(request=asked.append),
    )
    Trainer.begin(trainer, folder)  # type: ignore[arg-type]
    assert asked == [folder, "control", Cursor(1, 100, {"data": Place(0, 0, 7)})]
    unmanifest(folder)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        read_state(folder)


def test_a_missing_checkpoint_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        read(tmp_path / "nowhere")


def test_a_write_that_dies_leaves_the_previous_one(tmp_path: Path) -> None:
    good = save(tmp_path, 1)

    def dies(folder: Path) -> None:
        (folder / "half.pt").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, state(2), 0, dies, lambda hashes: [hashes])
    assert choose(tmp_path, print) == good
    remove_ruins(tmp_path)
    assert list(tmp_path.iterdir()) == [good]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        written = save(tmp_path, step)
    prune(written, keep=2)
    assert [read(p).step for p in newest_first(tmp_path)] == [10, 2]


def test_the_checkpoint_just_written_is_always_kept(tmp_path: Path) -> None:
    for step in (8, 9, 3):
        written = save(tmp_path, step)
    prune(written, keep=1)
    assert newest_first(tmp_path) == [written]


def test_checkpoints_of_later_steps_are_renamed(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    said: list[str] = []
    abandon(tmp_path, 4, said.append)
    assert [p.name for p in newest_first(tmp_path)] == ["step-00000004", "step-00000002"]
    (kept,) = tmp_path.glob("abandoned-step-00000006-*")
    assert read(kept) == state(6), "they are kept for inspection"
    assert said == [f"step-00000006 is newer than step 4, from which this run resumes; it is kept as {kept.name}"]
