"""Runs that share a cache folder keep it below a size, and disturb nobody who reads or packs."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import schema
from engine.data.blocks.spool import trim
from engine.data.parts import is_packed, pack_block, part_path
from engine.folders import names
from tests.data.blocks.loading import TEXTS, TOKENS, aged, ask, contents, encode, packer, running, sizes, wait_until
from tests.data.noted import Noted, starts
from tests.data.reading import packed, text_corpus

MakeData = Callable[..., schema.Data]


def test_what_was_not_used_for_the_longest_time_is_removed(blocks: list[Noted], cache: Path) -> None:
    parts = aged(cache, blocks)
    each = sizes(cache) // 6
    assert trim(cache, 6 * each, set()) == 6 * each
    assert all(map(is_packed, parts))
    os.utime(f"{parts[0]}.idx", (2 * 10**9, 2 * 10**9))
    assert trim(cache, 3 * each * 16 // 15 + 1, {parts[2]}) == 3 * each, "1/16 of the limit is free afterwards"
    assert [is_packed(part) for part in parts] == [True, False, True, False, False, True]
    assert sizes(cache) == 3 * each, "nothing is left of the others"
    trim(cache, 0, set())
    assert not sizes(cache)
    trim(cache / "none", 0, set())


FOREIGN = (
    *("config.json", "tokenizer.json", "pytorch_model.bin", "notes", "ff.json"),
    *("packed/texts.bin", "packed/texts.idx", "packed/texts.json", "packed/.lock", "ab/model.json", "ab/lock"),
    *(f"ab/{'c' * 32}.bin", f"abc/ab{'c' * 30}.bin", f"deep/ab/ab{'c' * 30}.bin", f"ab{'c' * 30}.bin"),
    *(f"ab/ab{'c' * 30}", f"ab/ab{'c' * 30}.txt", f"ab/ab{'c' * 31}.bin", f"ab/ab{'C' * 30}.bin"),
)


def test_files_of_other_programs_stay(blocks: list[Noted], cache: Path) -> None:
    """data.cache may be a folder that contains the user's models and data."""
    # What has the form of a folder of token files must not be one that the blocks need: that depends on their path.
    needed = {part_path(TOKENS, cache, block).parent.name for block in blocks[:2]}
    file, link, *_ = (name for name in ("00", "01", "02", "03") if name not in needed)
    foreign = [*FOREIGN, file]
    for name in foreign:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"foreign")
    (cache / link).symlink_to("ab")
    parts, content = aged(cache, blocks[:2]), b"foreign" * len(foreign)
    assert trim(cache, 1 << 40, set()) == sizes(cache) - len(content), "they do not count"
    assert trim(cache, 0, set()) == 0
    assert not any(map(is_packed, parts))
    left = sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file())
    assert [name for name in left if not name.startswith(f"{link}/")] == sorted(foreign)
    assert b"".join((cache / name).read_bytes() for name in foreign) == content


def test_a_block_that_is_being_packed_stays(blocks: list[Noted], cache: Path) -> None:
    """Also if it is the one that was not used for the longest time. A draft that a killed process has left goes."""
    part = part_path(TOKENS, cache, blocks[0])
    with running(2) as loaders:
        for block in blocks[:2]:
            block.hold()
        ask(loaders, cache, blocks[:2])
        packer(blocks[0])
        packer(blocks[1])
        wait_until(lambda: len([*cache.rglob("*.bin.writing")]) == 2)
        assert trim(cache, 0, set()) == 0, "drafts count, but nothing is in them yet"
        blocks[0].release()
        loaders.wait(part)
        assert contents(part) == [encode(text).tolist() for text in TEXTS]
    assert len([*cache.rglob("*.bin.writing")]) == 1, "a loader is killed when its owner ends"
    trim(cache, -1, set())
    assert not [path for path in cache.rglob("*") if path.is_file()] and not [*cache.glob("*/*")]


def test_a_block_is_complete_if_the_folder_is_trimmed_at_any_moment(
    blocks: list[Noted], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around each file that is renamed into place. An index without its tokens would be an error of every later run."""
    replace, moments = Path.replace, list[str]()

    def replace_and_trim(path: Path, target: str) -> Path:
        trim(cache, -1, set())
        replaced = replace(path, target)
        moments.append(Path(target).suffix)
        trim(cache, -1, set())
        return replaced

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_and_trim)
        pack_block(TOKENS, cache, blocks[0])
    part = part_path(TOKENS, cache, blocks[0])
    assert contents(part) == [encode(text).tolist() for text in TEXTS] and is_packed(part)
    assert moments[-1] == ".idx" and len(moments) >= 4


@pytest.mark.long
def test_runs_that_trim_a_folder_do_not_disturb_those_that_read(
    blocks: list[Noted], cache: Path, make_data: MakeData, tmp_path: Path
) -> None:
    """Each opens all blocks again and again, while half of them are removed as fast as possible."""
    corpus = text_corpus(make_data(tmp_path, cache=str(cache)), blocks)
    wanted, found = [encode(text).tolist() for text in TEXTS], list[list[list[int]]]()

    def read() -> None:
        for number in range(60):
            opened = packed(corpus, number % 6)
            found.append([opened.tokens.read(document, 0, 99).tolist() for document in range(len(opened))])

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        trim(cache, 600, set())
        time.sleep(0.002)
    assert found == [wanted] * 180
    assert sum(map(starts, blocks)) > 6, "blocks were removed"


def test_a_folder_of_others_cannot_be_trimmed(
    blocks: list[Noted], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users may share a cache folder. A loader's owner must not fail, or wait for ever, because of it."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    parts = aged(cache, blocks)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        trim(cache, 0, set())
    assert all(map(is_packed, parts))


def test_a_folder_may_disappear_while_it_is_trimmed(
    blocks: list[Noted], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(folder: int) -> list[str]:
        found = names(folder)
        shutil.rmtree(cache, ignore_errors=True)
        return found

    aged(cache, blocks)
    with monkeypatch.context() as patch:
        patch.setattr("engine.data.cache.names", vanish)
        assert trim(cache, 0, set()) == 0
