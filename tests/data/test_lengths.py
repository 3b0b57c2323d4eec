from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.data.lengths import document_lengths, example_step, packed, read_lengths, step_lengths
from engine.data.mixes import draw
from engine.errors import ConfigError, DataError
from tests.refusals import refused


def steps_of(steps: int, *overrides: str) -> list[list[int]]:
    return [lengths.tolist() for lengths in step_lengths(load(["cluster.ranks_per_node=8", *overrides]), steps)]


@pytest.mark.parametrize("name", ["github", "byted", "lognormal"])
def test_a_mix_is_drawn_for_each_step(name: str) -> None:
    overrides = [f"lengths={name}", "lengths.max=8K", "context=2K", "batch_tokens=32K", "run.seed=5"]
    config = load(overrides)
    drawn = [draw(config.lengths, 32768, 2048, 5, step).tolist() for step in (0, 1)]
    assert steps_of(2, *overrides) == drawn
    assert drawn[0] != drawn[1]


def test_seeds_share_no_steps() -> None:
    """Otherwise the seeds of a benchmark would not be independent samples."""
    mix = ["lengths=byted", "lengths.max=8K", "context=2K", "batch_tokens=32K"]
    steps = [tuple(step) for seed in range(4) for step in steps_of(4, *mix, f"run.seed={seed}")]
    assert len(set(steps)) == 16


def test_documents_come_in_the_order_of_training(tmp_path: Path) -> None:
    for number, size in enumerate((9, 99, 0, 29)):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    own = ["data=folder", f"data.path={tmp_path}", "data.validation_share=0", "context=64", "batch_tokens=140"]
    steps = steps_of(2, *own)
    assert sorted(steps[0]) == [10, 30, 36, 64]
    assert sorted(steps[1]) == [10, 30, 36, 64]


def test_the_first_steps_of_the_quickstart_have_short_documents_and_long_ones() -> None:
    """A plan of whole files alone would show nothing."""
    config = load(["recipe=quickstart"])
    first = np.concatenate([*step_lengths(config, 4)])
    assert np.median(first) < 100 and first.max() == config.context


def test_a_file_is_read_in_order_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("# tokens\n5\n\n7  # cut\n 3\n", encoding="utf-8-sig")
    file = ["lengths=file", f"lengths.path={path}", "context=4", "batch_tokens=12"]
    assert steps_of(3, *file) == [[4, 1, 4, 3], [3, 4, 1], [4, 3, 3]]


def test_a_long_document_of_a_file_is_a_step_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("1\n20\n1\n", encoding="utf-8")
    assert steps_of(3, "lengths=file", f"lengths.path={path}", "context=8", "batch_tokens=8") == [
        [1],
        [8, 8, 4],
        [1, 1],
    ]


def one_by_one(documents: list[int], batch_tokens: int, steps: int) -> list[list[int]]:
    """Pack one document at a time, as the docstring of `packed` says."""
    at, found = 0, []
    for _ in range(steps):
        taken = [documents[at % len(documents)]]
        while sum(taken) + documents[(at + len(taken)) % len(documents)] <= batch_tokens:
            taken.append(documents[(at + len(taken)) % len(documents)])
        at += len(taken)
        found.append(taken)
    return found


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 100))
def test_packing_equals_packing_one_document_at_a_time(documents: list[int], batch_tokens: int) -> None:
    steps = islice(packed(np.array(documents, dtype=np.int64), batch_tokens, context=100), 4)
    assert [step.tolist() for step in steps] == one_by_one(documents, batch_tokens, 4)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16])
def test_an_array_is_read(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 70, 1], dtype=dtype))
    read = read_lengths(tmp_path / "a.npy")
    assert read.dtype == np.int64
    assert read.tolist() == [3, 70, 1]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("0", "0"),
        ("-7", "-7"),
        ("4K", "'4K'"),
        ("1.5", "'1.5'"),
        ("12 13", "'12 13'"),
        ("9" * 5000, "4294967296"),
        ("4294967297", "4294967296"),
        ("é", "'é'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, value: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(f"# first\n12\n{line}\n5\n", encoding="utf-8")
    with refused(DataError, f"{path}:3") as problems:
        read_lengths(path)
    assert value in problems[0].message


def test_ten_wrong_lines_are_named_and_the_others_counted(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("8\n" + "0\n" * 13, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_lengths(path)
    *named, last = caught.value.problems
    assert [problem.key for problem in named] == [f"{path}:{line}" for line in range(2, 12)]
    assert (last.message, last.key) == ("3 more invalid lengths", str(path))


def test_a_wrong_entry_of_an_array_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 0, 2**40]))
    with pytest.raises(DataError) as caught:
        read_lengths(tmp_path / "a.npy")
    assert [problem.key for problem in caught.value.problems] == [f"{tmp_path}/a.npy[1]", f"{tmp_path}/a.npy[2]"]


def write_nothing(path: Path) -> Path:
    return path / "missing.txt"


def write_empty(path: Path) -> Path:
    (path / "a.txt").write_text("# nothing\n\n", encoding="utf-8")
    return path / "a.txt"


def write_text_as_array(path: Path) -> Path:
    (path / "a.npy").write_text("12\n", encoding="utf-8")
    return path / "a.npy"


def write_half_an_array(path: Path) -> Path:
    np.save(path / "a.npy", np.arange(1, 99))
    (path / "a.npy").write_bytes((path / "a.npy").read_bytes()[:300])
    return path / "a.npy"


def write_floats(path: Path) -> Path:
    np.save(path / "a.npy", np.array([1.5]))
    return path / "a.npy"


def write_table(path: Path) -> Path:
    np.save(path / "a.npy", np.ones((2, 2), dtype=np.int64))
    return path / "a.npy"


def write_no_rows(path: Path) -> Path:
    np.save(path / "a.npy", np.array([], dtype=np.int64))
    return path / "a.npy"


@pytest.mark.parametrize(
    ("write", "value"),
    [
        (write_nothing, ""),
        (lambda path: path, ""),
        (write_empty, ""),
        (write_text_as_array, ""),
        (write_half_an_array, ""),
        (write_floats, "float64"),
        (write_table, "(2, 2)"),
        (write_no_rows, ""),
    ],
)
def test_files_without_lengths_are_refused(tmp_path: Path, write: Callable[[Path], Path], value: str) -> None:
    path = write(tmp_path)
    with refused(DataError, path) as problems:
        read_lengths(path)
    assert value in problems[0].message


def test_documents_of_a_mix_are_drawn() -> None:
    config = load(["lengths=byted", "lengths.max=64K"])
    first, again = (document_lengths(config, 5000)["byted"].lengths for _ in range(2))
    assert len(first) == 5000
    np.testing.assert_array_equal(first, again)
    assert len(document_lengths(config, None)["byted"].lengths) == 2**20


def test_documents_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("7\n9000\n", encoding="utf-8")
    config = load(["lengths=file", f"lengths.path={tmp_path / 'a.txt'}"])
    assert document_lengths(config, None)["file"].lengths.tolist() == [7, 9000]
    with pytest.raises(ConfigError, match="read completely"):
        document_lengths(config, 5)


def test_documents_of_a_recipe_are_measured(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_bytes(b"x" * number)
    config = load(["data=folder", f"data.path={tmp_path}", "batch_tokens=64", "context=8", "capacity=8"])
    found = document_lengths(config, None)["data"]
    assert found.lengths.tolist() == list(range(2, 21))
    step = example_step(config, found)
    assert 44 < step.sum() <= 64
    assert step.max() == 8


def test_a_step_of_a_mix_is_the_step_of_plan() -> None:
    config = load(["lengths=github", "lengths.max=8K", "batch_tokens=32K"])
    np.testing.assert_array_equal(
        example_step(config, document_lengths(config, 10)["github"]), next(step_lengths(config, 1))
    )


@pytest.mark.parametrize("shape", ["(10**12,)", "(1000000000000,)", f"({10**30},)", "(-1,)", "((((", "True"])
def test_a_header_of_numbers_that_are_not_there(shape: str, tmp_path: Path) -> None:
    """Reading it would allocate all of them."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path = tmp_path / "lengths.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(8))
    with pytest.raises(DataError) as caught:
        read_lengths(path)
    assert caught.value.problems[0].key == str(path)


@pytest.mark.long
def test_a_large_file_of_one_line(tmp_path: Path) -> None:
    """It is refused at its first part, not read as a whole."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError) as caught:
        read_lengths(path)
    assert caught.value.problems[0].key == f"{path}:1"
    assert str(caught.value.problems[-1].key) == str(path)
