"""Writes the same rows in every format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

USER: dict[str, Any] = {"role": "user", "content": "What is 2 + 2?"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "4"}


def as_lines(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_strings(rows: list[dict[str, Any]], path: Path) -> None:
    as_lines([{key: json.dumps(value) for key, value in row.items()} for row in rows], path)


def as_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows, schema=of_all(rows)), path, row_group_size=1)


def as_parquet_strings(rows: list[dict[str, Any]], path: Path) -> None:
    columns = {key: [json.dumps(row[key]) if key in row else None for row in rows] for key in ("messages", "tools")}
    pyarrow.parquet.write_table(pa.table(columns), path)


def as_arrow(rows: list[dict[str, Any]], path: Path) -> None:
    table = pa.Table.from_pylist(rows, schema=of_all(rows))
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def of_all(rows: list[dict[str, Any]]) -> pa.Schema:
    """The columns of all rows: as in real files, each message then has the keys of all messages."""
    names = sorted({key for row in rows for key in row})
    return pa.schema([pa.field(name, pa.array([row.get(name) for row in rows]).type) for name in names])


_WRITERS = {"jsonl": as_lines, "parquet": as_parquet, "arrow": as_arrow}
FORMS = pytest.mark.parametrize(("form", "write"), _WRITERS.items(), ids=_WRITERS)


def in_forms(names: str, cases: Sequence[Any], both: Sequence[int]) -> pytest.MarkDecorator:
    """Parametrize with `form`, `write` and the cases: all as JSON lines, those with the numbers `both` as tables too.

    The rest is slow: what a row means does not depend on the format, once it is read.
    """
    found = list[Any]()
    for (form, write), (number, case) in product(_WRITERS.items(), enumerate(cases)):
        marks = [] if form == "jsonl" or number in both else [pytest.mark.slow]
        found.append(pytest.param(form, write, *(case if "," in names else [case]), marks=marks, id=f"{form}-{number}"))
    return pytest.mark.parametrize(["form", "write", *names.split(", ")], found)
