"""Each block is packed once and stays readable, whatever other processes do to the cache folder meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import schema
from engine.data.blocks import local_blocks as module
from engine.data.blocks import work
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.spool import trim
from engine.data.cache import ENDINGS
from engine.data.corpus import TextCorpus
from engine.data.parts import is_packed, pack_block
from engine.data.sources.formats import FORMATS
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError, StorageError
from tests.data.noted import Noted, starts
from tests.data.reading import packed, text_corpus, tokens
from tests.permissions import locked_out
from tests.refusals import refused

encode = open_tokenizer("bytes").document

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]


def texts(data: schema.Data) -> TextCorpus:
    return text_corpus(data, FORMATS[data.format].blocks(data))


@pytest.fixture
def noted(tmp_path: Path) -> list[Noted]:
    """Three blocks that note when they are read."""
    return [Noted.write(tmp_path / f"{number}", [b"text %d" % number, b"more"]) for number in range(3)]


def corpus_of(noted: list[Noted], make_data: MakeData, tmp_path: Path, loaders: Loaders | None = None) -> TextCorpus:
    return text_corpus(make_data(tmp_path, cache=str(tmp_path / "cache")), noted, loaders=loaders)


def test_a_block_is_read_when_it_is_opened_and_once_for_all(
    noted: list[Noted], make_data: MakeData, tmp_path: Path
) -> None:
    """Also once for other runs with the same cache folder."""
    for _ in range(2):
        found = corpus_of(noted, make_data, tmp_path)
        assert found.blocks == 3 and [found.size(block) for block in range(3)] == [12, 12, 12]
        for _ in range(2):
            assert tokens(found, 1, 0) == encode(b"text 1").tolist()
    assert [starts(block) for block in noted] == [0, 1, 0]


def test_what_others_pack_is_awaited(noted: list[Noted], make_data: MakeData, tmp_path: Path) -> None:
    """Only a block that is not there; what still is not there afterwards is packed here."""
    waited = list[Path]()
    loaders: Any = SimpleNamespace(wait=waited.append)
    found = corpus_of(noted, make_data, tmp_path, loaders)
    parts = [found.texts.part(block) for block in range(3)]
    for block in (2, 0, 2):
        assert len(found.lengths(block).inputs()) == 2
    assert waited == [parts[2], parts[0]] and is_packed(parts[0]) and not is_packed(parts[1])
    corpus_of(noted, make_data, tmp_path, loaders).lengths(0)
    assert len(waited) == 2, "it is there"


def test_the_use_of_a_block_is_noted(noted: list[Noted], make_data: MakeData, tmp_path: Path) -> None:
    """Loaders remove blocks that were not used for the longest time."""
    found = corpus_of(noted, make_data, tmp_path)
    found.lengths(0)
    part = found.texts.part(0)
    paths = [*part.parent.iterdir()]
    for path in paths:
        os.utime(path, (1, 1))
    corpus_of(noted, make_data, tmp_path).lengths(0)
    assert len(paths) == 4 and all(path.stat().st_mtime > 10**9 for path in paths), "also for programs that tidy up"


def test_few_blocks_stay_open(
    noted: list[Noted], make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may open 1,024 files, however many sources there are."""
    monkeypatch.setattr(module, "_opened", lru_cache(1)(module._opened.__wrapped__))
    sources = [corpus_of(noted, make_data, tmp_path) for _ in range(3)]
    before = len([*Path("/proc/self/fd").iterdir()])
    for block in (0, 1, 2, 0):
        for found in sources:
            assert tokens(found, block, 0) == encode(b"text %d" % block).tolist()
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 3


def test_a_block_that_was_removed_stays_readable_while_it_is_open(
    noted: list[Noted], make_data: MakeData, tmp_path: Path
) -> None:
    """Another run may keep the cache folder below its limit."""
    found = corpus_of(noted, make_data, tmp_path)
    opened = packed(found, 0)
    shutil.rmtree(found.texts.folder)
    assert opened.tokens.read(0, 0, 99).tolist() == encode(b"text 0").tolist() and len(opened.hash()) == 2
    assert len(corpus_of(noted, make_data, tmp_path).lengths(0).inputs()) == 2


@pytest.mark.parametrize("ending", [".idx", ".bin", ".hash", ".json"])
def test_a_block_of_which_a_file_was_removed_is_packed_again(
    noted: list[Noted], make_data: MakeData, tmp_path: Path, ending: str
) -> None:
    """By a program that tidies up a disk, for example."""
    found = corpus_of(noted, make_data, tmp_path)
    packed(found, 0)
    Path(f"{found.texts.part(0)}{ending}").unlink()
    opened = packed(found, 0)
    assert opened.tokens.read(0, 0, 99).tolist() == encode(b"text 0").tolist() and len(opened.hash()) == 2
    assert starts(noted[0]) == 2


def test_a_block_that_another_user_has_packed_and_kept_is_named(
    noted: list[Noted], make_data: MakeData, tmp_path: Path
) -> None:
    found = corpus_of(noted, make_data, tmp_path)
    packed(found, 0)
    part = found.texts.part(0)
    with locked_out(Path(f"{part}.bin")), pytest.raises(StorageError, match="cannot be read: Permission") as caught:
        packed(found, 0)
    (problem,) = caught.value.problems
    assert problem.key == str(part) and "use another data.cache" in str(problem.hint)


@pytest.mark.parametrize("moment", range(6))
def test_a_block_may_be_removed_while_it_is_opened(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Before the first of its files is opened, and after each. Without its mask, all tokens would count."""
    records = [{"ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, {"ids": [4, 5]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = make_data(tmp_path / "a.jsonl", format="jsonl", field="ids", cache=str(tmp_path / "cache"))
    found, opens, opening = texts(data), list[str](), os.open
    packed(found, 0)

    def trimming(path: str | Path, flags: int, *more: int, **where: int | None) -> int:
        ours = str(path).startswith(str(found.texts.folder)) and Path(path).suffix in ENDINGS
        if ours and not opens and moment == 0:
            trim(found.texts.folder, -1, set())
        opens.extend([Path(path).suffix] if ours else [])
        opened = opening(path, flags, *more, **where)
        if ours and len(opens) == moment:
            trim(found.texts.folder, -1, set())
        return opened

    monkeypatch.setattr(os, "open", trimming)
    opened = packed(found, 0)
    assert opens[:1] == [".idx"] and {*opens} == {".idx", ".bin", ".mask", ".hash", ".json"}
    counted = opened.tokens.counted(0, 0, 9)
    assert counted is not None and counted.tolist() == [False, False, True] and len(opened.hash()) == 2


def test_a_block_that_is_removed_again_and_again_is_an_error(
    noted: list[Noted], make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an endless loop."""
    found = corpus_of(noted, make_data, tmp_path)

    def pack_and_trim(*given: Any) -> None:
        pack_block(*given)
        trim(found.texts.folder, -1, set())

    monkeypatch.setattr(work, "pack_block", pack_and_trim)
    with pytest.raises(StorageError, match="was removed 5 times by other runs") as caught:
        found.lengths(0)
    assert str(found.texts.folder) in str(caught.value.problems[0].key) and starts(noted[0]) == 5


def test_a_document_that_cannot_be_used_is_an_error_of_the_caller_that_opens_its_block(
    write_files: WriteFiles, make_data: MakeData
) -> None:
    files = {f"{number:03d}.txt": b"document %d" % number for number in range(199)} | {"199.txt": b"\xff"}
    found = texts(make_data(write_files(files)))
    assert len(found.lengths(0).inputs()) == 64
    for _ in range(2):
        with refused(DataError, ".../documents/199.txt") as problems:
            found.lengths(3)
    assert str(problems[0].key).endswith("199.txt")
