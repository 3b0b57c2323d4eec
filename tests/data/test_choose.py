"""`data.path` alone chooses the format by the content of what is there."""

from __future__ import annotations

import bz2
import gzip
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from bytescale_cli.main import run
from engine.config.load import load, resolved_yaml
from engine.data.choose import with_format
from engine.data.sources.formats import FORMATS
from engine.data.token_file import TokenFile
from engine.errors import ConfigError
from engine.run.folder import RunFolder
from tests.data.token_files import written
from tests.refusals import refused

LINES = b'{"text": "one"}\n{"text": "two"}\n'
TABLE = pa.table({"text": ["one", "two"]})
Files = Mapping[str, bytes | None]  # None: a Parquet file, or an Arrow file if the name says so


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Files], Path]:
    """Write files into a folder."""

    def write(files: Files) -> Path:
        for name, content in files.items():
            path = tmp_path / "documents" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content)
            elif "arrow" in name:
                with pa.ipc.new_stream(path, TABLE.schema) as stream:
                    stream.write_table(TABLE)
            else:
                pyarrow.parquet.write_table(TABLE, path)
        return tmp_path / "documents"

    return write


def chosen(path: object, *more: str) -> tuple[str, list[bytes | None]]:
    """The format that is chosen for a path, and the texts that it reads."""
    data = load(with_format([f"data.path={path}", *more])).data
    blocks = FORMATS[data.format].blocks(data)
    return data.format, [document.text for block in blocks for document in block.documents()]


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("a.jsonl", LINES, "jsonl"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0), "jsonl"),
        ("a.bz2", bz2.compress(LINES), "jsonl"),
        ("no-name", LINES, "jsonl"),
        ("wrong.txt", LINES, "jsonl"),
        ("a.parquet", None, "parquet"),
        ("parquet-without-a-suffix", None, "parquet"),
        ("a.arrow", None, "arrow"),
        ("arrow.parquet", None, "arrow"),
        ("book [1].txt", b"one", "folder"),
        ("book.txt.gz", gzip.compress(b"one", mtime=0), "folder"),
    ],
)
def test_a_file(name: str, content: bytes | None, form: str, make: Callable[[Files], Path]) -> None:
    expected = [b"one"] if form == "folder" else [b"one", b"two"]
    assert chosen(make({name: content, "other.md": b"other"}) / name) == (form, expected)


@pytest.mark.parametrize(
    ("files", "form", "count"),
    [
        ({"a.jsonl": LINES, "b/c.jsonl.gz": gzip.compress(LINES, mtime=0)}, "jsonl", 4),
        ({"a.ndjson": LINES, "README.md": b"about"}, "jsonl", 2),
        ({"a.json": LINES, "b.json.gz": gzip.compress(LINES, mtime=0)}, "jsonl", 4),
        (
            {"data/a.parquet": None, "README.md": b"about", "dataset_info.json": b"{}", ".git/x.jsonl": LINES},
            "parquet",
            2,
        ),
        ({"a.pq": None, "b.pq": None}, "parquet", 4),
        ({"data-0.arrow": None, "state.json": b'{"_data_files": [{"filename": "data-0.arrow"}]}'}, "arrow", 2),
        ({"a.txt": b"one", "b.py": b"two", "README.md": b"three", ".hidden": b"\0"}, "folder", 3),
        ({"a.txt": b"one", "b.txt": b"two", "image.png": b"PNG\0\0"}, "folder", 2),
        ({"a.py": b"one", "b/c.py": b"two", "Makefile": b"all:", "d.md": b"x", "c.pyc": b"\0\0"}, "folder", 2),
    ],
)
def test_a_folder(files: Files, form: str, count: int, make: Callable[[Files], Path]) -> None:
    root = make(files)
    found, texts = chosen(root)
    assert (found, len(texts)) == (form, count)
    if "b.txt" in files:
        assert chosen(f"{root}/*.txt") == ("folder", [b"one", b"two"])
    if "a.jsonl" in files:
        assert chosen(f"{root}/*.jsonl") == ("jsonl", [b"one", b"two"])
        assert chosen(f"[{root}/a.jsonl,{root}/b]") == ("jsonl", [b"one", b"two"] * 2)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("sub/*.json", [b"one", b"two"]),
        ("**/*.json", [b"one", b"two"] * 2),
        ("*", [b"one", b"two"]),  # with a README, so **/*.jsonl is set instead
        ("sub/*", None),  # with a README, and there are others in another folder
    ],
)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_pattern_that_is_set_selects_the_files(
    pattern: str, expected: list[bytes] | None, in_a_file: bool, make: Callable[[Files], Path], tmp_path: Path
) -> None:
    root = make(
        {"sub/a.json": LINES, "other/b.json": LINES, "sub/README.md": b"x", "README.md": b"x", "c.jsonl": LINES}
    )
    given = [f"data.path={root}", f"data.pattern={pattern}"]
    if in_a_file:
        (tmp_path / "mine.yaml").write_text(
            f"defaults:\n  - quickstart\ndata:\n  path: {root}\n  pattern: '{pattern}'\n"
        )
        given = [f"recipe={tmp_path / 'mine.yaml'}"]
    if expected is None:
        with refused(ConfigError, f"data.path={root}"):
            with_format(given)
        return
    data = load(with_format(given)).data
    found = [document.text for block in FORMATS[data.format].blocks(data) for document in block.documents()]
    assert (data.format, found) == ("jsonl", expected)


def test_a_token_file(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    prefix = written(tmp_path / "tokens" / "a", [[1]])
    for path in (prefix, f"{prefix}.idx", f"{prefix}.bin", prefix.parent):
        data = load(with_format([f"data.path={path}"])).data
        assert data.format == "tokens" and len(TokenFile.open(Path(data.path_text))) == 1
    written(tmp_path / "tokens" / "b", [[1]])
    with refused(ConfigError, ".../tokens") as problems:
        with_format([f"data.path={prefix.parent}"])
    assert "2" in problems[0].message


@pytest.mark.parametrize(
    ("files", "ways"),
    [
        ({"a.jsonl": LINES, "a.txt": b"text"}, ["data=jsonl", "data=folder"]),
        ({"a.jsonl": LINES, "a.parquet": None}, ["data=jsonl", "data=parquet"]),
        ({"a.parquet": None, "a.arrow": None, "README.md": b"x"}, ["data=parquet", "data=arrow"]),
    ],
)
def test_what_is_ambiguous_names_the_choices(files: Files, ways: list[str], make: Callable[[Files], Path]) -> None:
    root = make(files)
    with pytest.raises(ConfigError) as caught:
        with_format([f"data.path={root}"])
    (problem,) = caught.value.problems
    assert problem.key == f"data.path={root}" and all(way in str(problem.hint) for way in ways)
    pattern = "data.pattern=**/*.txt" if "a.txt" in files else f"data.pattern=**/*.{ways[1].partition('=')[2]}"
    assert chosen(root, pattern)[0] == ways[1].partition("=")[2]
    with pytest.raises(ConfigError, match="names"):
        with_format([f"data.path=[{','.join(f'{root}/{name}' for name in files)}]"])


def test_what_no_format_reads_is_refused_at_once(
    make: Callable[[Files], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after a line that calls it JSON lines."""
    root = make({"alpaca.json": b'[{"instruction": "a", "output": "b"}]'})
    assert run(["data", "lint", f"data.path={root}/alpaca.json"]) == 4
    error = capsys.readouterr().err
    assert error.startswith(f"error: {root}/alpaca.json: is a JSON array") and "alpaca.jsonl" in error
    os.mkfifo(root / "pipe.jsonl")
    assert run(["data", "lint", f"data.path={root}/pipe.jsonl"]) == 4
    error = capsys.readouterr().err
    assert error.startswith(f"error: {root}/pipe.jsonl: is a named pipe") and "copy" in error


@pytest.mark.parametrize("command", ["profile-data", "plan recipe=quickstart", "data lint", "train recipe=quickstart"])
def test_a_path_without_anything_is_no_missing_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*command.split(), "data.path=nothere.jsonl"]) == 4
    assert "nothere.jsonl: no such file or folder" in capsys.readouterr().err


def test_a_format_that_is_named_stays(make: Callable[[Files], Path], tmp_path: Path) -> None:
    root = make({"a.jsonl": LINES})
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults:\n  - quickstart\ndata:\n  path: {root}\n")
    assert with_format([f"recipe={mine}"])[1:] == ["data=jsonl"]
    for overrides in ([f"data.path={root}", "data=folder"], [f"data.path={root}", "data.format=folder"]):
        assert run(["config", "show", *overrides]) == 0
        from bytescale_cli.options import chosen as of_command

        assert of_command(overrides) == overrides
    assert with_format([f"data.path={tmp_path}/none"]) == [f"data.path={tmp_path}/none"]


def test_commands_say_what_was_chosen(make: Callable[[Files], Path], capsys: pytest.CaptureFixture[str]) -> None:
    root = make({"a.jsonl": LINES, ".hidden.jsonl": LINES})
    assert run(["config", "show", f"data.path={root}", "--json"]) == 0
    shown = capsys.readouterr()
    data: dict[str, Any] = json.loads(shown.out)["config"]["data"]
    assert (data["name"], data["format"], data["path"]) == ("jsonl", "jsonl", str(root))
    (line,) = shown.err.splitlines()
    assert "data=jsonl" in line and str(root) in line
    assert run(["data", "lint", f"data.path={root}"]) == 0
    assert "1 hidden file" in capsys.readouterr().err


@pytest.mark.parametrize("before", ["jsonl", "stdlib"])
def test_a_run_keeps_its_format(
    before: str, make: Callable[[Files], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is there when it is resumed. Runs of earlier versions read a path without `data=` as Python files."""
    root = make({"a.jsonl": LINES, "a.py": b"text"})
    overrides = [f"run.out={tmp_path / 'run'}", f"data.path={root}"]
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").resolved.write_text(resolved_yaml(load([*overrides, f"data={before}"])))
    assert load(with_format(overrides)) == load([*overrides, f"data={before}"])
    with pytest.raises(ConfigError):
        with_format([overrides[0], f"data.path={root}/*"])
    monkeypatch.chdir(tmp_path)  # the processes of a job use runs/RECIPE without run.out
    Path("runs").mkdir()
    (tmp_path / "run").rename("runs/quickstart")
    assert load(with_format(overrides[1:], of_job=True)).data.name == before
    with pytest.raises(ConfigError):
        with_format(overrides[1:])
