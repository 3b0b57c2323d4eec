"""Token files against bytes that are laid out by hand as Megatron's tools lay them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data import token_file as module
from engine.data.token_file import TokenFile, TokenWriter, concatenate, mask_path, token_dtype
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


MASKED = st.lists(st.none() | st.lists(st.booleans(), max_size=20) | st.lists(st.just(True), max_size=40), max_size=5)


def write_masks(prefix: Path, masks: list[list[bool] | None]) -> Path:
    """Write a document for each mask; one without a mask has 3 tokens."""
    return written(prefix, [[7] * (3 if mask is None else len(mask)) for mask in masks], masks=masks)


@given(parts=st.lists(MASKED, max_size=4), chunk=st.sampled_from([8, 16, 1024]))
def test_masks_are_bits_beside_the_tokens(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[bool] | None]], chunk: int
) -> None:
    """Parts with and without a mask become one file, which is numpy's packbits; it is missing if all tokens count."""
    folder = tmp_path_factory.mktemp("masks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        files = [write_masks(folder / str(number), part) for number, part in enumerate(parts)]
        concatenate(files, folder / "whole", np.uint16)
    for prefix, masks in (*zip(files, parts, strict=True), (folder / "whole", [one for part in parts for one in part])):
        expected = [[True] * 3 if mask is None else mask for mask in masks]
        bits = np.array([bit for one in expected for bit in one], dtype=np.bool_)
        opened = TokenFile.open(prefix)
        assert mask_path(prefix).exists() == (not bits.all())
        for document, one in enumerate(expected):
            for start, stop in ((0, 100), (1, 3), (2, 2), (3, 9)):
                found = opened.counted(document, start, stop)
                assert found is None if bits.all() else found is not None and found.tolist() == one[start:stop]
        if not bits.all():
            assert mask_path(prefix).read_bytes() == np.packbits(bits, bitorder="little").tobytes()


def test_a_mask_of_an_older_file_does_not_stay(tmp_path: Path) -> None:
    """Its tokens would be excluded in the new file."""
    write_masks(tmp_path / "a", [[True, False]])
    write_masks(tmp_path / "a", [[True, True]])
    assert TokenFile.open(tmp_path / "a").counted(0, 0, 2) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_mask_counts_in_sequences_of_megatron(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "a", [[[1, 2], [3]], [[4]]])
    mask_path(prefix).write_bytes(b"\x0a")
    found = [TokenFile.open(prefix).counted(document, 0, 9) for document in range(2)]
    assert [one.tolist() for one in found if one is not None] == [[False, True, False], [True]]


def test_no_document_is_a_file_too(tmp_path: Path) -> None:
    assert len(TokenFile.open(written(tmp_path / "none", []))) == 0


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TokenWriter(tmp_path / "a", np.uint16) as writer:
        writer.add(np.array([1]), np.array([False]))
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
        (".mask", lambda content: content[:-1], "a.mask: has 1 bytes for 9 tokens: it was cut off"),
        (".mask", lambda content: content + b"x", "a.mask: has 3 bytes for 9 tokens"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_by_name(tmp_path: Path, ending: str, change: object, message: str) -> None:
    masks = [[False] * len(document) for document in DOCUMENTS]
    path = Path(f"{written(tmp_path / 'a', DOCUMENTS, masks=masks)}{ending}")
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
