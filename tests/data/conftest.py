"""Fixtures of the data tests: a config of documents, and a corpus without any document on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import schema
from engine.data.corpus import TokenCorpus
from engine.data.token_facts import SCHEMA, Facts, blocks_path, facts_path, hashes_path
from engine.data.token_file import write_index


@pytest.fixture(scope="session")
def make_data() -> Callable[..., schema.Data]:
    """Make `Data` sections from a path and changes to the defaults: a folder of UTF-8 files."""

    def make(path: Path | str | tuple[str, ...], **changes: Any) -> schema.Data:
        values: dict[str, Any] = {
            "name": "test",
            "path": path if isinstance(path, tuple) else str(path),
            "format": "folder",
            "pattern": "**/*",
            "separator": None,
            "field": "text",
            "encoding": "utf-8",
            "transform": (),
            "sources": {},
            "mix": (),
            "exhausted": "repeat",
            "long": "step",
            "tokenizer": "bytes",
            "bos": None,
            "eos": None,
            "cache": None,
            "spool": 1 << 36,
            "loaders": None,
            "quarantine_after": 0,
            "runtime": "local",
            "ray": {"address": None, "loaders": None, "standbys": 1, "deadline": 5.0, "memory": 4 << 30},
            "validation_share": 0.0,
            "validation_tokens": 1024,
        }
        return schema.Data(**(values | changes))

    return make


@pytest.fixture
def write_files(tmp_path: Path) -> Callable[[Mapping[str, bytes]], Path]:
    """Write files, given by relative path, into a folder, and return the folder."""

    def write(files: Mapping[str, bytes]) -> Path:
        root = tmp_path / "documents"
        root.mkdir(exist_ok=True)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text)
        return root

    return write


@pytest.fixture(scope="session")
def make_corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TokenCorpus]:
    """Make corpora of zeros from lengths (inputs) and the numbers of the validation documents.

    Blocks have `block` documents, and a size of a MiB.
    """

    def make(lengths: Sequence[int], validation: Sequence[int] = (), block: int = 2) -> TokenCorpus:
        folder = tmp_path_factory.mktemp("corpus")
        sizes = np.array(lengths, dtype=np.int32) + 1
        np.zeros(int(sizes.sum()), dtype=np.uint16).tofile(folder / "a.bin")
        write_index(folder / "a", np.dtype(np.uint16), sizes)
        hashes = np.full(len(sizes), 2**63, dtype=np.uint64)
        hashes[list(validation)] = 0
        hashes.tofile(hashes_path(folder / "a"))
        firsts = [*range(0, len(sizes), block), len(sizes)]
        np.array([[first, 1 << 20] for first in firsts], dtype=np.int64).tofile(blocks_path(folder / "a"))
        facts = Facts("bytes", "f", 258, 256, 257, len(sizes), int(sizes.sum()), 0, "c", masked=False)
        facts_path(folder / "a").write_text(json.dumps({"schema": SCHEMA, **asdict(facts)}))
        return TokenCorpus("data", folder / "a", share=0.25)

    return make
