"""Compressed files: texts in folders, damage, and files that need more memory than there is."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from engine.config.schema import Data
from engine.data.sources import compressed, folder, jsonl
from engine.data.sources.formats import FORMATS
from engine.errors import DataError
from tests.data.sources.read import texts

MakeData = Callable[..., Data]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}
ALL = pytest.mark.parametrize("name", PACKERS)
TEXT = "".join(f"line {number} of many\n" for number in range(500)).encode()


def refusal(data: Data) -> tuple[str, str]:
    """Key and hint of the error when all documents are read."""
    with pytest.raises(DataError) as caught:
        texts(data)
    (problem,) = caught.value.problems
    return str(problem.key), str(problem.hint)


@ALL
def test_texts_in_a_folder_may_be_compressed(name: str, tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / f"a.txt.{name}").write_bytes(PACKERS[name](TEXT))
    (tmp_path / "b.txt").write_bytes(b"plain")
    (tmp_path / "c").write_bytes(PACKERS[name](b""))
    assert texts(make_data(tmp_path)) == [TEXT, b"plain", b""]


@ALL
@pytest.mark.parametrize("form", ["folder", "jsonl"])
def test_damage_is_a_data_error(name: str, form: str, tmp_path: Path, make_data: MakeData) -> None:
    content = b"".join(b'{"text": "line %d"}\n' % number for number in range(500)) if form == "jsonl" else TEXT
    packed = PACKERS[name](content)
    middle = len(packed) // 2
    for damaged in (packed[:middle], packed[:middle] + b"\xff" * 40 + packed[middle + 40 :], packed + b"x"):
        (tmp_path / "a").write_bytes(damaged)
        path = tmp_path / "a" if form == "jsonl" else tmp_path
        assert refusal(make_data(path, format=form))[0].startswith(f"{tmp_path}/a")


@pytest.mark.parametrize(("name", "said"), [("zst", "--long"), ("xz", "xz -d")])
def test_files_that_need_more_memory_than_there_is(
    name: str, said: str, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compress or download them again does not help."""
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = {
        "zst": packer.compress(TEXT) + packer.flush(),
        "xz": lzma.compress(TEXT, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 256 << 20}]),
    }
    (tmp_path / "a").write_bytes(packed[name])
    assert texts(make_data(tmp_path)) == [TEXT]
    monkeypatch.setattr(compressed, "available_bytes", lambda: 128 << 20)
    place, hint = refusal(make_data(tmp_path))
    assert place == f"{tmp_path}/a" and said in hint


@ALL
def test_a_text_of_any_size_is_not_read_into_memory(
    name: str, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes can be decompressed to gigabytes."""
    monkeypatch.setattr(folder, "MOST_BYTES", 1000)
    monkeypatch.setattr(jsonl, "MOST_BYTES", 1000)
    (tmp_path / "a").write_bytes(PACKERS[name](b"x" * 1000))
    assert len(texts(make_data(tmp_path))[0] or b"") == 1000
    (tmp_path / "a").write_bytes(PACKERS[name](b"x" * 1001))
    assert refusal(make_data(tmp_path))[0] == f"{tmp_path}/a"
    (tmp_path / "a").write_bytes(PACKERS[name](b'{"text": "%s"}\n' % (b"x" * 900)))
    assert len(texts(make_data(tmp_path / "a", format="jsonl"))[0] or b"") == 900
    (tmp_path / "a").write_bytes(PACKERS[name](b'{"text": "%s"}\n' % (b"x" * 1000)))
    with pytest.raises(DataError) as caught:
        [list(block.documents()) for block in FORMATS["jsonl"].blocks(make_data(tmp_path / "a", format="jsonl"))]
    assert caught.value.problems[0].key == f"{tmp_path}/a:byte 0"
