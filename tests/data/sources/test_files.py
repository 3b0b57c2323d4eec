from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import schema
from engine.data.sources.files import below, count_hidden, find, kind, reading, split_glob, stamp
from engine.errors import DataError
from tests.refusals import refused


def test_kind_distinguishes_folders_files_and_missing_paths(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert kind(tmp_path) == "folder"
    assert kind(tmp_path / "file") == "file"
    assert kind(tmp_path / "other") == "missing"
    assert kind(tmp_path / "file" / "below") == "missing"


def test_kind_refuses_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        kind(tmp_path / ("x" * 1000))


def test_reading_names_a_file_that_is_missing(tmp_path: Path) -> None:
    with refused(DataError, f"{tmp_path}/a.txt") as problems, reading(tmp_path / "a.txt"):
        pass
    (problem,) = problems
    assert (problem.key, problem.hint) == (str(tmp_path / "a.txt"), "choose a path that this user can read")


def test_reading_refuses_a_pipe_instead_of_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused(DataError, f"{tmp_path}/pipe") as problems, reading(tmp_path / "pipe"):
        pass
    assert "copy them into a file" in str(problems[0].hint)


def test_reading_names_a_file_that_fails_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with refused(DataError, f"{tmp_path}/a.txt") as problems, reading(tmp_path / "a.txt"):
        raise OSError(5, "Input/output error")
    assert "Input/output" in problems[0].message


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("data/*.jsonl", ("data/", "*.jsonl")),
        ("*.jsonl", (".", "*.jsonl")),
        ("/*/a", ("/", "*/a")),
        ("/a/b?/**/c[0-9]", ("/a/", "b?/**/c[0-9]")),
        ("memory://*.jsonl", ("memory://", "*.jsonl")),
        ("s3://bucket/a/*", ("s3://bucket/a/", "*")),
        ("data/a.jsonl", ("data/a.jsonl", "")),
    ],
)
def test_a_glob_is_split_where_its_pattern_begins(path: str, expected: tuple[str, str]) -> None:
    assert split_glob(path) == expected


def test_only_folders_that_can_match_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A glob such as /mnt/*/a.jsonl must not walk through all of /mnt."""
    for name in ("a/x.txt", "a/b/x.txt", "c/x.txt", "c/d/e/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(Path(path).name), scandir(path))[1])
    assert list(below(tmp_path, "a/*.txt")) == ["a/x.txt"]
    assert listed == [tmp_path.name, "a"]
    listed.clear()
    assert sorted(below(tmp_path, "c/**/x.txt")) == ["c/d/e/x.txt", "c/x.txt"]
    assert listed == [tmp_path.name, "c", "d", "e"]


HIDDEN = (".x.txt", ".git/objects/a.txt", "a/.b/c.txt", "a/.c.txt")


@pytest.mark.parametrize(
    ("pattern", "found", "hidden"),
    [
        ("**/*", ["a/d.txt", "e.txt"], 4),
        ("*.txt", ["e.txt"], 1),
        ("a/*", ["a/d.txt"], 1),
        ("**/.*", [".x.txt", "a/.c.txt"], 0),
        (".git/**/*.txt", [".git/objects/a.txt"], 0),
        ("**/.b/*", ["a/.b/c.txt"], 0),
        ("**/*.jsonl", [], 2),
    ],
)
def test_hidden_files_are_left_out_and_counted_unless_the_pattern_names_them(
    pattern: str, found: list[str], hidden: int, tmp_path: Path
) -> None:
    for name in (*HIDDEN, "a/d.txt", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    assert sorted(below(tmp_path, pattern)) == found
    assert count_hidden(tmp_path, pattern) == hidden
    assert count_hidden(tmp_path / "none", pattern) == 0


def test_a_path_that_exists_is_no_glob(tmp_path: Path, make_data: Callable[..., schema.Data]) -> None:
    (tmp_path / "a[1].jsonl").touch()
    (tmp_path / "a1.jsonl").touch()
    assert find(make_data(tmp_path / "a[1].jsonl")) == [str(tmp_path / "a[1].jsonl")]
    assert find(make_data(tmp_path / "a[[]1].jsonl")) == [str(tmp_path / "a[1].jsonl")]


def test_several_paths_are_found_in_the_order_given(tmp_path: Path, make_data: Callable[..., schema.Data]) -> None:
    for name in ("b/2.jsonl", "b/1.jsonl", "a/3.jsonl", "a/4.txt", "c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def found(*paths: str) -> list[str]:
        files = find(make_data(tuple(f"{tmp_path}/{path}" for path in paths), pattern="*.jsonl"))
        return [os.path.relpath(file, tmp_path) for file in files]

    assert found("c.jsonl", "b", "a/*") == ["c.jsonl", "b/1.jsonl", "b/2.jsonl", "a/3.jsonl", "a/4.txt"]
    with refused(DataError, f"{tmp_path}/none"):
        found("a", "none")
    with refused(DataError, f"{tmp_path}/b/../b/2.jsonl"):
        found("b", "a", "b/../b/2*")


@pytest.mark.parametrize("url", ["", "file://"])
def test_a_stamp_changes_with_the_content(url: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1")
    os.utime(path, ns=(0, 0))
    first = stamp(f"{url}{path}")
    assert stamp(f"{url}{path}") == first
    path.write_bytes(b"12")
    os.utime(path, ns=(0, 0))
    longer = stamp(f"{url}{path}")
    os.utime(path, ns=(0, 10**9))
    assert len({first, longer, stamp(f"{url}{path}")}) == 3
    with refused(DataError, ".../none"):
        stamp(f"{url}{tmp_path}/none")
