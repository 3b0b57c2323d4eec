"""Token files against bytes that are laid out by hand as Megatron's tools lay them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.token_file import TokenFile, TokenWriter, concatenate, token_dtype
from engine.errors import DataError
from tests.data.token_files import CODES, megatron, written

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]


def all_of(file: TokenFile) -> list[list[int]]:
    return [file.read(document, 0, 1000).tolist() for document in range(len(file))]


@pytest.mark.parametrize("dtype", CODES)
def test_files_of_megatron_are_read(tmp_path: Path, dtype: type) -> None:
    file = TokenFile.open(megatron(tmp_path / "a", [[[1, 2], [3]], [], [[4]], [[5], [6, 7], [8, 9]]], dtype))
    assert all_of(file) == DOCUMENTS
    assert file.bounds(0, 4).tolist() == [0, 3, 3, 4, 9] and file.bounds(1, 3).tolist() == [3, 3, 4]
    assert file.read(3, 1, 3).tolist() == [6, 7] and file.read(3, 4, 9).tolist() == [9]
    assert file.read(0, 5, 9).tolist() == []


@pytest.mark.parametrize("dtype", CODES)
def test_what_is_written_are_the_bytes_of_megatron(tmp_path: Path, dtype: type) -> None:
    ours = written(tmp_path / "ours", DOCUMENTS, dtype)
    theirs = megatron(tmp_path / "theirs", [[document] for document in DOCUMENTS], dtype)
    for ending in (".idx", ".bin"):
        assert Path(f"{ours}{ending}").read_bytes() == Path(f"{theirs}{ending}").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]


@given(parts=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=4), max_size=4))
def test_parts_become_one_file(tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[int]]]) -> None:
    folder = tmp_path_factory.mktemp("parts")
    files = [written(folder / str(number), part) for number, part in enumerate(parts)]
    concatenate(files, folder / "whole", np.uint16)
    assert all_of(TokenFile.open(folder / "whole")) == [document for part in parts for document in part]


def test_no_document_is_a_file_too(tmp_path: Path) -> None:
    assert len(TokenFile.open(written(tmp_path / "none", []))) == 0


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TokenWriter(tmp_path / "a", np.uint16) as writer:
        writer.add(np.array([1]))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        (".bin", lambda content: content[:-1], "a.bin: has 17 bytes, but a.idx says 18: it was cut off"),
        (".bin", lambda content: content + b"x", "has 19 bytes, but a.idx says 18"),
        (".idx", lambda content: content[:-8], "a.idx: has 114 bytes, but its header says 122: it was cut off"),
        (".idx", lambda content: content[:20], "not an index of a token file"),
        (".idx", lambda content: b"x" + content[1:], "not an index of a token file"),
        (".idx", lambda content: content[:17] + b"\x07" + content[18:], "version 1 and dtype 7; supported are"),
        (".idx", lambda content: content[:9] + b"\x02" + content[10:], "version 2 and dtype 8"),
        (".idx", lambda content: content[:-8] + bytes(8), "sequences that are not there"),
        (".idx", None, "a.idx: no such file"),
        (".bin", None, "a.bin: no such file"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_by_name(tmp_path: Path, ending: str, change: object, message: str) -> None:
    path = Path(f"{written(tmp_path / 'a', DOCUMENTS)}{ending}")
    if callable(change):
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(DataError) as caught:
        TokenFile.open(tmp_path / "a")
    (problem,) = caught.value.problems
    assert message in f"{problem.key}: {problem.message}" and problem.hint


def test_the_dtype_is_that_of_megatron() -> None:
    assert [token_dtype(size) for size in (258, 65499, 65500, 128256)] == [np.uint16, np.uint16, np.int32, np.int32]
