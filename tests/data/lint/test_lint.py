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
from engine.data.lint import lint as module
from engine.data.lint import reading
from engine.data.lint.faults import Limits
from engine.data.lint.findings import CHECKS, Tally
from engine.data.lint.lint import lint
from engine.data.sources import jsonl
from engine.data.token_file import TokenFile, TokenWriter
from tests.data.tokenizers.chat_folder import CHATML, MISTRAL, chat_folder
from tests.root import ROOT

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


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


CHAT_LIMITS = LIMITS._replace(vocabulary=400)
CHATS = [chat(("system", ""), ("user", "Which text?"), ("assistant", text)) for text in GOOD]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
CHAT_FAULTS: dict[str, Any] = {  # the same codes several times, by what is wrong
    "L02 no assistant": chat(("user", "Which text?"), ("user", "And now?")),
    "L02 only an unknown role": chat(("user", "Which text?"), ("bot", "This one.")),
    "L02 no role": {"messages": [{"content": "Which?"}, {"role": "assistant", "content": "This."}]},
    "L02 no content": {"messages": [{"role": "user"}, {"role": "assistant", "content": "This one."}]},
    "L02 no messages": {"messages": "Which text?"},
    "L02 a special token": chat(("user", "Which?"), ("assistant", "This.<|im_end|>")),
    "L06": {"messages": []},
    "L10": chat(("user", "Which?"), ("assistant", "cafÃ© crÃ¨me, brÃ»lÃ©e")),
    "L11": chat(("user", "Which\0 one?"), ("assistant", "This.")),
    "L13": chat(("user", "Which?"), ("assistant", "a" + "-" * 1000 + "b")),
    "L14": CHATS[3],
    "L17 of the user": chat(("user", " "), ("assistant", "Nobody asked.")),
    "L17 of the assistant": chat(("user", "Which one then?"), ("assistant", "")),
    "L18": chat(("user", "Which of them?"), ("assistant", "This."), ("bot", "That.")),
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


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.long)])
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
    tally, _ = lint([data], LIMITS, workers=workers)
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
    tally, _ = lint([make_data(root)], LIMITS, workers=workers)
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
    tally, _ = lint([make_data(tmp_path, format="parquet")], LIMITS, workers=workers)
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
    tally, _ = lint([data], LIMITS, workers=workers)
    places = {code: [f"{path}:{n + 1}" if form == "jsonl" else f"{path}:row {n}"] for code, n in numbers.items()}
    assert found(tally) == places
    assert [one.examples[0].detail for (code, _), one in tally.findings.items() if code in ("L04", "L13")] == [
        "has token 300; bytes has a vocabulary of 258",
        "repeats the id 0 1,000 times from id 3 on",
    ]
    beyond = found(lint([data], LIMITS._replace(vocabulary=257), workers=workers)[0])["L05"]
    assert beyond == places["L07"]


def test_faults_in_chats(workers: int, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a tool needs no content, and a system prompt may be empty: neither is a fault."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 1000)
    good = [{"messages": [CALL, *one["messages"]]} if n % 9 == 8 else one for n, one in enumerate(CHATS)]
    rows, numbers = planted(good, CHAT_FAULTS)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(rows))
    folder = chat_folder(tmp_path / "tokenizer", CHATML)
    tally, _ = lint([make_data(path, format="jsonl", field="messages", tokenizer=str(folder))], CHAT_LIMITS, 9, workers)
    expected: dict[str, list[str]] = {}
    for name, number in numbers.items():
        expected.setdefault(name[:3], []).append(f"{path}:{number + 1}")
    places = found(tally)
    assert {code: sorted(places[code]) for code in places} == {code: sorted(all_) for code, all_ in expected.items()}
    assert (tally.documents, tally.refused) == (len(rows), 6)
    details = {example.place: example.detail for one in tally.findings.values() for example in one.examples}
    shown = {name: details[f"{path}:{number + 1}"] for name, number in numbers.items()}
    assert shown["L02 no assistant"] == "'messages' has no message of the role assistant, only of user"
    assert shown["L02 only an unknown role"].endswith("only of bot, user")
    assert shown["L11"] == "messages[0] contains NUL at character 5"
    assert shown["L14"] == f"is a copy of {path}:4"
    assert shown["L17 of the user"] == "messages[0], of the user, is empty"
    assert shown["L17 of the assistant"] == "messages[1], of the assistant, is empty"
    assert shown["L18"] == "messages[2] has the role 'bot'"


def test_a_role_that_the_template_refuses_is_one_finding(tmp_path: Path, make_data: MakeData) -> None:
    """Wherever in the chats it is; a finding for each place would be thousands."""
    wrong = [chat(*[("user", "a"), ("assistant", "b")] * turns, ("bot", "c")) for turns in (1, 2, 3)]
    (tmp_path / "a.jsonl").write_bytes(lines([CHATS[0], *wrong]).replace(b'{"role": "system", "content": ""}, ', b""))
    folder = chat_folder(tmp_path / "tokenizer", MISTRAL)
    data = make_data(tmp_path / "a.jsonl", format="jsonl", field="messages", tokenizer=str(folder))
    tally, _ = lint([data], CHAT_LIMITS, workers=1)
    ((key, finding),) = tally.findings.items()
    assert key == (
        "L02",
        "the chat template cannot be applied to messages[:N]: roles must alternate user/assistant/user/assistant",
    )
    assert finding.count == 3 and finding.hint == "change these messages, or leave the chat out"


def test_faults_in_a_token_file(workers: int, tmp_path: Path, make_data: MakeData, monkeypatch: Any) -> None:
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 100)
    documents = [[1, 2, 3], [4, 5], [1, 2, 3], [6], [], [300, 1], [-1, 2], list(range(50))]
    with TokenWriter(tmp_path / "a", np.int32) as writer:
        for one in documents:
            writer.add(np.array(one, dtype=np.int32))
    tally, _ = lint([make_data(tmp_path / "a", format="tokens")], LIMITS, workers=workers)
    numbers = {"L04": 6, "L05": 5, "L06": 4, "L07": 3, "L14": 2}
    assert found(tally) == {code: [f"{tmp_path}/a:document {number}"] for code, number in numbers.items()}
    assert (tally.documents, tally.tokens) == (8, sum(map(len, documents)))


def test_the_index_of_a_token_file_is_read_once(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each block: the time would grow with the square of the file."""
    monkeypatch.setattr(reading, "_BLOCK_BYTES", 100)
    opened, check = list[int](), TokenFile._check_index
    monkeypatch.setattr(TokenFile, "_check_index", lambda file: opened.append(len(file)) or check(file))
    for documents in (40, 80):
        with TokenWriter(tmp_path / "a", np.int32) as writer:
            for number in range(documents):
                writer.add(np.full(25, number, dtype=np.int32))
        tally, _ = lint([make_data(tmp_path / "a", format="tokens")], LIMITS, workers=1)
        assert tally.documents == documents
    assert opened == [40, 80]


@pytest.mark.parametrize("form", ["folder", "jsonl", "parquet"])
def test_good_documents_have_no_findings(
    form: str, workers: int, write_files: WriteFiles, tmp_path: Path, make_data: MakeData
) -> None:
    if form == "folder":
        root = write_files({f"{number}.txt": text.encode() for number, text in enumerate(GOOD)})
    else:
        root = tmp_path / "a"
        root.write_bytes(lines(list(GOOD)) if form == "jsonl" else parquet(list(GOOD)))
    tally, _ = lint([make_data(root, format=form)], LIMITS, workers=workers)
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
    tally, _ = lint([make_data(tmp_path, format="jsonl")], LIMITS, workers=1)
    assert found(tally) == {"L01": [f"{tmp_path}/a.jsonl.zst"], "L02": [f"{tmp_path}/b.jsonl:2"]}
    assert tally.findings["L01", ""].examples[0].detail == "was cut off" and 4000 < tally.documents < 9000


def test_copies_are_found_across_sources(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "a").write_bytes(lines(GOOD[:3]))
    (tmp_path / "b").write_bytes(parquet([GOOD[5], GOOD[1]]))
    sources = [make_data(tmp_path / "a", format="jsonl"), make_data(tmp_path / "b", format="parquet")]
    tally, _ = lint([*sources, sources[0]], LIMITS, workers=1)
    assert found(tally) == {"L14": [f"{tmp_path}/b:row 1", *(f"{tmp_path}/a:{line}" for line in (1, 2, 3))]}
    assert tally.findings["L14", ""].examples[0].detail == f"is a copy of {tmp_path}/a:2"


def test_the_first_examples_are_kept(tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 30)
    monkeypatch.setattr(module, "_RECORDS", 3)
    (tmp_path / "a").write_bytes(lines([b"{", "", "a text"] * 20))
    tally, _ = lint([make_data(tmp_path / "a", format="jsonl")], LIMITS, keep=3, workers=1)
    assert {code: (one.count, [e.place for e in one.examples]) for (code, _), one in tally.findings.items()} == {
        "L02": (20, [f"{tmp_path}/a:{line}" for line in (1, 4, 7)]),
        "L06": (20, [f"{tmp_path}/a:{line}" for line in (2, 5, 8)]),
        "L14": (19, [f"{tmp_path}/a:{line}" for line in (6, 9, 12)]),
    }


def test_documents_are_looked_at_as_transforms_leave_them(
    workers: int, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece at the place of its document; what is left out has no faults, and a step that fails is one."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 60)
    (tmp_path / "a.jsonl").write_bytes(lines(["aa\0aa\n\nbbbbb\n\naa\0aa\n\n", "a\0a", "", GOOD[0], b"{", GOOD[1][:9]]))
    (tmp_path / "b.jsonl").write_bytes(
        lines([{"ids": list(range(9)), "loss_mask": [1] * 3 + [0] * 6}, {"ids": [300, 2]}])
    )
    cut, short = {"truncate": {"tokens": 9}}, {"drop": {"shorter": 6}}
    texts = make_data(tmp_path / "a.jsonl", format="jsonl", transform=({"split": {"tokens": 7}}, short, cut))
    ids = make_data(tmp_path / "b.jsonl", format="jsonl", field="ids", transform=({"truncate": {"tokens": 4}},))
    tally, _ = lint([texts, ids], LIMITS, workers=workers)
    first = f"{tmp_path}/a.jsonl:1"
    assert found(tally) == {
        "L02": [f"{tmp_path}/a.jsonl:5"],
        "L04": [f"{tmp_path}/b.jsonl:2"],
        "L06": [f"{tmp_path}/a.jsonl:3"],
        "L11": [first, first],
        "L14": [first, f"{tmp_path}/a.jsonl:6"],
    }
    assert tally.changed == {"split": 1, "drop": 1, "truncate": 3} and (tally.documents, tally.refused) == (8, 2)
    assert sorted(tally.lengths.elements()) == [1, 4, 8, 8, 8, 9, 9]
    split = make_data(tmp_path / "b.jsonl", format="jsonl", field="ids", transform=({"split": {"tokens": 4}},))
    assert found(lint([split], LIMITS, workers=workers)[0]) == {
        "L02": [f"{tmp_path}/b.jsonl:1"],
        "L04": [f"{tmp_path}/b.jsonl:2"],
    }


def test_the_codes_are_documented() -> None:
    documented = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert [code for code, check in CHECKS.items() if f"| {code} | {check.what} |" not in documented] == []
