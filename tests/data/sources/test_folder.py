from __future__ import annotations

import os
import pickle
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.config import schema
from engine.config.sources import BUILT_IN
from engine.data.sources.files import NOWHERE
from engine.data.sources.folder import folder_files, folder_sample
from engine.data.sources.formats import FORMATS
from engine.errors import DataError
from tests.data.sources.read import documents, texts
from tests.refusals import refused

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]


def refusal(data: schema.Data) -> tuple[str, str | None, str | None]:
    """Message, place and hint of the error when the documents are read."""
    with pytest.raises(DataError) as caught:
        documents(data)
    problem = caught.value.problems[0]
    return problem.message, problem.key, problem.hint


def test_documents_are_sorted_by_relative_path(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"b.txt": b"3", "a/z.txt": b"2", "a/b/c.txt": b"1", "B.txt": b"0"})
    found = documents(make_data(root))
    assert [document.text for document in found] == [b"0", b"1", b"2", b"3"]
    assert [document.place for document in found] == [
        str(root / name) for name in ("B.txt", "a/b/c.txt", "a/z.txt", "b.txt")
    ]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.py", ["a.py"]),
        ("**/*.py", ["a.py", "d/b.py", "d/e/c.py"]),
        ("d/*.py", ["d/b.py"]),
        ("d/**", ["d/b.py", "d/e/c.py"]),
        ("**/e/**/*.py", ["d/e/c.py"]),
        ("?.txt", ["a.txt"]),
        ("**/[bc].py", ["d/b.py", "d/e/c.py"]),
    ],
)
def test_patterns(pattern: str, names: list[str], write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a.py": b"x", "d/b.py": b"x", "d/e/c.py": b"x", "a.txt": b"x"})
    assert folder_files(make_data(root, pattern=pattern)) == [(root, names)]


def test_several_folders_are_read_in_the_order_given(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"b/2.txt": b"2", "b/1.txt": b"1", "a/d/3.txt": b"3", "a/4.md": b"4"})
    data = make_data((f"{root}/b", f"{root}/a"), pattern="**/*.txt")
    assert folder_files(data) == [(root / "b", ["1.txt", "2.txt"]), (root / "a", ["d/3.txt"])]
    assert [document.text for document in documents(data)] == [b"1", b"2", b"3"]
    blocks, fraction = folder_sample(data, 2, seed=0)
    sampled = [document.text for block in blocks for document in block.documents()]
    assert len(set(sampled)) == 2 and set(sampled) < {b"1", b"2", b"3"} and fraction == 2 / 3
    with refused(DataError, ".../documents/a/d/3.txt"):
        folder_files(make_data((f"{root}/a", f"{root}"), pattern="**/3.txt"))
    with refused(DataError, ".../documents/a"):
        folder_files(make_data((f"{root}/b", f"{root}/a"), pattern="1.txt"))


@pytest.mark.parametrize(
    ("separator", "text", "found"),
    [
        ("\n\n", b"one\n1\n\ntwo\n\n\n\n\nthree\n", [(1, b"one\n1"), (4, b"two"), (6, b""), (8, b"\nthree\n")]),
        ("<|endoftext|>", b"one\n<|endoftext|>\ntwo<|endoftext|> \n", [(1, b"one\n"), (2, b"\ntwo"), (3, b"")]),
        ("\n", b"\na\r\n\xe2\x82\xac\n", [(1, b""), (2, b"a\r"), (3, b"\xe2\x82\xac"), (4, b"")]),
        ("--", b"", [(1, b"")]),
    ],
)
def test_a_separator_divides_a_file_into_documents(
    separator: str, text: bytes, found: list[tuple[int, bytes]], write_files: WriteFiles, make_data: MakeData
) -> None:
    """Each document has the line that it begins in; a blank one is empty."""
    root = write_files({"a.txt": text, "b.txt": b"b"})
    data = make_data(root, separator=separator)
    expected = [(f"{root}/a.txt:{line}", part) for line, part in found] + [(f"{root}/b.txt:1", b"b")]
    assert [(one.place, one.text) for one in documents(data)] == expected
    blocks, fraction = folder_sample(data, None, seed=0)
    assert fraction == 1 and [one.text for block in blocks for one in block.documents()] == [one[1] for one in expected]


def test_a_divided_file_that_is_no_text_is_one_document(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a": b"1\n2", "b": b"1\ncaf\xe9", "c": b"3"})
    (block,) = FORMATS["folder"].blocks(make_data(root, separator="\n"))
    assert [(one.place, one.text) for one in block.documents()] == [
        *((f"{root}/a:{line}", b"%d" % line) for line in (1, 2)),
        (f"{root}/b", None),
        (f"{root}/c:1", b"3"),
    ]


def test_lines_of_the_standard_library(make_data: MakeData) -> None:
    """Every fourth file is one document, the others have one for each line: no byte is lost but line ends."""
    whole, blocks = (
        FORMATS["folder"].blocks(make_data(path, pattern="**/*.py", encoding="bytes")) for path in BUILT_IN
    )
    files = [one for block in whole for one in block.files]
    assert sorted(one for block in blocks for one in block.files) == sorted(files)
    texts = {one: Path(one).read_bytes() for one in files}
    found = {one.place: one.text for block in blocks for one in block.documents()}
    assert [place for place in found if place in texts] == files[::4]
    for number, file in enumerate(files):
        lines = texts[file].split(b"\n")
        expected = {f"{file}:{line}": text for line, text in enumerate(lines, 1)} if number % 4 else {file: texts[file]}
        assert {place: found[place] for place in expected if not expected[place].isspace()} == {
            place: text for place, text in expected.items() if not text.isspace()
        }


def test_the_standard_library_comes_without_installed_packages(make_data: MakeData) -> None:
    ((root, names),) = folder_files(make_data("stdlib", pattern="**/*"))
    assert {"json/__init__.py", "os.py"} <= set(names)
    assert not [name for name in names if {"site-packages", "__pycache__"} & set(name.split("/"))]
    assert str(root) == sysconfig.get_paths()["stdlib"]


def test_a_folder_with_a_matching_name_is_not_a_document(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a.py": b"x", "x.py/b.txt": b"x"})
    assert folder_files(make_data(root, pattern="**/*.py"))[0][1] == ["a.py"]


def test_a_missing_folder_is_refused(tmp_path: Path, make_data: MakeData) -> None:
    missing = str(tmp_path / "nowhere")
    assert refusal(make_data(missing)) == ("no such file or folder", missing, NOWHERE[1])
    hint = f"set data.path={tmp_path}/ data.pattern='*.txt'"
    assert refusal(make_data(f"{tmp_path}/*.txt")) == ("no such file or folder", f"{tmp_path}/*.txt", hint)
    hint = f"set data.path='{tmp_path}/my texts/' data.pattern='*.txt'"
    assert refusal(make_data(f"{tmp_path}/my texts/*.txt"))[2] == hint, "a shell takes it for one word"


def test_a_file_where_a_folder_should_be_is_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a.txt": b"text"})
    file = str(root / "a.txt")
    hint = f"set data.path={root} data.pattern=a.txt for a text; data=jsonl reads one document per line"
    assert refusal(make_data(file)) == ("is a file, not a folder", file, hint)
    assert texts(make_data(root, pattern="a.txt")) == [b"text"]


def test_a_folder_without_files_is_refused(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    expected = ("contains no files", str(tmp_path), "set data.path to a folder with files")
    assert refusal(make_data(tmp_path)) == refusal(make_data(tmp_path, pattern="*.md")) == expected


def test_a_folder_without_a_match_is_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a.txt": b"x"})
    message, key, hint = refusal(make_data(root, pattern="*.md"))
    assert (message, key) == ("contains no files that match '*.md'", str(root))
    assert hint is not None and "data.pattern" in hint


def test_a_file_that_is_not_utf8_is_refused_with_the_byte(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a.txt": b"good", "b.txt": b"caf\xe9 noir"})
    hint = "data.encoding=bytes accepts any file"
    assert refusal(make_data(root)) == ("is not UTF-8 at byte 3", str(root / "b.txt"), hint)
    assert texts(make_data(root, encoding="bytes"))[1] == b"caf\xe9 noir"


def test_the_files_after_one_that_is_no_text_are_read(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a": b"a", "b": b"caf\xe9", "c": b"c", "d": b"\0", "e": b"e"})
    (block,) = FORMATS["folder"].blocks(make_data(root))
    found = list(block.documents())
    assert [document.text for document in found] == [b"a", None, b"c", None, b"e"]
    assert [document.place for document in found] == [str(root / name) for name in "abcde"]
    problems = [document.problem.problems[0] for document in found if document.problem is not None]
    assert [(problem.message, problem.key) for problem in problems] == [
        ("is not UTF-8 at byte 3", str(root / "b")),
        ("contains NUL bytes, so it is not text", str(root / "d")),
    ]


def test_files_are_measured_when_they_are_listed(write_files: WriteFiles, make_data: MakeData) -> None:
    """The order of documents depends on sizes: in a run that goes on, they must not change with the files."""
    data = make_data(write_files({f"{number:03}": b"x" * number for number in range(70)}))
    blocks = FORMATS["folder"].blocks(data)
    assert [block.size for block in blocks] == [sum(range(64)), sum(range(64, 70))]
    names = [repr(block) for block in blocks]
    write_files({"001": b"longer", "069": b""})
    (Path(data.paths[0]) / "000").unlink()
    assert [block.size for block in pickle.loads(pickle.dumps(blocks))] == [sum(range(64)), sum(range(64, 70))]
    again = FORMATS["folder"].blocks(data)
    assert [block.size for block in again] == [sum(range(65)) + 5, sum(range(65, 69))]
    write_files({"000": b""})
    assert [repr(block) for block in FORMATS["folder"].blocks(data)] == names, "the name in a cache has no size"


def test_paths_are_those_of_pathlib(
    write_files: WriteFiles, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_files({"a/b.txt": b"x", "c.txt": b"y"})
    monkeypatch.chdir(root)
    for path in (".", "a", str(root), f"{root}/a/", "./a/..", "../documents"):
        for block in FORMATS["folder"].blocks(make_data(path)):
            assert block.files == [str(Path(path) / name) for name in folder_files(make_data(path))[0][1]]


def test_a_dangling_link_is_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({})
    (root / "x.py").symlink_to(root / "gone.py")
    message, key, _ = refusal(make_data(root))
    assert (message, key) == ("cannot be read: No such file or directory", str(root / "x.py"))
    with refused(DataError, ".../documents/x.py") as problems:  # at a start, not by the step that reads it
        FORMATS["folder"].blocks(make_data(root))
    assert problems[0].hint == "make it a readable file, or exclude it with data.pattern"


def test_a_file_without_permission_is_refused(
    write_files: WriteFiles, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read anything, so the error is simulated."""
    root = write_files({"a.txt": b"x"})

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    message, key, hint = refusal(make_data(root))
    assert (message, key) == ("cannot be read: Permission denied", str(root / "a.txt"))
    assert hint == "make it a readable file, or exclude it with data.pattern"


def test_a_folder_without_permission_is_refused_and_not_skipped(
    write_files: WriteFiles, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_files({"a.txt": b"x", "secret/b.txt": b"x"})
    scandir = os.scandir

    def denied(folder: Any) -> Any:
        if Path(folder).name == "secret":
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", denied)
    message, key, hint = refusal(make_data(root))
    assert (message, key) == ("cannot be read: Permission denied", str(root / "secret"))
    assert "data.pattern" not in str(hint), "it excludes files, not folders"
