"""Sources are opened in the order of the config, with the tokenizer that the run was started with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from engine.config import schema
from engine.config.load import load
from engine.config.schema import Segment, Source
from engine.data.corpus import Corpus, TextCorpus, TokenCorpus
from engine.data.opening import list_blocks, open_run, open_sources
from engine.data.overview import Corpora
from engine.data.pack import pack
from engine.data.parts import _open_tokenizer
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from engine.launch.prepare import write_facts
from engine.run.folder import RunFolder
from tests.data.reading import tokens
from tests.refusals import refused

encode = open_tokenizer("bytes").document

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]


def test_sources_without_a_weight_are_for_validation(tmp_path: Path, make_data: MakeData) -> None:
    for name in ("web", "code", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(name.encode())
    pack(make_data(tmp_path / "code"), tmp_path / "packed")
    sources = {
        "web": Source(path=str(tmp_path / "web")),
        "code": Source(path=str(tmp_path / "packed"), format="tokens"),
        "test": Source(path=str(tmp_path / "test")),
    }
    mix = (Segment(weights={"web": 1.0}), Segment(step=5, weights={"code": 1.0, "test": 0.0}))
    data = make_data(tmp_path, sources=sources, mix=mix, validation_share=0.1)
    found = open_sources(data, list_blocks(data)).corpora
    assert [(corpus.name, corpus.share, type(corpus)) for corpus in found] == [
        ("web", 0.1, TextCorpus),
        ("code", 0.1, TokenCorpus),
        ("test", 1.0, TextCorpus),
    ]
    assert [tokens(found[number], 0, 0) for number in range(3)] == [
        encode(name).tolist() for name in (b"web", b"code", b"test")
    ]


def test_the_only_source_is_trained_on(write_files: WriteFiles, make_data: MakeData) -> None:
    files = {f"{number:03d}.txt": b"document" for number in range(200)}
    data = make_data(write_files(files), validation_share=0.2)
    (only,) = open_sources(data, list_blocks(data)).corpora
    assert (only.name, only.share, only.blocks) == ("data", 0.2, 4)


def test_a_run_opens_its_tokenizer_to_pack_only(tmp_path: Path) -> None:
    """Its processes know the fingerprint. One that has become another makes no tokens."""
    model = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    for name in range(65):
        (tmp_path / "texts" / f"{name:02}").parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name:02}").write_bytes(b"a b a")
    places = [f"data.path={tmp_path / 'texts'}", f"data.cache={tmp_path / 'cache'}", f"data.tokenizer={path}"]
    config = load(["recipe=quickstart", "data=folder", *places])
    run_folder, corpora = RunFolder(tmp_path), Corpora(config)
    write_facts(run_folder, config, corpora, 0)
    shutil.rmtree(tmp_path / "cache")  # few documents are packed at the start
    Corpora(config).sources[0].lengths(0)
    content = path.read_bytes()
    for now in (None, content + b" "):
        path.unlink(missing_ok=True)
        _open_tokenizer.cache_clear()
        if now is not None:
            path.write_bytes(now)
        ((found,), _) = open_run(run_folder, config)
        assert tokens(found, 0, 0) == [0, 1, 0] and found.fingerprint == corpora.sources[0].fingerprint
        uses: list[Callable[[Corpus], object]] = [
            lambda one: one.lengths(1),
            lambda one: one.vocabulary,
            lambda one: one.ends,
        ]
        for use in uses:
            with refused(DataError, path):
                use(found)
    path.write_bytes(content)
    _open_tokenizer.cache_clear()
    assert tokens(found, 1, 0) == [0, 1, 0] and (found.vocabulary, found.ends) == (3, (None, None))
