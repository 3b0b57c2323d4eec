"""Documents that cannot be used are left out, listed once, and part of the order."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import schema
from engine.data.blocks.blocks import BlockId
from engine.data.pack import pack
from engine.data.parts import Broken, Tokens, pack_blocks, part_path, read_left_out
from engine.data.quarantine import Dropped, Quarantine, Unusable
from engine.data.sources.formats import FORMATS
from engine.data.token_facts import quarantine_path, read_facts
from engine.errors import DataError

MakeData = Callable[..., schema.Data]


def unusable(*numbers: int) -> list[Unusable]:
    return [Unusable("data", number // 10, number % 10, f"a.txt:{number}", "is not UTF-8") for number in numbers]


def listed(path: Path) -> list[tuple[int, int]]:
    """Step and number of each line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], 10 * line["block"] + line["document"]) for line in lines]


def test_documents_that_transforms_leave_out_are_counted_once_a_block() -> None:
    """Whatever process opens it again. A block takes a byte: a run may have millions."""
    dropped = Dropped()
    dropped.add({BlockId("a", 70_000): 3, BlockId("b", 0): 1})
    dropped.add({BlockId("a", 70_000): 3, BlockId("a", 2): 5})
    dropped.add({})
    assert dropped.documents == 9
    tracemalloc.start()
    for block in range(50_000):
        dropped.add({BlockId("a", block): 1})
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dropped.documents == 9 + 50_000 - 1 and size < 100_000


def test_a_document_is_listed_once_also_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(path)
    assert quarantine.add(1, []) == 0 and not path.exists()
    assert quarantine.add(2, unusable(1, 12)) == 2
    assert quarantine.add(3, unusable(12, 3)) == 3
    assert Quarantine(path).add(2, unusable(1, 12, 4, 3)) == 4
    assert listed(path) == [(2, 1), (2, 12), (3, 3), (2, 4)]
    assert json.loads(path.read_text().splitlines()[1]) == {
        "step": 2,
        "source": "data",
        "block": 1,
        "document": 2,
        "place": "a.txt:12",
        "reason": "is not UTF-8",
    }


def test_the_list_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    assert Quarantine(path, most=3).add(1, unusable(1, 2)) == 2
    for _ in range(2):
        assert Quarantine(path, most=3).add(2, unusable(3, 4, 5)) == 3
    assert listed(path) == [(1, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("cut", range(1, 110, 7))
def test_a_last_line_that_a_crash_has_cut_short_is_written_again(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    Quarantine(path).add(1, unusable(1, 2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert Quarantine(path).add(1, unusable(1, 2)) == 2
    assert path.read_bytes() == whole


def packed(data: schema.Data, folder: Path) -> Any:
    (block,) = FORMATS[data.format].blocks(data)
    pack_blocks(Tokens.of(data), folder, [block], workers=1)
    return read_left_out(part_path(Tokens.of(data), folder, block))


@pytest.mark.parametrize(
    ("lines", "after", "broken"),
    [
        ("a{b", 2, [1]),
        ("{{a{{", 3, [0, 1, 3, 4]),
        ("{ {a", 9, [0, 2]),  # an empty line
    ],
)
def test_documents_that_cannot_be_used_are_left_out(
    lines: str, after: int, broken: list[int], tmp_path: Path, make_data: MakeData
) -> None:
    text = {"a": '{"text": "a"}', "b": '{"text": "b"}', "{": "{", " ": ""}
    (tmp_path / "a.jsonl").write_text("".join(text[line] + "\n" for line in lines))
    found = packed(make_data(tmp_path / "a.jsonl", format="jsonl", quarantine_after=after), tmp_path / "cache")
    assert [one.document for one in found.broken] == broken
    assert found.empty == [number for number, line in enumerate(lines) if line == " "]
    assert found.broken[0] == Broken(
        broken[0],
        f"{tmp_path / 'a.jsonl'}:byte {sum(len(text[line]) + 1 for line in lines[: broken[0]])}",
        "is not JSON at column 2: Expecting property name enclosed in double quotes",
    )


@pytest.mark.parametrize(
    ("lines", "after", "line", "said"),
    [
        ("a{b", 0, 2, ""),
        ("a{b", 1, 2, ""),
        ("{a{{b", 2, 4, "; 2 documents in a row cannot be used"),
        ("a{{{{", 4, 5, "; 4 documents in a row cannot be used"),
    ],
)
def test_so_many_in_a_row_are_an_error(
    lines: str, after: int, line: int, said: str, tmp_path: Path, make_data: MakeData
) -> None:
    text = {"a": '{"text": "a"}', "b": '{"text": "b"}', "{": "{"}
    (tmp_path / "a.jsonl").write_text("".join(text[one] + "\n" for one in lines))
    with pytest.raises(DataError) as caught:
        packed(make_data(tmp_path / "a.jsonl", format="jsonl", quarantine_after=after), tmp_path / "cache")
    (problem,) = caught.value.problems
    assert problem.key == f"{tmp_path / 'a.jsonl'}:{line}"
    assert problem.message.endswith(f"enclosed in double quotes{said}")


def test_what_was_left_out_before_is_an_error_with_a_smaller_number(tmp_path: Path, make_data: MakeData) -> None:
    """Otherwise it would depend on the cache folder whether a run fails."""
    (tmp_path / "a.jsonl").write_text('{\n{\n{"text": "a"}\n')
    for after in (3, 2, 3):
        data = make_data(tmp_path / "a.jsonl", format="jsonl", quarantine_after=after)
        if after == 3:
            assert len(packed(data, tmp_path / "cache").broken) == 2
        else:
            with pytest.raises(DataError, match="2 documents in a row"):
                packed(data, tmp_path / "cache")


def test_packing_all_documents_lists_what_it_leaves_out(tmp_path: Path, make_data: MakeData) -> None:
    """A list of an earlier call is replaced."""
    path, out = tmp_path / "a.jsonl", tmp_path / "a"
    for lines, broken in ((["{", "{"], 2), (["{"], 1), ([], 0)):
        path.write_text("\n".join([*lines, '{"text": "a"}']) + "\n")
        facts = pack(make_data(path, format="jsonl", quarantine_after=3), out, workers=1)
        assert (facts.documents, facts.broken) == (1, broken) and read_facts(out) == facts
        if broken:
            assert listed(quarantine_path(out)) == [(0, number) for number in range(broken)]
    assert not quarantine_path(out).exists()
