"""Planted faults are found with their places, in every format, and good documents have none."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from engine.config import schema
from engine.data import lint as module
from engine.data.lint import CHECKS, Limits, Tally, lint
from engine.data.sources import jsonl
from engine.data.token_file import TokenWriter

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
LIMITS = Limits(context=4096, batch_tokens=8192, vocabulary=258)
RANDOM = random.Random(0)
GOOD = [f"Document {number} of text, voilà: " + RANDOM.randbytes(9).hex() for number in range(40)]
TEXT_FAULTS: dict[str, Any] = {  # what a text may contain in all formats, by the code of its finding
    "L06": "",
    "L07": "x",
    "L09": "caf\ufffd cr\ufffdme br\ufffdl\ufffde",
    "L10": "cafÃ© crÃ¨me, brÃ»lÃ©e",
    "L11": "ab " * 800 + "b\0c",  # not where it makes a file binary
    "L12": "one\ufefftwo",
    "L13": "a" + "-" * 1000 + "b",
    "L14": GOOD[3],
    "L15": "ab " * 1500,
    "L16": "abc " * 2500,
}
ID_FAULTS: dict[str, Any] = {
    "L02": {"input_ids": [256, 1, -100]},
    "L04": {"input_ids": [256, 1, 300]},
    "L06": {"input_ids": []},
    "L07": {"input_ids": [256, 7, 257]},
    "L08": {"input_ids": [256, 1, 2], "loss_mask": [1, 0, 0]},
    "L13": {"input_ids": [256, 1, 2] + [0] * 1000},
    "L14": {"input_ids": list(range(3, 100))},
}


def found(tally: Tally) -> dict[str, list[str]]:
    """The places of each finding, by its code."""
    places: dict[str, list[str]] = {}
    for (code, _), finding in tally.findings.items():
        assert finding.count == len(finding.examples) or finding.count > tally.keep
        places.setdefault(code, []).extend(example.place for example in finding.examples)
    return places


def planted(good: list[Any], faults: Mapping[str, Any]) -> tuple[list[Any], dict[str, int]]:
    """Return documents with a fault after every second good one, and the numbers of those, from 0."""
    rows, numbers = list(good[:5]), dict[str, int]()
    for number, (code, fault) in enumerate(faults.items()):
        numbers[code] = len(rows)
        rows += [fault, *good[5 + 2 * number : 7 + 2 * number]]
    return rows, numbers


def lines(rows: list[Any]) -> bytes:
    whole = [row if isinstance(row, (dict, bytes)) else {"text": row} for row in rows]
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in whole)


def parquet(rows: list[Any], **options: Any) -> bytes:
    if isinstance(rows[0], dict):
        table = pa.Table.from_pylist([{"loss_mask": None} | row for row in rows])
    else:
        table = pa.table({"text": pa.array([r if isinstance(r, bytes) else r.encode() for r in rows], pa.binary())})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, **options)
    return file.getvalue()


@pytest.fixture(params=[1, 2])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("packed", [False, True])
def test_faults_in_jsonl(
    packed: bool, workers: int, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines have their numbers, though blocks begin inside the file and processes know only their own."""
    faults = TEXT_FAULTS | {
        "L02": b'{"text": "a" "b"}',
        "L03": b'{"text": "caf\xe9"}',
        "L06": b"",
    }
    rows, numbers = planted(GOOD, faults)
    content = zstandard.ZstdCompressor().compress(lines(rows)) if packed else lines(rows)
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 300)
    data = make_data(path, format="jsonl")
    assert packed or len(jsonl.jsonl_blocks(data)) > 50
    tally = lint([data], LIMITS, workers=workers)
    longer = [f"{path}:{numbers['L16'] + 1}"]
    expected = {code: [f"{path}:{number + 1}"] for code, number in numbers.items()}
    assert found(tally) == expected | {"L15": expected["L15"] + longer}
    assert (tally.documents, tally.refused) == (len(rows), 2)
    assert tally.findings["L14", ""].examples[0].detail == f"is a copy of {path}:4"
    assert tally.findings["L02", "is not JSON at column N: Expecting ',' delimiter"].hint == "fix or remove the line"
    assert tally.findings["L15", ""].examples[0].detail == "has 4,501 tokens; context is 4,096"


def test_faults_in_a_folder(workers: int, write_files: WriteFiles, make_data: MakeData) -> None:
    """The files after one that cannot be read are read, too."""
    rows, numbers = planted(GOOD, TEXT_FAULTS | {"L02": b"PAR1 PAR1", "L03": b"caf\xe9"})
    contents = [row if isinstance(row, bytes) else row.encode() for row in rows]
    root = write_files({f"{number:03d}.txt": content for number, content in enumerate(contents)})
    (root / "000").symlink_to(root / "gone")
    (root / "0005").symlink_to(root / "gone")
    tally = lint([make_data(root)], LIMITS, workers=workers)
    expected = {code: [f"{root}/{number:03d}.txt"] for code, number in numbers.items()}
    expected["L15"].append(*expected["L16"])
    assert found(tally) == expected | {"L01": [f"{root}/000", f"{root}/0005"]}
    assert tally.refused == 4 and tally.documents == len(rows)
    assert tally.findings["L01", ""].examples[0].detail == "cannot be read: No such file or directory"
    assert tally.findings["L14", ""].examples[0].detail == f"is a copy of {root}/003.txt"


@pytest.mark.parametrize("group", [7, 1000])
def test_faults_in_parquet(group: int, workers: int, tmp_path: Path, make_data: MakeData) -> None:
    """Rows before and after a bad one of the same row group are read; a file that was cut off hides no other."""
    rows, numbers = planted(GOOD, TEXT_FAULTS | {"L03": b"caf\xe9"})
    (tmp_path / "a.parquet").write_bytes(parquet(rows, row_group_size=group))
    (tmp_path / "b.parquet").write_bytes(parquet(GOOD[35:])[:-9])
    (tmp_path / "c.parquet").write_bytes(parquet([GOOD[0]]))
    tally = lint([make_data(tmp_path, format="parquet")], LIMITS, workers=workers)
    expected = {code: [f"{tmp_path}/a.parquet:row {number}"] for code, number in numbers.items()}
    expected["L15"].append(*expected["L16"])
    expected["L14"].append(f"{tmp_path}/c.parquet:row 0")
    assert found(tally) == expected | {"L01": [f"{tmp_path}/b.parquet"]}
    assert (tally.documents, tally.refused) == (len(rows) + 1, 2)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_faults_in_token_ids(form: str, workers: int, tmp_path: Path, make_data: MakeData) -> None:
    good = [{"input_ids": list(range(start, 100)), "loss_mask": [0] + [1] * (99 - start)} for start in range(30)]
    rows, numbers = planted(good, ID_FAULTS)
    path = tmp_path / "a"
    path.write_bytes(lines(rows) if form == "jsonl" else parquet(rows))
    data = make_data(path, format=form, field="input_ids")
    tally = lint([data], LIMITS, workers=workers)
    places = {code: [f"{path}:{n + 1}" if form == "jsonl" else f"{path}:row {n}"] for code, n in numbers.items()}
    assert found(tally) == places
    assert [one.examples[0].detail for (code, _), one in tally.findings.items() if code in ("L04", "L13")] == [
        "has token 300; bytes has a vocabulary of 258",
        "repeats the id 0 1,000 times from id 3 on",
    ]
    beyond = found(lint([data], LIMITS._replace(vocabulary=257), workers=workers))["L05"]
    assert beyond == places["L07"]


def test_faults_in_a_token_file(workers: int, tmp_path: Path, make_data: MakeData, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 100)
    documents = [[1, 2, 3], [4, 5], [1, 2, 3], [6], [], [300, 1], [-1, 2], list(range(50))]
    with TokenWriter(tmp_path / "a", np.int32) as writer:
        for one in documents:
            writer.add(np.array(one, dtype=np.int32))
    tally = lint([make_data(tmp_path / "a", format="tokens")], LIMITS, workers=workers)
    numbers = {"L04": 6, "L05": 5, "L06": 4, "L07": 3, "L14": 2}
    assert found(tally) == {code: [f"{tmp_path}/a:document {number}"] for code, number in numbers.items()}
    assert (tally.documents, tally.tokens) == (8, sum(map(len, documents)))


@pytest.mark.parametrize("form", ["folder", "jsonl", "parquet"])
def test_good_documents_have_no_findings(
    form: str, workers: int, write_files: WriteFiles, tmp_path: Path, make_data: MakeData
) -> None:
    if form == "folder":
        root = write_files({f"{number}.txt": text.encode() for number, text in enumerate(GOOD)})
    else:
        root = tmp_path / "a"
        root.write_bytes(lines(list(GOOD)) if form == "jsonl" else parquet(list(GOOD)))
    tally = lint([make_data(root, format=form)], LIMITS, workers=workers)
    sizes = [len(text.encode()) for text in GOOD]
    assert tally.findings == {} and tally.refused == 0 and tally.documents == len(GOOD)
    assert tally.tokens == sum(sizes) + 2 * len(GOOD)
    lengths = tally.lengths_found()
    assert lengths is not None and lengths["buckets"] == [
        {"upto": 64, "samples": len(GOOD), "tokens": sum(sizes) + len(GOOD)}
    ]
    assert (lengths["samples"], lengths["max"]) == (len(GOOD), max(sizes) + 1)


def test_a_file_that_was_cut_off_is_found_and_the_others_are_read(tmp_path: Path, make_data: MakeData) -> None:
    content = zstandard.ZstdCompressor(level=1).compress(lines([RANDOM.randbytes(90).hex() for _ in range(9000)]))
    (tmp_path / "a.jsonl.zst").write_bytes(content[: len(content) * 2 // 3])
    (tmp_path / "b.jsonl").write_bytes(lines([GOOD[0], b"{"]))
    tally = lint([make_data(tmp_path, format="jsonl")], LIMITS)
    assert found(tally) == {"L01": [f"{tmp_path}/a.jsonl.zst"], "L02": [f"{tmp_path}/b.jsonl:2"]}
    assert tally.findings["L01", ""].examples[0].detail == "was cut off" and 4000 < tally.documents < 9000


def test_copies_are_found_across_sources(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "a").write_bytes(lines(GOOD[:3]))
    (tmp_path / "b").write_bytes(parquet([GOOD[5], GOOD[1]]))
    sources = [make_data(tmp_path / "a", format="jsonl"), make_data(tmp_path / "b", format="parquet")]
    tally = lint([*sources, sources[0]], LIMITS)
    assert found(tally) == {"L14": [f"{tmp_path}/b:row 1", *(f"{tmp_path}/a:{line}" for line in (1, 2, 3))]}
    assert tally.findings["L14", ""].examples[0].detail == f"is a copy of {tmp_path}/a:2"


def test_the_first_examples_are_kept(tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 30)
    monkeypatch.setattr(module, "_RECORDS", 3)
    (tmp_path / "a").write_bytes(lines([b"{", "", "a text"] * 20))
    tally = lint([make_data(tmp_path / "a", format="jsonl")], LIMITS, keep=3)
    assert {code: (one.count, [e.place for e in one.examples]) for (code, _), one in tally.findings.items()} == {
        "L02": (20, [f"{tmp_path}/a:{line}" for line in (1, 4, 7)]),
        "L06": (20, [f"{tmp_path}/a:{line}" for line in (2, 5, 8)]),
        "L14": (19, [f"{tmp_path}/a:{line}" for line in (6, 9, 12)]),
    }


def test_the_codes_are_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    assert [code for code, check in CHECKS.items() if f"| {code} | {check.what} |" not in documented] == []
