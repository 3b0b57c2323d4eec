"""The documents of every step are the same, whatever ranks, loaders and caches there are."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data import order
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.work import Work
from engine.data.corpus import Reader, TextCorpus
from engine.data.inputs import rank_inputs
from engine.data.ledger import Ledger
from engine.data.overview import Corpora
from engine.data.pack import pack
from engine.data.sources import jsonl
from engine.data.steps import Cursor
from engine.data.tokenizers.load import open_tokenizer
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan.schedule import shard_spans

pytestmark = pytest.mark.long

STEPS, SEED, NAMES = 60, 1, ("web", "code")
encode = open_tokenizer("bytes").document


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Several windows of a few small blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_BLOCK_BYTES", 4096)
        patch.setattr(order, "WINDOW_BYTES", 20_000)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of texts, of which some are empty."""
    root, drawn = tmp_path_factory.mktemp("texts"), random.Random(SEED)
    for name, count, most in (("web", 400, 300), ("code", 90, 1500)):
        lines = [json.dumps({"text": f"{number} " * drawn.randrange(0, most // 4)}) for number in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def config_of(folder: Path, cache: Path, *changes: str, ranks: int = 1) -> Config:
    sources = [f"data.sources.{name}.path={folder / name}.jsonl" for name in ("web", "code")]
    mix = "data.mix=[{weights: {web: 3, code: 1}}, {step: 20, weights: {web: 1, code: 2}}]"
    sizes = ["batch_tokens=2K", "context=700", "capacity=700", f"cluster.ranks_per_node={ranks}"]
    words = [*sources, mix, *sizes, f"data.cache={cache}", "data.validation_share=0.1", *changes]
    return load(["recipe=quickstart", "data=jsonl", *words])


Disturb = Callable[[int, Corpora, Cursor], None]


def ledger_of(config: Config, out: Path, disturb: Disturb = lambda *given: None) -> bytes:
    """Run the data plane alone for 60 steps; return the ledger's documents."""
    settings, corpora, cursor, ledger = Job(config).settings, Corpora(config), Cursor(), Ledger(out, NAMES)
    for step in range(1, STEPS + 1):
        disturb(step, corpora, cursor)
        found = corpora.steps.next(cursor)
        assert found is not None
        table, cursor = found
        ledger.record(step, table, plan_step(table.length, settings))
    (written,) = out.glob("documents-*.bin")
    return written.read_bytes()


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One rank, without loaders."""
    tmp_path = tmp_path_factory.mktemp("expected")
    found = ledger_of(config_of(folder, tmp_path / "cache"), tmp_path / "ledger")
    assert len(found) > 38 * STEPS
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_over_worlds_and_capacities(folder: Path, expected: bytes, tmp_path: Path, ranks: int) -> None:
    config = config_of(folder, tmp_path / "cache", f"capacity={400 + 50 * ranks}", ranks=ranks)
    assert ledger_of(config, tmp_path / "ledger") == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_read_what_the_ledger_says(folder: Path, tmp_path: Path, ranks: int) -> None:
    """Ranks open the sources each by itself, pack what they need, and read their inputs after random delays."""
    config = config_of(folder, tmp_path / "cache", f"capacity={700 // min(ranks, 3) + 1}", ranks=ranks)
    settings, corpora, cursor, steps = Job(config).settings, Corpora(config), Cursor(), list[tuple[Any, Any]]()
    for _ in range(12):
        found = corpora.steps.next(cursor)
        assert found is not None
        table, cursor = found
        steps.append((table, plan_step(table.length, settings)))
    shutil.rmtree(tmp_path / "cache")

    def read(rank: int) -> list[tuple[int, int, int, int, int]]:
        """Return (step, sequence, position, token, label) of all that a rank reads."""
        reader, drawn, rows = Reader(Corpora(config).sources, config.model.vocab), random.Random(rank), []
        for step, (table, plan) in enumerate(steps):
            for micro in plan.of_rank(rank):
                time.sleep(drawn.choice([0, 0, 0.005]))
                inputs, begin = rank_inputs(reader, table, micro), 0
                for shard in micro.shards:
                    size = sum(span.tokens for span in shard_spans(shard.length, shard.degree, shard.part))
                    columns = (inputs.positions, inputs.tokens, inputs.labels)
                    parts = zip(*(column[begin : begin + size].tolist() for column in columns), strict=True)
                    rows += [(step, shard.sequence, *part) for part in parts]
                    begin += size
        return rows

    with ThreadPoolExecutor(ranks) as pool:
        rows = [row for found in pool.map(read, range(ranks)) for row in found]
    texts = [
        json.loads(line)["text"].encode()
        for name in NAMES
        for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    of_hash = {int.from_bytes(blake2b(text, digest_size=8).digest(), "little"): text for text in texts}
    expected = []
    for step, (table, _) in enumerate(steps):
        columns = (table.start.tolist(), table.length.tolist(), table.hash.tolist())
        for sequence, (start, length, content) in enumerate(zip(*columns, strict=True)):
            ids = encode(of_hash[content]).tolist()[start:]
            expected += [(step, sequence, at, ids[at], ids[at + 1]) for at in range(length)]
    assert sorted(rows) == expected


@pytest.mark.parametrize("count", [1, 2, 5])
def test_with_loaders_whose_work_is_removed_at_random(
    folder: Path, expected: bytes, tmp_path: Path, count: int
) -> None:
    """They pack what they are asked for in any order, and some of it disappears before it is used."""
    config, drawn = config_of(folder, tmp_path / "cache"), random.Random(count)
    loaders = Loaders(count, spool=1 << 40)

    def disturb(step: int, corpora: Corpora, cursor: Cursor) -> None:
        sources = {corpus.name: corpus.texts for corpus in corpora.sources if isinstance(corpus, TextCorpus)}
        asked = [(sources[name], block) for name, block in corpora.steps.upcoming(cursor, 1 << 16)]
        drawn.shuffle(asked)
        loaders.ask(Work(texts.tokens, texts.folder, texts.blocks[block]) for texts, block in asked)
        if step % 7 == 0:
            for part in (tmp_path / "cache").glob("??"):
                if drawn.random() < 0.5:
                    shutil.rmtree(part, ignore_errors=True)

    try:
        assert ledger_of(config, tmp_path / "ledger", disturb) == expected
    finally:
        loaders.close()


def test_from_token_files(folder: Path, expected: bytes, tmp_path: Path) -> None:
    for name in ("web", "code"):
        one = load(["data=jsonl", f"data.path={folder / name}.jsonl"])
        pack(one.data, tmp_path / name, workers=1)
    packed = [f"data.sources.{name}={{path: {tmp_path / name}, format: tokens}}" for name in ("web", "code")]
    assert ledger_of(config_of(folder, tmp_path / "cache", *packed), tmp_path / "ledger") == expected


def test_of_each_source_without_gap_or_repeat_over_segments(folder: Path, tmp_path: Path) -> None:
    """A source's documents come in its own order, also if its weight changes in step 20."""
    config = config_of(folder, tmp_path / "cache")
    corpora, cursor, taken = Corpora(config), Cursor(), dict[int, list[tuple[int, int]]]()
    for _ in range(STEPS):
        found = corpora.steps.next(cursor)
        assert found is not None
        table, cursor = found
        for source, block, document, start in zip(
            *(column.tolist() for column in (table.source, table.block, table.document, table.start)), strict=True
        ):
            if start == 0:
                taken.setdefault(source, []).append((block, document))
    for number, corpus in enumerate(corpora.sources):
        alone = config_of(
            folder, tmp_path / "cache", "data.mix={web: 1, code: 0}" if number == 0 else "data.mix={web: 0, code: 1}"
        )
        own, cursor, order_of = Corpora(alone), Cursor(), list[tuple[int, int]]()
        while len(order_of) < len(taken[number]):
            found = own.steps.next(cursor)
            assert found is not None
            table, cursor = found
            rows = zip(table.block.tolist(), table.document.tolist(), table.start.tolist(), strict=True)
            order_of += [(block, document) for block, document, start in rows if start == 0]
        assert order_of[: len(taken[number])] == taken[number], corpus.name
