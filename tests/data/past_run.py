"""A run folder as a run leaves it, without training: config, blocks, metrics and ledger."""

from __future__ import annotations

from pathlib import Path

from engine.config.load import load
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.ledger import Ledger
from engine.data.overview import Corpora
from engine.data.steps import Cursor
from engine.job import Job
from engine.launch.prepare import write_facts
from engine.planner.make import plan_step
from engine.run import metrics
from engine.run.folder import RunFolder


def run_of(tmp_path: Path, *overrides: str, steps: int) -> tuple[RunFolder, Config]:
    """Record some steps of a config, whose cache folder is below `tmp_path`."""
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    config = load(["recipe=quickstart", f"data.cache={tmp_path / 'cache'}", *overrides])
    corpora, settings, cursor = Corpora(config), Job(config).settings, Cursor()
    write_facts(folder, config, corpora, 0)
    ledger = Ledger(folder.ledger, list(source_configs(config.data)))
    for step in range(1, steps + 1):
        found = corpora.steps.next(cursor)
        assert found is not None
        table, cursor = found
        ledger.record(step, table, plan_step(table.length, settings))
        metrics.append(folder.metrics, {"step": step})
    return folder, config
