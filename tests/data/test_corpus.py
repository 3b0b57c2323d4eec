from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.config import schema
from engine.config.load import load
from engine.data.bigrams import BigramCounts
from engine.data.corpus import (
    Corpus,
    Counts,
    Reader,
    check_documents,
    check_fingerprint,
    check_vocabulary,
    corpus_of,
    open_corpus,
)
from engine.data.pack import hashes_path, pack
from engine.data.tokenizers.bytes import BOS, EOS
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import ConfigError, DataError
from tests.data.token_files import megatron, written

encode = open_tokenizer("bytes").document

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
MANY = {f"{number:03d}.txt": b"document %d" % number for number in range(200)}


def corpus(data: schema.Data) -> Corpus:
    return corpus_of(data, print)


def side(found: Corpus) -> NDArray[np.bool_]:
    """Which documents are for validation."""
    return found.inputs(0, len(found))[1]


def test_lengths_are_inputs_and_empty_documents_are_counted(write_files: WriteFiles, make_data: MakeData) -> None:
    found = corpus(make_data(write_files({"a.txt": b"abc", "b.txt": b"", "c.txt": b"x", "d.txt": b""})))
    assert found.inputs(0, 2)[0].tolist() == [4, 2] and found.counts == Counts(2, 0, 4)
    assert found.empty == 2


def test_blank_lines_count_as_empty(tmp_path: Path, make_data: MakeData) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": ""}\n')
    assert corpus(make_data(path, format="jsonl")).empty == 2


def test_about_the_requested_fraction_is_used_for_validation(write_files: WriteFiles, make_data: MakeData) -> None:
    found = corpus(make_data(write_files(MANY), validation_share=0.25))
    assert 30 <= side(found).sum() <= 70
    assert found.counts == Counts(200 - side(found).sum(), side(found).sum(), 13)


def test_a_larger_validation_set_contains_a_smaller_one(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files(MANY)
    small, large = (side(corpus(make_data(root, validation_share=share))) for share in (0.1, 0.4))
    assert small.sum() < large.sum()
    assert not (small & ~large).any()


def test_equal_documents_are_on_the_same_side_of_the_split(write_files: WriteFiles, make_data: MakeData) -> None:
    """Otherwise a model would be validated on training data."""
    copies = {f"copy/{name}": text for name, text in MANY.items()}
    found = corpus(make_data(write_files(MANY | copies), validation_share=0.5))
    assert side(found)[:200].tolist() == side(found)[200:].tolist()


def test_bigrams_are_those_of_all_documents(write_files: WriteFiles, make_data: MakeData) -> None:
    counts = BigramCounts()
    for text in MANY.values():
        counts.add(encode(text))
    assert corpus(make_data(write_files(MANY), validation_share=0.5)).bigram_nats == counts.entropy() > 0


def test_the_fingerprint_depends_on_contents_and_their_order(write_files: WriteFiles, make_data: MakeData) -> None:
    def fingerprint(files: Mapping[str, bytes]) -> str:
        root = write_files(files)
        found = corpus(make_data(root)).fingerprint
        for name in files:
            (root / name).unlink()
        return found

    first = fingerprint({"a": b"1", "b": b"2"})
    assert fingerprint({"a": b"1", "b": b"2"}) == fingerprint({"c": b"1", "d": b"2", "empty": b""}) == first
    assert len({first, *map(fingerprint, [{"a": b"1", "b": b"3"}, {"a": b"2", "b": b"1"}, {"a": b"1"}])}) == 4


def test_the_fingerprint_depends_on_the_tokenizer(write_files: WriteFiles, make_data: MakeData) -> None:
    """The same texts are other tokens: a run must not go on with them."""
    root = write_files(MANY)
    without = corpus(make_data(root, eos=False))
    assert corpus(make_data(root)).fingerprint != without.fingerprint
    assert without.bigram_nats is None, "pairs across documents would count"


def test_changed_documents_are_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    found = corpus(make_data(write_files(MANY)))
    check_fingerprint(found, found.fingerprint)
    with pytest.raises(DataError, match="the documents changed since the run started"):
        check_fingerprint(found, "another")


def test_every_span_equals_that_of_the_document(write_files: WriteFiles, make_data: MakeData) -> None:
    found, tokens = corpus(make_data(write_files({"a": b"", "b": b"hello"}))), encode(b"hello")
    assert (tokens[0], tokens[-1]) == (BOS, EOS)
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            assert Reader(found, 258).tokens(0, start, stop).tolist() == tokens[start:stop].tolist()


def test_a_token_beyond_the_vocabulary_is_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    found = corpus(make_data(write_files({"a": b"hello"})))
    with pytest.raises(DataError, match="document 0 has token 257, but the model's vocabulary has 257") as caught:
        Reader(found, 257).tokens(0, 0, 7)
    (problem,) = caught.value.problems
    assert str(problem.key).endswith(".bin") and str(problem.hint).startswith("set model.vocab to 258")
    assert len(Reader(found, 257).tokens(0, 0, 6)) == 6


def test_the_hint_for_a_small_vocabulary_depends_on_the_weights(write_files: WriteFiles, make_data: MakeData) -> None:
    """With weights, a larger model.vocab would be refused too, because the weights do not have it."""
    found = corpus(make_data(write_files(MANY)))
    check_vocabulary(found, load(["model.vocab=258"]))
    for more, hint in (([], "set model.vocab=258 or more"), (["run.weights=hf"], "choose run.weights with")):
        with pytest.raises(ConfigError, match="smaller than the vocabulary of the documents' tokenizer") as caught:
            check_vocabulary(found, load(["model.vocab=100", *more]))
        assert str(caught.value.problems[0].hint).startswith(hint)


def test_a_file_of_another_tool_is_a_corpus(tmp_path: Path, make_data: MakeData) -> None:
    """Documents of less than two tokens have no input; the others are split by their place."""
    documents = [[[1, 2, 3], [4]], [[5]], [], *[[[6, number]] for number in range(200)]]
    prefix = megatron(tmp_path / "a", documents)
    found = corpus(make_data(prefix, format="tokens", validation_share=0.25))
    assert found.inputs(0, 4)[0].tolist() == [3, 0, 0, 1] and found.empty == 2 and found.bigram_nats is None
    assert 30 <= side(found).sum() <= 70 and not side(found)[1:3].any()
    assert found.counts == Counts(201 - side(found).sum(), side(found).sum(), 3)
    assert side(found).tolist() == side(open_corpus(prefix, 0.25)).tolist()


def test_the_fingerprint_of_a_file_of_another_tool_changes_with_it(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4, 5]]
    prints = [
        open_corpus(written(tmp_path / "a", found), 0.0).fingerprint
        for found in (documents, documents, [*documents, [6, 7]], [[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 6]])
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_only_empty_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"every document \(2\) is empty") as caught:
        check_documents(open_corpus(written(tmp_path / "a", [[1], []]), 0.0))
    assert caught.value.problems[0].key == str(tmp_path / "a")


def test_no_training_documents_are_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    with pytest.raises(DataError, match="none for training") as caught:
        corpus(make_data(write_files({"a": b"x"}), validation_share=0.9999999))
    assert caught.value.problems[0].key == "data.validation_share"


def test_hashes_of_another_file_are_refused(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    pack(make_data(write_files(MANY)), tmp_path / "a")
    hashes_path(tmp_path / "a").write_bytes(bytes(8))
    with pytest.raises(DataError, match="has 1 hashes for 200 documents"):
        open_corpus(tmp_path / "a", 0.0)


def test_the_standard_library_has_the_known_bigram_entropy(make_data: MakeData) -> None:
    """The quickstart's validation loss must fall below it; it changes little between Python versions."""
    found = corpus(make_data("stdlib", pattern="**/*.py", encoding="bytes", validation_share=0.05))
    assert found.bigram_nats == pytest.approx(2.43, abs=0.1)
    assert len(found) > 500
