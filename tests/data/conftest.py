"""Fixtures of the data tests: a config of documents, and a corpus without any document on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import schema
from engine.data.corpus import Corpus, open_corpus
from engine.data.pack import hashes_path
from engine.data.token_file import write_index


@pytest.fixture(scope="session")
def make_data() -> Callable[..., schema.Data]:
    """Make `Data` sections from a path and changes to the defaults: a folder of UTF-8 files."""

    def make(path: Path | str, **changes: Any) -> schema.Data:
        values: dict[str, Any] = {
            "name": "test",
            "path": str(path),
            "format": "folder",
            "pattern": "**/*",
            "field": "text",
            "encoding": "utf-8",
            "tokenizer": "bytes",
            "bos": None,
            "eos": None,
            "cache": None,
            "runtime": "local",
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
def make_corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Corpus]:
    """Make corpora of zeros from lengths (inputs) and the numbers of the validation documents."""

    def make(lengths: Sequence[int], validation: Sequence[int] = ()) -> Corpus:
        folder = tmp_path_factory.mktemp("corpus")
        sizes = np.array(lengths, dtype=np.int32) + 1
        np.zeros(int(sizes.sum()), dtype=np.uint16).tofile(folder / "a.bin")
        write_index(folder / "a", np.dtype(np.uint16), sizes)
        hashes = np.full(len(sizes), 2**63, dtype=np.uint64)
        hashes[list(validation)] = 0
        hashes.tofile(hashes_path(folder / "a"))
        return open_corpus(folder / "a", validation_share=0.25)

    return make
