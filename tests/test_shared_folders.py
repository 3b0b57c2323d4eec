"""Two users of one folder: whatever the other one puts there, private files keep their mode, place and content.

The other user, who is in the group of the folder, acts before the victim's function or in the middle of it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.data.parts import Tokens, pack_block, part_path
from engine.data.sources.source import Document
from engine.data.token_file import TokenFile
from engine.errors import BytescaleError, DataError
from engine.files import append, locked
from engine.folders import remove_ruins
from engine.run.checkpoints import Retention, newest_first, prune, read
from engine.run.remote import Remote, fetch
from engine.weights.copy import import_weights
from engine.weights.model import read_model
from engine.weights.tokenizer import copy_tokenizer
from engine.weights.write import new_folder
from tests.data.noted import Noted
from tests.run.damage import save, state
from tests.users import GROUP, OTHER, VICTIM, Running, needs_root, run_as
from tests.weights.folders import llama, saved

pytestmark = [pytest.mark.long, needs_root]
MODES = (0o2770, 0o2775, 0o775, 0o777, 0o1777)
TOKENS = Tokens("bytes", None, None)
NUMBERS = ("0123456789abcdef", "fedcba9876543210")


@dataclass
class Place:
    """A folder that two users share, with a private folder of the victim in it, and the victim's home."""

    shared: Path
    home: Path

    @property
    def private(self) -> Path:
        return self.shared / "private"

    def attack(self, *names: str) -> None:
        """Put links to the victim's home, or its private folder, at these names in the shared folder."""

        def plant() -> None:
            with suppress(PermissionError):  # a folder with the sticky bit
                self.private.rename(self.shared / names[0])
            for name in names:
                with suppress(FileExistsError):
                    (self.shared / name).symlink_to(self.home)

        run_as(OTHER, plant, self.shared)

    def swap(self, pattern: str) -> None:
        """Replace entries of the shared folder by links to the victim's home."""

        def swap() -> None:
            for path in self.shared.glob(pattern):
                with suppress(PermissionError):  # the sticky bit
                    path.rename(path.with_name(f"old-{path.name}"))
                    path.symlink_to(self.home)

        run_as(OTHER, swap, self.shared)

    def check(self) -> None:
        """Assert that the private files are what they were; the other user may have renamed their folder."""
        found = [path for path in self.shared.rglob("precious") if not path.is_symlink()]
        assert len(found) == 1 and found[0].read_text() == "precious"
        assert [path.name for path in found[0].parent.iterdir()] == ["precious"]
        assert sorted(path.name for path in self.home.iterdir()) == ["manifest.json", "model.safetensors", "precious"]
        for path in (*found, *self.home.iterdir()):
            assert path.read_text() == "precious" and stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(found[0].parent.stat().st_mode) == 0o700


def make(path: Path, user: int, content: str | None = None) -> Path:
    path.mkdir() if content is None else path.write_text(content)
    path.chmod(0o700 if content is None else 0o600)
    os.chown(path, user, user)
    return path


@pytest.fixture(params=MODES, ids=oct)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    root = Path(tempfile.mkdtemp())  # not below pytest's folder, which only root may enter
    root.chmod(0o755)
    found = Place(root / "shared", make(root / "home", VICTIM))
    for name in ("precious", "manifest.json", "model.safetensors"):
        make(found.home / name, VICTIM, "precious")
    found.shared.mkdir()
    os.chown(found.shared, 0, GROUP)
    found.shared.chmod(request.param)
    make(found.private, VICTIM)
    make(found.private / "precious", VICTIM, "precious")
    yield found
    shutil.rmtree(root)


@dataclass(frozen=True)
class Paused(Noted):
    """A block that pauses while it is read."""

    pause: Callable[[], None] = print

    def documents(self) -> Iterator[Document]:
        for number, document in enumerate(super().documents()):
            yield document
            if number == 0:
                self.pause()


def block_in(place: Place) -> Noted:
    block = Noted.write(place.shared / "documents", [b"one", b"two"])
    block.path.chmod(0o644)
    for path in place.shared.parent.rglob("documents*"):
        os.chown(path, VICTIM, GROUP)
    return block


def test_links_in_a_draft_of_the_cache_are_not_followed(place: Place) -> None:
    """Files of the cache get its permissions: a link in the draft would give them to any file."""
    cache, path = place.shared / "cache", block_in(place).path
    cache.mkdir()
    shutil.copystat(place.shared, cache)
    os.chown(cache, VICTIM, GROUP)

    def pack(pause: Callable[[], None]) -> None:
        pack_block(TOKENS, cache, Paused(path, pause))

    def plant() -> None:
        for folder in (path for path in cache.rglob(".*") if path.is_dir()):
            with suppress(PermissionError):
                (folder / "zz.json").symlink_to(place.home / "precious")
        for folder in cache.iterdir():
            for draft in folder.glob(".*"):
                with suppress(PermissionError):
                    draft.rename(draft.with_name("old"))
                    draft.symlink_to(place.home)

    packing = Running(VICTIM, pack, place.home)
    assert packing.paused
    run_as(OTHER, plant, place.shared)
    packing.resume()
    place.check()
    (part,) = cache.glob("*/*.idx")
    assert len(TokenFile.open(part.with_suffix(""))) == 2
    others = stat.S_IMODE(place.shared.stat().st_mode) & (
        0o644 if place.shared.stat().st_mode & stat.S_ISVTX else 0o666
    )
    assert {stat.S_IMODE(one.stat().st_mode) for one in part.parent.glob(f"{part.stem}.*")} == {others}

    def read() -> None:
        assert len(TokenFile.open(part.with_suffix(""))) == 2, "the group shares the cache"

    run_as(OTHER, read, place.shared)


@pytest.mark.parametrize("what", ["folder", "lock"])
def test_links_in_the_cache_are_not_followed(place: Place, what: str) -> None:
    block, said = block_in(place), place.home.parent / "said"
    part = part_path(TOKENS, place.shared, block)

    def plant() -> None:
        if what == "folder":
            part.parent.symlink_to(place.home)
        else:
            part.parent.mkdir(mode=0o777)
            part.parent.chmod(0o777)
            Path(f"{part}.lock").symlink_to(place.home / "precious")

    def pack() -> None:
        with pytest.raises(BytescaleError) as caught:
            pack_block(TOKENS, place.shared, block)
        assert caught.value.code == 74 and str(part.parent) in str(caught.value.problems[0].key)

    run_as(OTHER, plant, place.shared)
    run_as(VICTIM, pack, place.home)
    place.check()
    assert not said.exists()


def test_a_folder_is_imported_where_others_have_put_drafts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, out = saved(llama(), place.home.parent / "theirs"), place.shared / "hf"
    for path in theirs.iterdir():
        path.chmod(0o644)
    config = read_model(theirs).config
    monkeypatch.setattr("engine.weights.model.load", lambda overrides: config)  # tests keep configs in a folder of root
    place.attack(".writing-hf", *(f".writing-hf.{number}" for number in NUMBERS))
    run_as(VICTIM, lambda: import_weights(theirs, out) and None, place.home)
    assert {path.name for path in out.iterdir()} == {path.name for path in theirs.iterdir()}
    place.check()


def test_a_draft_that_others_replace_is_written_all_the_same(place: Place) -> None:
    def write(pause: Callable[[], None]) -> None:
        with new_folder(place.shared / "hf") as draft:
            pause()
            (draft / "model.safetensors").write_text("weights")

    writing = Running(VICTIM, write, place.home)
    place.swap(".writing-hf*")
    writing.resume()
    assert (place.shared / "hf" / "model.safetensors").read_text() == "weights"
    place.check()


def test_links_beside_a_tokenizer_are_not_copied(place: Place) -> None:
    theirs = place.home.parent / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "tokenizer.json").write_text("{}")
    (theirs / "special_tokens_map.json").symlink_to(place.home / "precious")
    os.lchown(theirs / "special_tokens_map.json", OTHER, OTHER)

    def copy() -> None:
        with new_folder(place.shared / "hf") as draft, pytest.raises(DataError, match="is a link"):
            copy_tokenizer(str(theirs / "tokenizer.json"), draft)

    run_as(VICTIM, copy, place.home)
    assert not any("precious" in path.read_text() for path in (place.shared / "hf").iterdir())
    place.check()


def test_a_remote_folder_gets_and_gives_checkpoints_and_nothing_else(place: Place) -> None:
    """Also where others have put links to folders of ours at the names of checkpoints and of drafts."""
    here, back = place.home.parent / "here", place.shared / "back"
    for folder in (here, back):
        folder.mkdir(mode=0o775)
        os.chown(folder, VICTIM, GROUP)
    shutil.copystat(place.shared, back)
    sticky = place.shared.stat().st_mode & stat.S_ISVTX
    place.attack("step-00000006" if sticky else "step-00000005", f".writing-step-00000005.{NUMBERS[0]}")

    def plant() -> None:
        for name in (".writing-step-00000005", ".removing-step-00000004"):
            (back / name).symlink_to(place.home)

    def copy() -> None:
        remote = Remote(f"file://{place.shared}")
        remote.upload(save(here, 5))
        remote.abandon(3)
        remote.upload(here / "step-00000005")
        assert read(fetch(remote, back, lambda state: None, print)) == state(5)
        remove_ruins(back)

    run_as(OTHER, plant, place.shared)
    run_as(VICTIM, copy, place.home)
    place.check()


def test_a_link_in_a_checkpoint_is_not_copied_to_a_remote_folder(place: Place) -> None:
    remote = place.home.parent / "remote"
    remote.mkdir()
    os.chown(remote, VICTIM, VICTIM)

    def copy(pause: Callable[[], None]) -> None:
        folder = save(place.shared, 5)
        (folder / "zero").chmod(0o777)
        pause()
        with pytest.raises(OSError):
            Remote(f"file://{remote}").upload(folder)

    def swap() -> None:
        file = place.shared / "step-00000005" / "zero" / "a.pt"
        file.unlink()
        file.symlink_to(place.home / "precious")

    copying = Running(VICTIM, copy, place.home)
    run_as(OTHER, swap, place.shared)
    copying.resume()
    assert not any(path.is_file() and b"precious" in path.read_bytes() for path in remote.rglob("*"))
    place.check()


def test_old_checkpoints_and_ruins_are_removed_and_no_folder_of_ours(place: Place) -> None:
    place.attack(f".removing-step-00000001.{NUMBERS[0]}", f".writing-step-00000009.{NUMBERS[1]}", ".removing-step-1")

    def write() -> None:
        for step in (2, 3):
            written = save(place.shared, step)
        prune(written, Retention(1), {})
        remove_ruins(place.shared)
        assert newest_first(place.shared) == [written]

    run_as(VICTIM, write, place.home)
    place.check()


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock"])
def test_files_that_grow_and_locks_are_no_links(place: Place, name: str) -> None:
    def use() -> None:
        with pytest.raises(OSError, match=r"symbolic links|Permission denied"):  # the kernel's own, with the sticky bit
            append(place.shared / name).close() if name == "metrics.jsonl" else locked(place.shared / name).__enter__()

    run_as(OTHER, lambda: (place.shared / name).symlink_to(place.home / "precious"), place.shared)
    run_as(VICTIM, use, place.home)
    place.check()
