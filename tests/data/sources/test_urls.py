"""Failures of the network, in whatever exception a library has for them, are data errors with the URL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from bytescale_cli.main import app
from engine.config.schema import Data
from engine.data.sources import urls
from engine.data.sources.files import find, kind, reading, stamp
from engine.data.sources.formats import FORMATS
from engine.errors import DataError
from tests.covering import covered
from tests.data.sources.read import texts
from tests.refusals import refused


class UnknownError(Exception):
    """Of a library: httpx.ConnectError, aiohttp.ClientError and those of botocore are no OSErrors either."""


FAILURES: list[Exception] = [
    UnknownError("[Errno -2] Name or service not known"),
    ConnectionRefusedError(111, "Connection refused"),
    TimeoutError(),
    asyncio.TimeoutError("took too long"),
    ValueError("Cannot seek streaming HTTP file"),
    RuntimeError("no credentials\nand more lines"),
]
STAGES = ("info", "find", "open", "read", "seek", "ukey")


class Broken(MemoryFileSystem):
    """A file system of which one stage fails."""

    protocol = "broken"
    store = MemoryFileSystem.store
    stage: str = ""
    failure: Exception = UnknownError()

    def _fail(self, stage: str) -> None:
        if Broken.stage == stage:
            raise Broken.failure

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("broken://", "memory://")))

    def info(self, path: str, **more: Any) -> Any:
        self._fail("info")
        return super().info(path, **more)

    def find(self, path: str, *more: Any, **others: Any) -> Any:
        self._fail("find")
        return super().find(path, *more, **others)

    def ukey(self, path: str) -> str:
        self._fail("ukey")
        return str(super().info(path)["size"])

    def open(self, path: str, *more: Any, **others: Any) -> Any:
        self._fail("open")
        file, broken = super().open(path, *more, **others), self

        class Reading:
            def read(self, size: int) -> bytes:
                broken._fail("read")
                return bytes(file.read(size))

            def seek(self, *where: int) -> int:
                broken._fail("seek")
                return int(file.seek(*where))

            tell, close = staticmethod(file.tell), staticmethod(file.close)

        return Reading()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder at a URL with a file of each format."""
    fsspec.register_implementation("broken", Broken, clobber=True)
    table = pa.table({"text": ["one", "two"]})
    with fsspec.open(f"memory://{tmp_path.name}/a.jsonl", "wb") as file:
        file.write(b'{"text": "one"}\n{"text": "two"}\n')
    with fsspec.open(f"memory://{tmp_path.name}/a.parquet", "wb") as file:
        pyarrow.parquet.write_table(table, file)
    with (
        fsspec.open(f"memory://{tmp_path.name}/a.arrow", "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    monkeypatch.setattr(Broken, "stage", "")
    return f"broken://{tmp_path.name}"


@covered("form, stage, failure", ["jsonl", "parquet", "arrow"], STAGES, FAILURES)
def test_every_failure_is_a_data_error(
    form: str,
    stage: str,
    failure: Exception,
    root: str,
    make_data: Callable[..., Data],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = make_data(root, format=form, pattern=f"*.{form}")
    assert texts(data) == [b"one", b"two"]
    monkeypatch.setattr(Broken, "stage", stage)
    monkeypatch.setattr(Broken, "failure", failure)
    with pytest.raises(DataError) as caught:
        stamp(f"{root}/a.{form}")
        FORMATS[form].blocks(data)
    (problem,) = caught.value.problems
    assert str(problem.key).startswith(root) and "\n" not in problem.message and "network" in str(problem.hint)
    assert caught.value.__cause__ is failure


def test_what_is_missing_is_said_to_be_missing(root: str, make_data: Callable[..., Data]) -> None:
    assert kind(f"{root}/b.jsonl") == "missing" and kind(root) == "folder" and kind(f"{root}/a.jsonl") == "file"
    with refused(DataError, f"{root}/b.jsonl"):
        find(make_data(f"{root}/b.jsonl"))
    with refused(DataError, f"{root}/b.jsonl"), reading(f"{root}/b.jsonl"):
        pass


def test_a_failure_of_http_is_not_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec raises FileNotFoundError for both, with the failure as the cause."""

    def info(self: object, path: str) -> None:
        raise FileNotFoundError(path) from causes[0]

    gone = UnknownError("404")
    gone.status = 404  # type: ignore[attr-defined]
    causes: list[Exception] = [UnknownError("no route to host")]
    monkeypatch.setattr(Broken, "info", info)
    monkeypatch.setattr(urls, "_file_system", lambda url: (Broken(), url))
    with pytest.raises(DataError) as caught:
        kind("https://host/a.jsonl")
    assert caught.value.__cause__ is causes[0]
    causes[0] = gone
    assert kind("https://host/a.jsonl") == "missing" and kind("https://host/") == "folder"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "folder"])
def test_commands_report_a_data_error(form: str, root: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Broken, "stage", "info")
    words = ["data", "lint", f"data={form}", f"data.path={root}/a.jsonl", f"data.cache={tmp_path}"]
    assert isinstance(CliRunner().invoke(app, words).exception, DataError)
