from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from engine.config import schema
from engine.data.bigrams import BigramCounts
from engine.data.index import Index, build_index, check_fingerprint
from engine.errors import DataError

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
MANY = {f"{number:03d}.txt": b"document %d" % number for number in range(200)}


def test_lengths_are_inputs_and_empty_documents_are_counted(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a.txt": b"abc", "b.txt": b"", "c.txt": b"x", "d.txt": b""})
    index = build_index(make_data(root))
    assert index.names == ("a.txt", "c.txt")
    assert index.lengths.tolist() == [4, 2]
    assert index.empty == 2


def test_blank_lines_count_as_empty(tmp_path: Path, make_data: MakeData) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": ""}\n')
    assert build_index(make_data(path, format="jsonl")).empty == 2


def test_progress_is_reported_after_each_document(write_files: WriteFiles, make_data: MakeData) -> None:
    reported: list[tuple[int, int]] = []
    build_index(make_data(write_files({"a": b"1", "b": b""})), lambda done, total: reported.append((done, total)))
    assert reported == [(1, 2), (2, 2)]


def test_about_the_requested_fraction_is_used_for_validation(write_files: WriteFiles, make_data: MakeData) -> None:
    index = build_index(make_data(write_files(MANY), validation_share=0.25))
    assert 30 <= index.validation.sum() <= 70
    assert sorted([*index.training, *np.flatnonzero(index.validation)]) == list(range(200))


def test_a_larger_validation_set_contains_a_smaller_one(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files(MANY)
    small, large = (build_index(make_data(root, validation_share=share)).validation for share in (0.1, 0.4))
    assert small.sum() < large.sum()
    assert not (small & ~large).any()


def test_equal_documents_are_on_the_same_side_of_the_split(write_files: WriteFiles, make_data: MakeData) -> None:
    """Otherwise a model would be validated on training data."""
    copies = {f"copy/{name}": text for name, text in MANY.items()}
    index = build_index(make_data(write_files(MANY | copies), validation_share=0.5))
    side = dict(zip(index.names, index.validation.tolist(), strict=True))
    assert all(side[name] == side[f"copy/{name}"] for name in MANY)


def test_bigrams_are_counted_over_training_documents_only(write_files: WriteFiles, make_data: MakeData) -> None:
    index = build_index(make_data(write_files(MANY), validation_share=0.5))
    counts = BigramCounts()
    for document in index.training:
        counts.add(MANY[index.names[document]])
    assert index.bigram_nats == counts.entropy() > 0


def test_only_bytes_have_a_bigram_entropy(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    """A table of V x V counts is 131 GB at a vocabulary of 128K."""
    data = make_data(write_files(MANY)).model_copy(update={"tokenizer": "another"})
    index = build_index(data)
    index.save(tmp_path / "index.npz")
    assert index.bigram_nats is None and Index.load(tmp_path / "index.npz").bigram_nats is None


def test_the_fingerprint_depends_on_names_and_contents(write_files: WriteFiles, make_data: MakeData) -> None:
    def fingerprint(files: Mapping[str, bytes]) -> str:
        root = write_files(files)
        found = build_index(make_data(root)).fingerprint
        for name in files:
            (root / name).unlink()
        return found

    first = fingerprint({"a": b"1", "b": b"2"})
    assert fingerprint({"a": b"1", "b": b"2"}) == first
    assert fingerprint({"a": b"1", "b": b"2", "empty": b""}) == first
    others = [{"a": b"1", "b": b"3"}, {"a": b"1", "c": b"2"}, {"a": b"2", "b": b"1"}, {"a": b"1"}]
    assert len({first, *map(fingerprint, others)}) == 5


def test_an_index_is_the_same_after_save_and_load(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    index = build_index(make_data(write_files(MANY | {"ünï\ncode.txt": b"x"}), validation_share=0.3))
    index.save(tmp_path / "index.npz")
    loaded = Index.load(tmp_path / "index.npz")
    assert loaded.names == index.names
    assert (loaded.fingerprint, loaded.empty, loaded.bigram_nats) == (
        index.fingerprint,
        index.empty,
        index.bigram_nats,
    )
    np.testing.assert_array_equal(loaded.lengths, index.lengths)
    np.testing.assert_array_equal(loaded.validation, index.validation)


def test_changed_documents_are_refused(make_index: Callable[..., Index]) -> None:
    index = make_index([1])
    check_fingerprint(index, index.fingerprint)
    with pytest.raises(DataError, match="the documents changed since the run started"):
        check_fingerprint(index, "another")


def test_only_empty_documents_are_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a": b"", "b": b""})
    with pytest.raises(DataError, match=r"every document \(2\) is empty") as caught:
        build_index(make_data(root))
    assert caught.value.problems[0].key == str(root)


def test_no_training_documents_are_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    with pytest.raises(DataError, match="none for training") as caught:
        build_index(make_data(write_files({"a": b"x"}), validation_share=0.9999999))
    assert caught.value.problems[0].key == "data.validation_share"


def test_the_standard_library_has_the_known_bigram_entropy(make_data: MakeData) -> None:
    """The quickstart's validation loss must fall below it; it changes little between Python versions."""
    index = build_index(make_data("stdlib", pattern="**/*.py", encoding="bytes", validation_share=0.05))
    assert index.bigram_nats == pytest.approx(2.43, abs=0.1)
    assert len(index.names) > 500
