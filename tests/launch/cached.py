"""A small run with texts, and with chats that have masks, on hosts with a `data.cache` each."""

from __future__ import annotations

import json
from pathlib import Path

STEPS = 14


def documents(root: Path) -> Path:
    """Two sources: texts in several blocks, and rows of token ids with masks, as chats have them."""
    (root / "texts").mkdir()
    for number in range(150):
        (root / "texts" / f"{number:03}.py").write_text(f"print({number})\n" * (1 + number % 40))
    rows = list[str]()
    for number in range(120):
        ids = [(number * at) % 250 for at in range(20 + number % 70)]
        rows.append(json.dumps({"ids": ids, "loss_mask": [int(at // 7 % 2) for at in range(len(ids))]}))
    (root / "chats.jsonl").write_text("\n".join(rows))
    return root


def settings(root: Path, out: str, cache: str, *more: str) -> list[str]:
    """The overrides of a run in the folder `out`, with a cache in the folder `cache`, both in `root`."""
    sources = [
        *(f"data.sources.texts.path={root / 'texts'}", "data.sources.texts.format=folder"),
        *(f"data.sources.chats.path={root / 'chats.jsonl'}", "data.sources.chats.format=jsonl"),
        *("data.sources.chats.field=ids", "data.mix={texts: 1, chats: 1}", f"data.cache={root / cache}"),
    ]
    sizes = ["model.layers=2", "context=128", "capacity=128", "batch_tokens=512", f"run.steps={STEPS}"]
    run = ["run.restarts=0", "run.validate_every=4", "run.checkpoint_every=100", f"run.out={root / out}"]
    return ["recipe=quickstart", *sizes, *run, *sources, *more]


def packed(cache: Path) -> set[str]:
    """The names of the blocks in a cache."""
    return {path.stem for path in cache.rglob("*.idx")}


def ledger(out: Path) -> dict[str, bytes]:
    """The files of the ledger of a run by name."""
    return {path.name: path.read_bytes() for path in (out / "ledger").iterdir()}


def validated(out: Path) -> list[float]:
    """The validation losses of a run."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["validation_loss"] for line in lines if "validation_loss" in line]
