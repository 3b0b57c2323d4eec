"""What the launcher and the commands know of the documents, and what is read for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data import order, overview
from engine.data.bigrams import BigramCounts
from engine.data.blocks import work
from engine.data.blocks.blocks import BlockId
from engine.data.corpus import TextCorpus
from engine.data.order import ORDER
from engine.data.overview import Corpora, Overview
from engine.data.pack import pack
from engine.data.parts import Tokens, is_packed, pack_blocks, part_path
from engine.data.sources import folder
from engine.data.sources.source import Block
from engine.data.steps import AHEAD_STEPS, Cursor
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import ConfigError, DataError
from tests.data.token_files import megatron, written
from tests.data.tokenizers.chat_folder import chat_folder
from tests.refusals import refused

encode = open_tokenizer("bytes").document

WriteFiles = Callable[[Mapping[str, bytes]], Path]
MANY = {f"{number:03d}.txt": b"document %d" % number for number in range(200)}


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """Load a config of documents, with a cache folder of its own."""

    def make(path: Path, *overrides: str, format_: str = "folder") -> Config:
        places = [f"data={format_}", f"data.path={path}", f"data.cache={tmp_path / 'cache'}"]
        sizes = ["context=64", "capacity=64", "batch_tokens=256", "model.vocab=258", "data.validation_share=0"]
        return load([*places, *sizes, *overrides])

    return make


MakeConfig = Callable[..., Config]


def packed(config: Config) -> Corpora:
    found = Corpora(config)
    found.pack_first(Cursor(), print)
    return found


def parts(corpora: Corpora) -> list[set[int]]:
    """The blocks of each source of texts that have been packed."""
    return [
        {number for number in range(one.blocks) if is_packed(one.texts.part(number))}
        for one in corpora.sources
        if isinstance(one, TextCorpus)
    ]


def test_few_documents_are_counted(write_files: WriteFiles, make_config: MakeConfig) -> None:
    root = write_files({"a.txt": b"abc", "b.txt": b"", "c.txt": b"x", "d.txt": b"", "e.txt": b"four"})
    corpora = packed(make_config(root))
    found = corpora.overview
    nats = BigramCounts()
    for text in (b"abc", b"x", b"four"):
        nats.add(encode(text))
    assert found == Overview(training=3, validation=0, empty=2, longest=5, bigram_nats=nats.entropy())
    assert corpora.tokens == 4 + 2 + 5


def test_documents_of_both_sides_are_counted(write_files: WriteFiles, make_config: MakeConfig) -> None:
    """As training and validation find them."""
    corpora = packed(make_config(write_files(MANY), "data.validation_share=0.25", "data.validation_tokens=1M"))
    found = corpora.overview
    assert found is not None and found.training + found.validation == 200 and 30 <= found.validation <= 70
    (table,) = corpora.steps.validation(ORDER).values()
    assert len({*zip(table.block.tolist(), table.document.tolist(), strict=True)}) == found.validation
    seen, cursor = set[tuple[int, int]](), Cursor()
    while not cursor.places or cursor.places["data"].epoch == 0:
        step = corpora.steps.next(cursor)
        assert step is not None
        table, cursor = step
        seen |= {*zip(table.block.tolist(), table.document.tolist(), strict=True)}
    assert len(seen) == found.training
    training = [corpus.lengths(block).inputs()[document] for corpus in corpora.sources for block, document in seen]
    assert corpora.tokens == sum(training)


@pytest.mark.long
def test_bigrams_are_those_of_all_documents(write_files: WriteFiles, make_config: MakeConfig) -> None:
    """Also of those that are held out, and of a token file."""
    root, counts = write_files(MANY), BigramCounts()
    for text in MANY.values():
        counts.add(encode(text))
    config = make_config(root, "data.validation_share=0.5")
    pack(config.data, root.parent / "tokens")
    for one in (config, make_config(root.parent / "tokens", format_="tokens")):
        found = packed(one).overview
        assert found is not None and found.bigram_nats == counts.entropy() > 0


def test_there_are_no_bigrams_across_documents(write_files: WriteFiles, make_config: MakeConfig) -> None:
    found = packed(make_config(write_files(MANY), "data.eos=false")).overview
    assert found is not None and found.bigram_nats is None and found.longest == 13 - 1


def test_a_file_of_another_tool_is_counted(tmp_path: Path, make_config: MakeConfig) -> None:
    prefix = megatron(tmp_path / "a", [[[1, 2, 3], [4]], [[5]], [], [[6, 7]]])
    found = packed(make_config(prefix, format_="tokens")).overview
    assert found == Overview(training=2, validation=0, empty=2, longest=3, bigram_nats=None)


@pytest.mark.long
def test_the_standard_library_has_the_known_bigram_entropy() -> None:
    """The quickstart's validation loss must fall below it; it changes little between Python versions."""
    found = packed(load(["recipe=quickstart"])).overview
    assert found is not None and found.bigram_nats == pytest.approx(2.43, abs=0.1)
    assert found.training > 500 and found.validation > 10


# Many documents


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch, write_files: WriteFiles) -> Path:
    """A hundred blocks of two documents, of which a window has four."""
    monkeypatch.setattr(order, "FEW_BYTES", 1000)
    monkeypatch.setattr(order, "WINDOW_BYTES", 80)
    monkeypatch.setattr(folder, "_BLOCK_FILES", 2)
    return write_files({name: b"%20d" % number for number, name in enumerate(MANY)})


def test_of_many_documents_the_first_windows_are_read(
    many: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start takes no longer for more documents, and neither does a resume."""
    monkeypatch.setattr("engine.data.workers.cores", lambda: 1)
    config = make_config(many, "batch_tokens=64", "data.validation_share=0.3", "data.validation_tokens=20")
    corpora = Corpora(config)
    assert not corpora.are_few and corpora.overview is None and parts(corpora) == [set()]
    corpora.pack_first(Cursor(), print)
    (first,) = parts(corpora)
    needed = {block for _, block in (*corpora.steps.upcoming(Cursor(), 64), *corpora.steps.validating(ORDER))}
    assert first == needed and len(first) < 50, "a window for training, and some of 100 blocks for validation"
    step = corpora.steps.next(Cursor())
    assert step is not None and corpora.steps.validation(ORDER)
    (read,) = parts(corpora)
    assert first <= read and len(read) < 50
    for _ in range(20):
        step = corpora.steps.next(step[1])
        assert step is not None
    resumed = Corpora(config)
    (before,) = parts(resumed)
    resumed.pack_first(step[1], print)
    (after,) = parts(resumed)
    assert resumed.steps.next(step[1]) is not None
    assert len(after - before) <= 4


def test_blocks_that_were_not_expected_are_packed_together(
    many: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all cores, in the order of need. A start whose estimate was too low would pack them one after the other."""
    together = list[int]()

    def noted(tokens: Tokens, folder: Path, blocks: Sequence[Block]) -> None:
        assert not is_packed(part_path(tokens, folder, blocks[0]))
        together.append(len(blocks))
        pack_blocks(tokens, folder, blocks, workers=1)

    monkeypatch.setattr(overview, "pack_blocks", noted)
    monkeypatch.setattr(work, "pack_block", lambda *given: pytest.fail("alone"))
    corpora = Corpora(make_config(many, "batch_tokens=1024"))
    coming = [block for _, block in corpora.steps.upcoming(Cursor(), AHEAD_STEPS * 1024)]
    assert corpora.next(Cursor()) is not None
    assert together == [1, 2, 4, 8, 16]
    assert parts(corpora) == [{*coming[:31]}]


def test_a_block_that_is_not_needed_stops_no_command(
    write_files: WriteFiles, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_BLOCK_FILES", 1)
    monkeypatch.setattr(overview, "pack_blocks", partial(pack_blocks, workers=1))
    (corpus,) = Corpora(make_config(write_files({"0.txt": b"text", "1.txt": b"\xff", "2.txt": b"text"}))).sources
    assert isinstance(corpus, TextCorpus)
    corpus.store.ask([BlockId("data", block) for block in (0, 2, 1)])
    assert len(corpus.lengths(0)) == len(corpus.lengths(2)) == 1
    with refused(DataError, ".../documents/1.txt"):
        corpus.lengths(1)


def test_few_documents_are_read_completely(
    many: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "FEW_BYTES", 200 * 20)
    corpora = packed(make_config(many))
    assert corpora.are_few and parts(corpora) == [{*range(100)}]
    monkeypatch.setattr(order, "FEW_BYTES", 200 * 20 - 1)
    assert not Corpora(make_config(many)).are_few


def test_a_small_source_among_large_ones_is_not_counted(many: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_bytes(b"text")
    sources = [
        f"data.sources={{many: {{path: {many}}}, few: {{path: {tmp_path / 'few'}}}}}",
        "data.mix={many: 3, few: 1}",
    ]
    corpora = packed(make_config(many, *sources))
    assert corpora.overview is None and [len(found) for found in parts(corpora)] == [8, 1]
    assert corpora.fingerprints.keys() == {"many", "few"}


def test_progress_is_said_now_and_then(many: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "FEW_BYTES", 1 << 20)
    clock = iter(range(0, 10_000, 2))  # seconds, at each look at the clock
    monkeypatch.setattr(overview.time, "monotonic", lambda: next(clock))
    said = list[str]()
    monkeypatch.setattr(overview, "pack_blocks", _report)
    Corpora(make_config(many)).pack_first(Cursor(), said.append)
    assert said[0].startswith(f"reading documents of {many}: ") and 10 <= len(said) <= 50
    shares = [int(line.rpartition(" ")[2].removesuffix("%")) for line in said]
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 100


def _report(tokens: Any, folder: Path, blocks: list[Any], progress: Callable[[int, int], None]) -> None:
    """Stand in for `pack_blocks`."""
    for done in range(1, len(blocks) + 1):
        progress(done, len(blocks))


def test_small_documents_are_read_without_a_word(write_files: WriteFiles, make_config: MakeConfig) -> None:
    before = time.monotonic()
    said = list[str]()
    Corpora(make_config(write_files(MANY))).pack_first(Cursor(), said.append)
    assert not said or time.monotonic() - before > overview._SECONDS


# Refusals


def test_the_hint_for_a_small_vocabulary_depends_on_the_weights(
    write_files: WriteFiles, make_config: MakeConfig
) -> None:
    """With weights, a larger model.vocab would be refused too, because the weights do not have it."""
    root = write_files(MANY)
    Corpora(make_config(root, "model.vocab=258"))
    for more, hint in (([], "set model.vocab=258 or more"), (["run.weights=hf"], "choose run.weights with")):
        with refused(ConfigError, "model.vocab=100") as problems:
            Corpora(make_config(root, "model.vocab=100", *more))
        assert "258" in problems[0].message
        (problem,) = problems
        assert str(problem.hint).startswith(hint) and problem.key == "model.vocab=100"
        assert "data.tokenizer=bytes" in problem.message


def test_the_vocabulary_of_every_source_is_checked(tmp_path: Path, make_config: MakeConfig) -> None:
    """That of another tool's file is not known; its tokens are checked as they are read."""
    pack(make_config(Path(__file__).parent, "data.pattern=conftest.py").data, tmp_path / "ours")
    theirs = written(tmp_path / "theirs", [[1, 2, 300]])
    Corpora(make_config(theirs, "model.vocab=100", format_="tokens"))
    sources = f"data.sources={{theirs: {{path: {theirs}}}, ours: {{path: {tmp_path / 'ours'}}}}}"
    with refused(ConfigError, "model.vocab=100") as problems:
        Corpora(make_config(theirs, "model.vocab=100", sources, "data.mix={theirs: 1, ours: 1}", format_="tokens"))
    assert "258" in problems[0].message
    assert str(tmp_path / "ours") in problems[0].message


def test_token_files_of_another_tokenizer_are_refused(tmp_path: Path, make_config: MakeConfig) -> None:
    """Unless the config names none, which is `bytes`, and encodes no texts with it."""
    ours, other = (chat_folder(tmp_path / name, None, size=size) for name, size in (("ours", 500), ("other", 450)))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a text")
    vocabulary, tokenizer = "model.vocab=500", f"data.tokenizer={ours}"
    facts = pack(make_config(tmp_path / "texts", vocabulary, tokenizer, "data.bos=false").data, tmp_path / "a")
    accepted = (tokenizer, "data.tokenizer=bytes")
    for one in accepted:  # BOS and EOS are those of the file
        assert Corpora(make_config(tmp_path / "a", vocabulary, one, format_="tokens")).sources[0].kind == "huggingface"
    with pytest.raises(DataError) as caught:
        Corpora(make_config(tmp_path / "a", vocabulary, f"data.tokenizer={other}", format_="tokens"))
    (problem,) = caught.value.problems
    assert caught.value.code == 4 and problem.key == f"data.tokenizer={other}"
    assert open_tokenizer(str(other)).fingerprint[:12] in problem.message and str(tmp_path / "a") in problem.message
    assert facts.fingerprint[:12] in problem.message
    texts = f"b: {{path: {tmp_path / 'texts'}, format: folder}}"
    mixed = [f"data.sources={{a: {{path: {tmp_path / 'a'}}}, {texts}}}", "data.mix={a: 1, b: 1}", vocabulary]
    Corpora(make_config(tmp_path / "a", *mixed, tokenizer, format_="tokens"))
    with refused(DataError, "data.tokenizer=bytes"):
        Corpora(make_config(tmp_path / "a", *mixed, format_="tokens"))
    theirs = written(tmp_path / "theirs", [[1, 2]])
    assert (
        Corpora(make_config(theirs, f"data.tokenizer={other}", "model.vocab=450", format_="tokens")).sources[0].kind
        is None
    )


def test_a_source_that_cannot_be_read_is_refused_at_once(tmp_path: Path, make_config: MakeConfig) -> None:
    with refused(DataError, f"{tmp_path}/gone"):
        Corpora(make_config(tmp_path / "gone"))
    with refused(DataError, f"{tmp_path}/gone.idx"):
        Corpora(make_config(tmp_path / "gone", format_="tokens"))


def test_a_document_that_cannot_be_used_is_refused_before_a_run(
    write_files: WriteFiles, make_config: MakeConfig
) -> None:
    root = write_files(MANY | {"077.txt": b"caf\xe9"})
    with refused(DataError, ".../documents/077.txt") as problems:
        packed(make_config(root))
    assert problems[0].key == str(root / "077.txt")


def test_the_fingerprints_are_those_of_the_sources(write_files: WriteFiles, make_config: MakeConfig) -> None:
    """Nothing is packed for them."""
    corpora = Corpora(make_config(write_files(MANY)))
    (only,) = corpora.sources
    assert corpora.fingerprints == {"data": only.fingerprint} and parts(corpora) == [set()]
    assert np.iterable(only.fingerprint)
