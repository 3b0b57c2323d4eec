"""Blocks are packed once, whoever packs them, and whatever happens to a process that does."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from engine.config import schema
from engine.config.load import load
from engine.data import parts as module
from engine.data.cache import folder_of, write_part
from engine.data.parts import LeftOut, Tokens, is_packed, pack_block, pack_blocks, part_path, read_left_out
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError, StorageError
from tests.data.noted import Noted, ends, starts
from tests.data.packed import TOKENS, documents
from tests.permissions import locked_out
from tests.refusals import refused

encode = open_tokenizer("bytes").document
MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    """A block of three documents, which notes when it is read."""
    return Noted.write(tmp_path / "noted", [b"one", b"", b"three"])


def test_a_block_is_packed_once(noted: Noted, tmp_path: Path) -> None:
    for _ in range(2):
        pack_block(TOKENS, tmp_path / "cache", noted)
    part = part_path(TOKENS, tmp_path / "cache", noted)
    assert documents(part) == [encode(b"one").tolist(), encode(b"three").tolist()]
    assert read_left_out(part) == LeftOut([1], [])
    assert starts(noted) == ends(noted) == 1
    assert {path.suffix for path in part.parent.iterdir()} == {".bin", ".idx", ".hash", ".json"}, "no lock, no draft"


def test_a_changed_file_is_packed_again(noted: Noted, tmp_path: Path) -> None:
    before = part_path(TOKENS, tmp_path, noted)
    assert part_path(TOKENS, tmp_path, noted) == before
    others = [Tokens("bytes", False, None), Tokens("bytes", None, False)]
    noted.path.write_bytes(noted.path.read_bytes() + b"four\n")
    assert len({before, part_path(TOKENS, tmp_path, noted), *(part_path(one, tmp_path, noted) for one in others)}) == 4


def test_other_documents_have_another_name(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    """Names depend on what is read and how: which files, in which encoding, which lines."""
    root = write_files({"a": b"1", "b": b"2"})
    (utf8,), (any_,) = (FORMATS["folder"].blocks(make_data(root, encoding=encoding)) for encoding in ("utf-8", "bytes"))
    (one,) = FORMATS["folder"].blocks(make_data(root, pattern="a"))
    assert len({part_path(TOKENS, tmp_path, block) for block in (utf8, any_, one)}) == 3


@pytest.mark.parametrize(
    ("data", "file", "text", "name"),
    [
        (
            ["data=folder", "data.path=texts", "data.pattern='*.txt'"],
            "a.txt",
            "one\n",
            "5a22896e214b83df69bf4c1240ccd200",
        ),
        (["data=jsonl", "data.path=texts/b.jsonl"], "b.jsonl", '{"text": "one"}\n', "7436dca854dfa4c67903ac0b918b8ecb"),
    ],
)
def test_the_name_of_a_cached_block_stays(
    data: list[str], file: str, text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another name, all users tokenize their texts again. The block's class and fields are part of it."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts", file).write_text(text, encoding="utf-8")
    os.utime(Path("texts", file), (10**9, 10**9))
    config = load(data).data
    (block,) = FORMATS[config.format].blocks(config)
    assert part_path(Tokens.of(config), Path(), block).name == name


def pack_here(folder: Path, block: Block) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background begin with it ignored
    pack_block(TOKENS, folder, block)


def packs(folder: Path, block: Block) -> multiprocessing.process.BaseProcess:
    """Start a process that packs a block."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=pack_here, args=(folder, block))
    process.start()
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.01)


@pytest.mark.long
def test_processes_that_pack_the_same_block_pack_it_once(noted: Noted, tmp_path: Path) -> None:
    """The others wait for the first."""
    noted.hold()
    processes = [packs(tmp_path / "cache", noted) for _ in range(3)]
    wait_until(lambda: starts(noted) == 1)
    time.sleep(0.5)
    noted.release()
    pack_block(TOKENS, tmp_path / "cache", noted)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert starts(noted) == ends(noted) == 1


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_block_is_packed_here_if_the_process_that_packed_it_ends(noted: Noted, tmp_path: Path, how: int) -> None:
    noted.hold()
    first = packs(tmp_path / "cache", noted)
    wait_until(lambda: starts(noted) == 1)
    second = packs(tmp_path / "cache", noted)
    time.sleep(0.5)
    assert first.pid is not None and starts(noted) == 1
    os.kill(first.pid, how)
    first.join()  # before the block can be read to its end
    noted.release()
    second.join()
    assert second.exitcode == 0 and (starts(noted), ends(noted)) == (2, 1)
    part = part_path(TOKENS, tmp_path / "cache", noted)
    assert documents(part) == [encode(b"one").tolist(), encode(b"three").tolist()]


@pytest.mark.parametrize(
    ("mode", "of_files"), [(0o2775, 0o664), (0o755, 0o644), (0o700, 0o600), (0o1777, 0o644), (0o777, 0o666)]
)
def test_users_of_a_cache_folder_can_write_to_all_of_it(
    noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, of_files: int
) -> None:
    """Whatever the umask of the first one. In a folder like /tmp, they cannot change the files of others."""
    cache, found = tmp_path / "cache", dict[str, int]()
    cache.mkdir()
    cache.chmod(mode)
    part, replace = part_path(TOKENS, cache, noted), Path.replace

    def look(path: Path, target: str) -> Path:
        drafts = part.parent.glob(".writing-*")
        found.update({one.name: stat.S_IMODE(one.stat().st_mode) for one in (Path(f"{part}.lock"), *drafts)})
        return replace(path, target)

    before = os.umask(0o077)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", look)
            pack_block(TOKENS, cache, noted)
    finally:
        os.umask(before)
    draft = next(name for name in found if name.startswith(f".writing-{part.name}."))
    assert stat.S_IMODE(part.parent.stat().st_mode) == mode
    assert found[draft] & 0o777 == 0o700, "else other users could put links into it"
    assert found[f"{part.name}.lock"] == of_files, "one that a killed process has left"
    assert {stat.S_IMODE(path.stat().st_mode) for path in part.parent.iterdir()} == {of_files}


@pytest.mark.parametrize("what", ["lock", "folder"])
def test_a_cache_folder_of_another_user_is_named(noted: Noted, tmp_path: Path, what: str) -> None:
    part = part_path(TOKENS, tmp_path / "cache", noted)
    part.parent.mkdir(parents=True)
    lock = Path(f"{part}.lock")
    lock.touch()
    with (
        locked_out(lock if what == "lock" else part.parent),
        pytest.raises(StorageError, match="cannot be written: Permission denied") as caught,
    ):
        pack_block(TOKENS, tmp_path / "cache", noted)
    (problem,) = caught.value.problems
    assert str(part.parent) in str(problem.key) and "use another data.cache" in str(problem.hint)


def test_of_a_read_only_file_system_space_is_no_question(
    noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "cache")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="Read-only file system") as caught:
        pack_block(TOKENS, tmp_path / "cache", noted)
    hint = str(caught.value.problems[0].hint)
    assert "a folder that you can write to with data.cache=DIR" in hint and "space" not in hint
    assert "training" not in hint, "other commands pack, too"


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """NFS without lockd, for example."""

    def refuse(file: object, how: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="cannot be written") as caught:
        pack_block(TOKENS, tmp_path / "cache", noted)
    assert "its file system has no locks" in str(caught.value.problems[0].hint) and not starts(noted)


def test_hosts_that_do_not_see_the_locks_of_each_other_write_the_same(
    noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS with local locks. Both pack the block, and no moment shows a file of which a part is missing."""
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
    part, replace = part_path(TOKENS, tmp_path / "cache", noted), Path.replace
    texts, inside = [encode(b"one").tolist(), encode(b"three").tolist()], False

    def other_host(path: Path, target: str) -> Path:
        nonlocal inside
        if not inside:
            inside = True
            with folder_of(part) as here:
                write_part(here, part.name, partial(module._write_block, TOKENS, noted))
            inside = False
            assert documents(part) == texts
        replaced = replace(path, target)
        assert not is_packed(part) or documents(part) == texts
        return replaced

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", other_host)
        pack_block(TOKENS, tmp_path / "cache", noted)
    assert documents(part) == texts and len([*part.parent.iterdir()]) == 4


def test_only_missing_blocks_are_read(tmp_path: Path) -> None:
    blocks = [Noted.write(tmp_path / f"{number}", [b"%d" % number]) for number in range(4)]
    pack_block(TOKENS, tmp_path / "cache", blocks[2])
    reported = list[tuple[int, int]]()
    pack_blocks(TOKENS, tmp_path / "cache", blocks, 1, lambda done, total: reported.append((done, total)))
    pack_blocks(TOKENS, tmp_path / "cache", blocks, 1, lambda done, total: pytest.fail("nothing is missing"))
    assert [starts(block) for block in blocks] == [1] * 4
    assert reported == [(2, 4), (3, 4), (4, 4)]


def test_a_damaged_part_is_named(noted: Noted, tmp_path: Path) -> None:
    pack_block(TOKENS, tmp_path, noted)
    part = part_path(TOKENS, tmp_path, noted)
    for text in ("", "[]", '{"empty": 1}'):
        Path(f"{part}.json").write_text(text)
        with pytest.raises(DataError, match="is damaged") as caught:
            read_left_out(part)
        assert caught.value.problems[0].key == f"{part}.json"


# Documents that cannot be used

BROKEN = b'{"text": "a"}\n{"text": 1}\n{\n{"text": "b"}\n{"texts": "c"}\n{"text": "d"}\n'


def lines(tmp_path: Path, make_data: MakeData, content: bytes = BROKEN) -> Block:
    (tmp_path / "a.jsonl").write_bytes(content)
    (block,) = FORMATS["jsonl"].blocks(make_data(tmp_path / "a.jsonl", format="jsonl"))
    return block


def test_a_document_that_cannot_be_used_is_an_error(tmp_path: Path, make_data: MakeData) -> None:
    block = lines(tmp_path, make_data)
    with refused(DataError, f"{tmp_path}/a.jsonl:2") as problems:
        pack_block(TOKENS, tmp_path / "cache", block)
    assert "'text'" in problems[0].message
    assert problems[0].key == f"{tmp_path}/a.jsonl:2", "with the number of its line"
    assert not is_packed(part_path(TOKENS, tmp_path / "cache", block))
    assert not list((tmp_path / "cache").rglob("*.writing"))


def test_few_in_a_row_are_left_out_with_their_reasons(tmp_path: Path, make_data: MakeData) -> None:
    block, tokens = lines(tmp_path, make_data), Tokens("bytes", None, None, quarantine_after=3)
    pack_block(tokens, tmp_path / "cache", block)
    part = part_path(tokens, tmp_path / "cache", block)
    assert documents(part) == [encode(text).tolist() for text in (b"a", b"b", b"d")]
    found = read_left_out(part)
    places = [
        (1, f"{tmp_path}/a.jsonl:byte 14"),
        (2, f"{tmp_path}/a.jsonl:byte 26"),
        (4, f"{tmp_path}/a.jsonl:byte 42"),
    ]
    assert [(one.document, one.place) for one in found.broken] == places
    assert "is not a string" in found.broken[0].reason and "is not JSON" in found.broken[1].reason
    assert found.numbers(3).tolist() == [0, 3, 5]


def test_many_in_a_row_are_an_error(tmp_path: Path, make_data: MakeData) -> None:
    """As many as data.quarantine_after; the error names the last one."""
    block = lines(tmp_path, make_data)
    with pytest.raises(DataError, match=r"is not JSON .*; 2 documents in a row cannot be used") as caught:
        pack_block(Tokens("bytes", None, None, quarantine_after=2), tmp_path / "cache", block)
    assert caught.value.problems[0].key == f"{tmp_path}/a.jsonl:3"
    assert not any(is_packed(part) for part in (tmp_path / "cache").rglob("*"))


def test_what_one_run_leaves_out_another_refuses(tmp_path: Path, make_data: MakeData) -> None:
    """They share the cache folder, and the same command must give the same result."""
    block = lines(tmp_path, make_data)
    pack_block(Tokens("bytes", None, None, quarantine_after=3), tmp_path / "cache", block)
    with refused(DataError, f"{tmp_path}/a.jsonl:2"):
        pack_block(Tokens("bytes", None, None, quarantine_after=1), tmp_path / "cache", block)


def test_a_folder_of_the_cache_that_cannot_be_made_is_named_in_full(
    noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()

    real = os.mkdir

    def refuse(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
        real(name, mode)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StorageError) as caught:
        pack_block(TOKENS, tmp_path / "cache", noted)
    assert caught.value.problems[0].key == str(part_path(TOKENS, tmp_path / "cache", noted).parent)
