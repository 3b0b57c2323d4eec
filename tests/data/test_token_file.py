"""Token files against bytes that are laid out by hand as Megatron's tools lay them out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.data.token_file import TokenFile, TokenWriter, concatenate, token_dtype
from engine.errors import DataError

CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}
DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]


def megatron(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: type = np.uint16) -> Path:
    """Write documents of several sequences each."""
    sequences = [np.array(one, dtype=dtype) for document in documents for one in document]
    lengths = [len(one) for one in sequences]
    offsets = [sum(one.nbytes for one in sequences[:number]) for number in range(len(sequences))]
    first = np.cumsum([0, *(len(document) for document in documents)])
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype]))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(first)))
        file.write(np.array(lengths, dtype=np.int32).tobytes() + np.array(offsets, dtype=np.int64).tobytes())
        file.write(first.astype(np.int64).tobytes())
    Path(f"{prefix}.bin").write_bytes(b"".join(one.tobytes() for one in sequences))
    return prefix


def all_of(file: TokenFile) -> list[list[int]]:
    return [file.read(document, 0, 1000).tolist() for document in range(len(file))]


def written(prefix: Path, documents: Sequence[Sequence[int]], dtype: type = np.uint16) -> Path:
    with TokenWriter(prefix, dtype) as writer:
        for one in documents:
            writer.add(np.array(one, dtype=np.int64))
    return prefix


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


def test_many_documents_cost_nothing_until_they_are_read(tmp_path: Path) -> None:
    """Only the pages that are read are loaded: no list of documents is made."""
    whole: NDArray[np.int64] = np.arange(20_000)
    file = TokenFile.open(written(tmp_path / "a", np.split(whole, 10_000), np.int32))
    assert isinstance(file.offsets.base, np.ndarray) and not file.offsets.flags.owndata
    assert file.read(9_999, 0, 2).tolist() == [19_998, 19_999]
