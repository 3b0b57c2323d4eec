"""MB of decoded text per CPU second of each format of documents, and of Parquet row groups in random order.

`python benchmarks/sources.py` writes the standard library's source files, repeated to 200 MB, in every format into a
temporary folder, and reads each in one process, the best of 3 alternating rounds. Token ids are the texts' bytes. The
last line is a token file of uint16 ids of these bytes, of which each document is read once, in random order, as ranks
read from `data.cache`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import zstandard

from engine.config import schema
from engine.config.load import load
from engine.data.corpus import Reader, TokenCorpus
from engine.data.pack import pack
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block, usable

_ROUNDS = 3
_ROW_GROUP = 8 << 20  # bytes of text


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=200)
    size = parser.parse_args().megabytes * 10**6
    with tempfile.TemporaryDirectory() as place:
        sources = dict(write(Path(place), texts(size)))
        cases = {name: FORMATS[data.format].blocks(data) for name, data in sources.items()}
        cases["parquet, random order"] = random.Random(0).sample(cases["parquet"], len(cases["parquet"]))
        found = {name: max(rates) for name, rates in measure(cases).items()}
        pack(sources["folder"], Path(place, "packed"), workers=1)
        tokens = max(read_tokens(Path(place, "packed")) for _ in range(_ROUNDS))
    for name, rate in found.items():
        print(f"{name:24} {len(cases[name]):5} blocks {rate:8.0f} MB/s")
    print(f"token file {tokens:.0f} MB/s")
    print(f"random / sequential: {found['parquet, random order'] / found['parquet']:.2f}")


def texts(size: int) -> list[str]:
    """Return UTF-8 texts of the standard library of together about `size` bytes."""
    data = load(["data=stdlib"]).data
    found = [document.text for block in FORMATS["folder"].blocks(data) for document in usable(block)]
    valid = [text.decode("utf-8", "ignore") for text in found if text]
    total = sum(map(len, valid))
    return [f"# {copy}\n{text}" for copy in range(-(-size // total)) for text in valid]


def write(root: Path, documents: Sequence[str]) -> Iterator[tuple[str, schema.Data]]:
    """Write the documents in each format, and yield its name and config."""
    (root / "folder").mkdir()
    for number, text in enumerate(documents):
        (root / "folder" / f"{number:06d}.py").write_text(text, encoding="utf-8")
    yield "folder", config("folder", root / "folder")
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in documents)
    packed = {"jsonl": lines, "jsonl.gz": gzip.compress(lines, 6), "jsonl.zst": zstandard.compress(lines)}
    for name, content in packed.items():
        (root / name).write_bytes(content)
        yield name, config("jsonl", root / name)
    table = pa.table({"id": range(len(documents)), "text": documents})
    rows = max(1, len(documents) * _ROW_GROUP // len(lines))
    for name, compression in (("parquet", "snappy"), ("parquet.zst", "zstd")):
        pyarrow.parquet.write_table(table, root / name, row_group_size=rows, compression=compression)
        yield name, config("parquet", root / name)
    with pa.ipc.new_stream(root / "arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    yield "arrow", config("arrow", root / "arrow")
    ids = pa.table({"input_ids": [list(text.encode()) for text in documents[: len(documents) // 8]]})
    pyarrow.parquet.write_table(ids, root / "ids", row_group_size=rows)
    yield "parquet, input_ids", config("parquet", root / "ids", "data.field=input_ids")


def config(form: str, path: Path, *more: str) -> schema.Data:
    return load([f"data={form}", f"data.path={path}", *more]).data


def measure(cases: dict[str, list[Block]]) -> dict[str, list[float]]:
    """Read all blocks of each case several times; return the MB of text or the 10^6 ids per CPU second."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_ROUNDS):
        for name, blocks in cases.items():
            start, size = time.process_time(), 0
            for block in blocks:
                for document in usable(block):
                    found = document.text if document.text is not None else document.ids
                    size += len(found) if found is not None else 0
            rates[name].append(size / 1e6 / (time.process_time() - start))
    return rates


def read_tokens(prefix: Path) -> float:
    """Read each document of a token file, in random order; return the MB of the file per CPU second."""
    corpus = TokenCorpus("data", prefix, 0.0)
    sizes = {block: len(corpus.open(block).inputs()) for block in range(corpus.blocks)}
    places = [(block, document) for block, size in sizes.items() for document in range(size)]
    random.Random(0).shuffle(places)
    reader, start, tokens = Reader([corpus], 1 << 16), time.process_time(), 0
    for block, document in places:
        tokens += len(reader.tokens(0, block, document, 0, 1 << 40))
    return 2 * tokens / 1e6 / (time.process_time() - start)


if __name__ == "__main__":
    main()
