"""What the members of a ring read of documents: bytes delivered per byte used, and how often a document is tokenized.

    python benchmarks/data_reads.py

As many processes as a ring has ranks open the same JSONL or Parquet file at the same time, without loaders, and read
their shards of each document. They count the bytes that they read from token files, and the documents that they
tokenize.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.config.load import load
from engine.data.corpus import Reader, list_blocks, open_corpora
from engine.data.encode import encode
from engine.data.inputs import rank_inputs
from engine.data.steps import SequenceTable
from engine.planner.plan.step_plan import MicroBatch, Shard

SIZES = [1_900_000, *[40_000] * 40, *[3_000] * 400]  # bytes of the documents


def main() -> None:
    """Print a row for each format and ring."""
    print("| format | ring | bytes delivered / used | documents tokenized / documents |\n|---|---|---|---|")
    for kind in ("jsonl", "parquet"):
        for degree in (1, 2, 4, 8):
            with tempfile.TemporaryDirectory() as folder:
                path = write(Path(folder), kind)
                with multiprocessing.get_context("spawn").Pool(degree) as pool:
                    found = pool.starmap(read, [(str(path), kind, folder, degree, part) for part in range(degree)], 1)
            delivered, used, tokenized = map(sum, zip(*found, strict=True))
            print(f"| {kind} | {degree} | {delivered / used:.3f} | {tokenized / len(SIZES):.3f} |", flush=True)


def write(folder: Path, kind: str) -> Path:
    """Write the documents into a file."""
    texts = [("abcdefghij" * (size // 10 + 1))[:size] for size in SIZES]
    path = folder / f"documents.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"text": texts}), path, row_group_size=64)
    return path


def read(path: str, kind: str, folder: str, degree: int, part: int) -> tuple[int, int, int]:
    """Read a rank's shards of all documents; return bytes of tokens read and used, and documents tokenized."""
    counts, pread = Counter[str](), os.pread

    def counting_encode(*given: Any) -> Any:
        counts["tokenized"] += 1
        return encode(*given)

    def counting_pread(handle: int, size: int, at: int) -> bytes:
        found = pread(handle, size, at)
        counts["read"] += len(found)
        return found

    config = load(["recipe=quickstart", f"data={kind}", f"data.path={path}", f"data.cache={folder}/cache"])
    corpora = open_corpora(config.data, list_blocks(config.data))
    (corpus,) = corpora
    for block in range(corpus.blocks):
        with patch("engine.data.parts.encode", counting_encode):
            packed = corpus.open(block)
        lengths = packed.inputs()
        zeros, width = np.zeros_like(lengths), packed.tokens.dtype.itemsize
        documents = np.arange(len(lengths))
        table = SequenceTable(zeros, zeros + block, documents, zeros, lengths, lengths, packed.hash())
        with patch("os.pread", counting_pread):
            for sequence, length in enumerate(lengths.tolist()):
                micro = MicroBatch(0, part, 0, -1, (Shard(sequence, length, tuple(range(degree)), part),))
                counts["used"] += width * len(rank_inputs(Reader(corpora, 258), table, micro).tokens)
    return counts["read"], counts["used"], counts["tokenized"]


if __name__ == "__main__":
    main()
