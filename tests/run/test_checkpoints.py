"""Checkpoints are complete or absent, and a damaged one is never used."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine.config.load import load
from engine.data.steps import Cursor
from engine.data.walk import Place
from engine.errors import CheckpointError, Problem, StorageError
from engine.folders import remove_ruins
from engine.run import checkpoints
from engine.run.checkpoints import (
    FILES,
    MANIFEST,
    Range,
    Retention,
    Share,
    abandon,
    check_hashes,
    newest_first,
    prune,
    read,
    read_state,
    write,
)
from engine.run.saved import choose
from engine.trainer.loop import Trainer
from tests.refusals import refused
from tests.run.damage import (
    TOKEN,
    Together,
    alone,
    flip,
    make_format,
    make_older,
    mistype,
    none,
    remove,
    save,
    scramble,
    state,
    truncate,
    unmanifest,
    write_all,
)


def test_a_checkpoint_reads_back_its_state(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert folder.name == "step-00000003"
    assert read(folder) == state(3)


def save_in_two(checkpoints: Path) -> Path:
    """Save step 1 from two ranks, which are the threads rank-0 and rank-1."""

    together = Together(2)

    def one(rank: int) -> None:
        def tensors(folder: Path, share: Share) -> list[Range]:
            (folder / f"rank{rank}.pt").write_bytes(bytes(100 + rank))
            return [Range(f"rank{rank}.pt", 0, 100 + rank)]

        write(checkpoints, state(1, 2), rank, tensors, TOKEN, together.of(rank))

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank-{rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return checkpoints / "step-00000001"


def test_the_files_of_all_ranks_are_in_the_manifest(tmp_path: Path) -> None:
    """If the files of a rank were missing from the manifest, damage in them would not be detected."""
    folder = save_in_two(tmp_path)
    assert read(folder).ranks == 2
    for rank in range(2):
        (folder / f"rank{rank}.pt").write_bytes(b"x")
        with refused(CheckpointError, f"{tmp_path}/step-00000001") as problems:
            read(folder)
        assert f"rank{rank}" in problems[0].message
        (folder / f"rank{rank}.pt").write_bytes(bytes(100 + rank))


def test_a_checkpoint_is_not_published_before_all_ranks_have_written_their_parts(tmp_path: Path) -> None:
    """It would be complete by its manifest, without the files of a rank."""
    together = Together(3)
    arguments = tmp_path, state(1, 3), 0, none, TOKEN, together.of(0)
    first = threading.Thread(target=write, args=arguments, daemon=True)
    first.start()
    for rank in (2, 1):
        first.join(0.2)
        assert first.is_alive() and newest_first(tmp_path) == []
        write(tmp_path, state(1, 3), rank, none, TOKEN, together.of(rank))
    first.join(20)
    (written,) = tmp_path.iterdir()
    assert read(written).ranks == 3 and {path.name for path in written.iterdir()} == {MANIFEST, FILES}


def test_a_manifest_of_an_older_version_is_still_read_and_its_hashes_are_checked(tmp_path: Path) -> None:
    changes = (lambda values: None, lambda values: values.pop("sizes"))  # the first had no sizes
    for number, change in enumerate(changes):
        folder = save(tmp_path / str(number), 1)
        make_older(folder, change)
        assert read(folder) == state(1)
        flip(folder)
        with refused(CheckpointError, ".../step-00000001") as problems:
            read(folder)
        assert "zero/a.pt" in problems[0].message


@pytest.mark.parametrize("name", ["../../mine", "zero/../../mine", "/etc/hostname"])
def test_a_manifest_that_names_files_elsewhere_is_damaged(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    make_older(folder, lambda values: values["files"].update({name: "0"}))
    for look in (read, read_state):
        with pytest.raises(CheckpointError, match="names files outside of the checkpoint"):
            look(folder)


def save_many(checkpoints: Path, files: int) -> Path:
    """Save step 1, of so many files of 3 bytes."""
    return write_all(checkpoints, state(1), *(f"{number:04d}.pt" for number in range(files)))


def test_among_many_files_a_rank_reads_the_hashes_of_its_share_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """manifest.json, which each rank reads, grows by 50 bytes for each 64 files."""
    folder, read_page, asked = save_many(tmp_path, 1000), checkpoints._read_page, list[int]()
    size = (folder / MANIFEST).stat().st_size
    assert size - (save_many(tmp_path / "few", 10) / MANIFEST).stat().st_size < 15 * 60
    assert read(folder) == state(1)

    def spy(folder: Path, head: Any, number: int, offset: int) -> Any:
        asked.append(number)
        return read_page(folder, head, number, offset)

    monkeypatch.setattr(checkpoints, "_read_page", spy)
    for part in range(100):
        check_hashes(folder, part, 100)
    assert {*asked} == {*range(16)} and len(asked) < 100 + 16, "a page, or two"
    (folder / "0999.pt").write_bytes(b"abd")
    check_hashes(folder, 98, 100)
    with pytest.raises(CheckpointError, match=r"0999\.pt does not match its hash"):
        check_hashes(folder, 99, 100)
    lines = (folder / FILES).read_bytes().splitlines(keepends=True)
    (folder / FILES).write_bytes(b"".join([*lines[:-1], lines[-1].replace(b"0999", b"0998")]))
    check_hashes(folder, 0, 100)
    for look in (lambda: check_hashes(folder, 99, 100), lambda: checkpoints.check_sizes(folder)):
        with pytest.raises(CheckpointError, match=r"files\.jsonl does not match its hash"):
            look()


@pytest.mark.parametrize("change", [lambda content: content + b"{}", lambda content: content[:-1], None])
def test_damage_to_the_list_of_files_is_named(tmp_path: Path, change: Callable[[bytes], bytes] | None) -> None:
    folder = save(tmp_path, 1)
    content = (folder / FILES).read_bytes()
    (folder / FILES).unlink()
    if change is not None:
        (folder / FILES).write_bytes(change(content))
    with refused(CheckpointError, ".../step-00000001") as problems:
        read(folder)
    assert "files.jsonl" in problems[0].message
    assert read_state(folder) == state(1)


@pytest.mark.parametrize("number", [2, 3])
def test_a_checkpoint_of_an_older_format_is_still_read(tmp_path: Path, number: int) -> None:
    """Its files are of one rank each. In 2, their sizes and hashes are in manifest.json."""
    folder = save(tmp_path, 1)
    make_format(folder, number)
    assert read(folder) == state(1)
    assert checkpoints.read_manifest(folder).sizes == {"zero/a.pt": 3000, "zero/b.pt": 10}
    assert not checkpoints.Parts(folder).known
    truncate(folder)
    with refused(CheckpointError, ".../step-00000001") as problems:
        read(folder)
    assert "zero/b.pt has 0 bytes instead of 10" in problems[0].message


def test_a_file_of_tensors_without_a_hash_is_damage(tmp_path: Path) -> None:
    """It would be loaded, since files are found by their names; other files are the user's notes."""
    folder = save(tmp_path, 1)
    (folder / "notes.txt").touch()
    assert read(folder) == state(1)
    (folder / "zero" / "c.pt").touch()
    with refused(CheckpointError, f"{tmp_path}/step-00000001") as problems:
        read(folder)
    assert "manifest.json" in problems[0].message and "zero/c.pt" in problems[0].message


def test_a_manifest_with_the_first_name_of_a_field_is_still_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    make_older(folder, lambda values: values["state"].update(lineage=values["state"].pop("must_match")))
    assert read(folder) == state(1)


def test_a_checkpoint_of_an_older_order_of_documents_can_be_read_for_export_only(tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        for new in ("cursor", "fingerprints"):
            del values["state"][new]
        values["state"] |= {"epoch": 2, "position": 7, "fingerprint": "g"}

    folder = save(tmp_path, 1)
    make_older(folder, change)
    found = read(folder)
    assert (found.step, found.cursor, found.fingerprints) == (1, {}, {"data": "g"})
    assert found.must_match == state(1).must_match


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    """The run would resume at another step than `newest_first` and `abandon` believe."""
    folder = save(tmp_path, 1)
    other = folder.rename(folder.with_name("step-00000002"))
    with refused(CheckpointError, f"{tmp_path}/step-00000002") as problems:
        read_state(other)
    assert "manifest.json" in problems[0].message
    assert read_state(other.rename(folder.with_name("a copy"))) == state(1)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_parts_of_a_checkpoint_are_checked_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Else damage in a block that no rank hashes would stay unseen."""
    monkeypatch.setattr(checkpoints, "BLOCK", 250)
    folder, hashed = save(tmp_path, 3), list[tuple[int, str, int]]()
    hash_block = checkpoints._hash

    def spy(path: Path, start: int, length: int) -> str:
        hashed.append((part, path.name, start))
        return hash_block(path, start, length)

    monkeypatch.setattr(checkpoints, "_hash", spy)
    for part in range(parts):
        check_hashes(folder, part, parts)
    blocks = [("a.pt", start) for start in range(0, 3000, 250)] + [("b.pt", 0)]
    assert sorted(block for _, *block in hashed) == sorted(map(list, blocks))
    counts = [sum(part == other for other, *_ in hashed) for part in range(parts)]
    assert max(counts) <= -(-len(blocks) // parts), "about as many bytes each"
    flip(folder)
    found = 0
    for part in range(parts):
        try:
            check_hashes(folder, part, parts)
        except CheckpointError as error:
            found += 1
            assert "zero/a.pt does not match its hash" in str(error)
    assert found == 1


@pytest.mark.parametrize("damage", [flip, truncate, remove, unmanifest, mistype, scramble])
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_is_used(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    damage(folder)
    with refused(CheckpointError, f"{tmp_path}/step-00000002"):
        read(folder)
    said: list[str] = []
    chosen = choose(tmp_path, said.append)
    assert chosen is not None and chosen.name == "step-00000001"
    assert "step-00000002" in said[0]
    assert newest_first(tmp_path) == [folder, chosen], "choosing changes nothing"
    abandon(tmp_path, 1, said.append)
    assert newest_first(tmp_path) == [chosen]
    assert len(list(tmp_path.glob("abandoned-step-00000002-*"))) == 1, "a damaged checkpoint is kept for inspection"


class OneRank:
    """Collectives of one rank, which adds what `others` have found."""

    def __init__(self, *others: Problem) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [*([value] if value else []), *map(asdict, self.others)]


def test_each_rank_hashes_its_part_and_all_raise_what_one_has_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    groups = [SimpleNamespace(rank=rank, mesh=SimpleNamespace(ranks=2)) for rank in range(2)]
    for of_rank in groups:
        Trainer.verify(SimpleNamespace(groups=of_rank, control=OneRank()), folder)  # type: ignore[arg-type]
    flip(folder)
    with refused(CheckpointError, f"{tmp_path}/step-00000001") as problems:
        Trainer.verify(SimpleNamespace(groups=groups[0], control=OneRank()), folder)  # type: ignore[arg-type]
    assert "zero/a.pt" in problems[0].message
    other = OneRank(problems[0])
    with refused(CheckpointError, f"{tmp_path}/step-00000001") as problems:
        Trainer.verify(SimpleNamespace(groups=groups[1], control=other), folder)  # type: ignore[arg-type]
    assert "zero/a.pt" in problems[0].message


def test_beginning_reads_the_state_and_hashes_nothing(tmp_path: Path) -> None:
    """The ranks have verified every byte, each a part; otherwise the whole checkpoint would be read once per rank."""
    folder = save(tmp_path, 1)
    flip(folder)
    assert read_state(folder) == state(1)
    asked: list[Any] = []

    def validation(order: int) -> dict[str, Any]:
        asked.append(order)
        return {}

    trainer = SimpleNamespace(
        config=load(["recipe=quickstart", "data.validation_tokens=0"]),
        fingerprints={"data": "f"},
        tokenizer=None,
        engine=SimpleNamespace(load=asked.append),
        trace=SimpleNamespace(resume=asked.append),
        control="control",
        data=SimpleNamespace(request=asked.append, validation=validation),
    )
    Trainer.begin(trainer, folder)  # type: ignore[arg-type]
    cursor = Cursor(1, 100, {"data": Place(0, 0, 7)})
    assert asked == [folder, "control", cursor.order, cursor]
    unmanifest(folder)
    with refused(CheckpointError, f"{tmp_path}/step-00000001") as problems:
        read_state(folder)
    assert "manifest.json" in problems[0].message


def test_a_missing_checkpoint_is_not_called_damaged(tmp_path: Path) -> None:
    with refused(CheckpointError, f"{tmp_path}/nowhere"):
        read(tmp_path / "nowhere")


NODES = {0: "zero/ranks-00000-00001.states", 1: "zero/ranks-00002-00003.states"}


def save_on_nodes(checkpoints: Path) -> Path:
    """Save step 1 from two ranks on each of two nodes, whose parts have 300, 310, 320 and 330 bytes."""
    together = Together(4)

    def on_rank(rank: int) -> None:
        def tensors(folder: Path, share: Share) -> Iterator[Range]:
            sizes, first = share(300 + 10 * rank), rank - rank % 2
            start, name = (0 if rank == first else sizes[first]), NODES[rank // 2]
            yield Range(name, start, start + sizes[rank])
            (folder / "zero").mkdir(exist_ok=True)
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
            os.pwrite(handle, bytes([rank]) * sizes[rank], start)
            os.close(handle)

        write(checkpoints, state(1, 4), rank, tensors, TOKEN, together.of(rank))

    threads = [threading.Thread(target=on_rank, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return checkpoints / "step-00000001"


def test_damage_to_a_part_of_a_file_is_named_with_its_rank(tmp_path: Path) -> None:
    """The others of the file are intact; a file that ends early is damage, whoever wrote its end."""
    folder = save_on_nodes(tmp_path)
    assert read(folder) == state(1, 4)
    assert checkpoints.read_manifest(folder).sizes == {NODES[0]: 610, NODES[1]: 650}
    parts = checkpoints.Parts(folder)
    assert parts.known and [parts.of(rank)[1:] for rank in range(4)] == [(0, 300), (300, 610), (0, 320), (320, 650)]
    file = folder / NODES[1]
    content = file.read_bytes()
    for at, rank in ((0, 2), (319, 2), (320, 3), (649, 3)):
        file.write_bytes(content[:at] + b"x" + content[at + 1 :])
        with refused(CheckpointError, ".../step-00000001") as problems:
            read(folder)
        assert f"{NODES[1]} does not match its hash in the part of rank {rank}" in problems[0].message
        for part in range(4):  # each rank hashes one of the four blocks
            if part == rank:
                with pytest.raises(CheckpointError):
                    check_hashes(folder, part, 4)
            else:
                check_hashes(folder, part, 4)
    file.write_bytes(content[:-1])
    with refused(CheckpointError, ".../step-00000001") as problems:
        checkpoints.check_sizes(folder)
    assert f"{NODES[1]} has 649 bytes instead of 650" in problems[0].message


@pytest.mark.parametrize("name", ["zero/ranks-00004-00005.states", "zero/zero_pp_rank_4_mp_rank_00_optim_states.pt"])
def test_a_file_of_tensors_that_is_not_listed_is_damage(tmp_path: Path, name: str) -> None:
    folder = save_on_nodes(tmp_path)
    (folder / name).write_bytes(b"")
    with refused(CheckpointError, ".../step-00000001") as problems:
        checkpoints.check_sizes(folder)
    assert name in problems[0].message


def test_parts_that_overlap_or_leave_a_gap_are_not_published(tmp_path: Path) -> None:
    for start in (90, 110):
        spans = [[(Range("a", 0, 100), ["0"])], [(Range("a", start, 200), ["0"])]]
        with pytest.raises(ValueError, match=f"rank 1 begins at byte {start} of a instead of 100"):
            checkpoints.write_manifest(tmp_path, state(1, 2), spans)
    assert not list(tmp_path.iterdir())


def test_a_write_that_dies_leaves_the_previous_one(tmp_path: Path) -> None:
    good = save(tmp_path, 1)

    def dies(folder: Path, share: Share) -> list[Range]:
        (folder / "half.pt").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, state(2), 0, dies, TOKEN, alone)
    assert choose(tmp_path, print) == good
    remove_ruins(tmp_path)
    assert list(tmp_path.iterdir()) == [good]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc:664]")]
)
def test_a_full_disk_is_reported_with_path_and_bytes(tmp_path: Path, error: Exception) -> None:
    """torch.save hides the errno, and its message names neither."""

    def fills(folder: Path, share: Share) -> Iterator[Range]:
        yield Range("a.pt", 0, 3 << 20)
        (folder / "a.pt").write_bytes(bytes(3 << 20))
        raise error

    with pytest.raises(StorageError, match=r"could not be written: 3\.0 MiB were written, .*B are free$") as caught:
        write(tmp_path, state(2), 0, fills, TOKEN, alone)
    assert not list(tmp_path.rglob("a.pt")), "else there is no space to report it"
    assert caught.value.problems[0].key == str(tmp_path / f".writing-step-00000002.{TOKEN}")


def test_another_error_while_files_are_written_passes(tmp_path: Path) -> None:
    def fails(folder: Path, share: Share) -> list[Range]:
        raise RuntimeError("a collective failed")

    with pytest.raises(RuntimeError, match="a collective failed"):
        write(tmp_path, state(2), 0, fails, TOKEN, alone)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        written = save(tmp_path, step)
    prune(written, Retention(2), {})
    assert [read(p).step for p in newest_first(tmp_path)] == [10, 2]


def test_training_goes_on_if_an_old_checkpoint_is_open_on_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        written = save(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
    prune(written, Retention(1), {})
    assert "step-00000001 cannot be removed now: [Errno 39] Directory not empty" in caplog.text
    assert newest_first(tmp_path) == [written]


def test_the_checkpoint_just_written_is_always_kept(tmp_path: Path) -> None:
    for step in (8, 9, 3):
        written = save(tmp_path, step)
    prune(written, Retention(1), {})
    assert newest_first(tmp_path) == [written]


def test_retention_keeps_the_newest_the_multiples_and_the_best(tmp_path: Path) -> None:
    """If a kept one were removed, the best model of a run would be lost for good."""
    folders = [tmp_path / f"step-{step:08d}" for step in range(12, 0, -1)]
    losses = {2: 1.5, 5: 1.0, 8: 1.0, 9: 2.0, 99: 0.1}

    def kept(keep: Retention) -> list[int]:
        removed = keep.removes(folders, losses)
        assert removed == [folder for folder in folders if folder in removed], "newest first"
        return sorted(int(folder.name[5:]) for folder in set(folders) - set(removed))

    assert kept(Retention(2)) == [11, 12]
    assert kept(Retention(1, every=4)) == [4, 8, 12]
    assert kept(Retention(1, best=1)) == [8, 12], "the newer of two equal ones"
    assert kept(Retention(1, best=3)) == [2, 5, 8, 12]
    assert kept(Retention(1, best=50)) == [2, 5, 8, 9, 12], "no step without validation is among the best"
    assert kept(Retention(2, every=5, best=1)) == [5, 8, 10, 11, 12]
    assert kept(Retention(50)) == list(range(1, 13))


def test_checkpoints_of_later_steps_are_renamed(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    said: list[str] = []
    abandon(tmp_path, 4, said.append)
    assert [p.name for p in newest_first(tmp_path)] == ["step-00000004", "step-00000002"]
    (kept,) = tmp_path.glob("abandoned-step-00000006-*")
    assert read(kept) == state(6), "they are kept for inspection"
    assert said == [f"step-00000006 is newer than step 4, from which this run resumes; it is kept as {kept.name}"]
