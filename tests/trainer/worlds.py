"""Runs whose ranks are worlds of processes that have imported everything, and so start in a second."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.config.load import read_resolved
from engine.launch import outcome, supervise
from engine.launch.agents.commands import NodeCommand
from engine.parallel.groups import create_groups
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder
from engine.trainer.loop import Trainer
from tests.world import control, run_world


def texts(folder: Path, longest: int) -> Path:
    """Write 20 texts of less than `longest` words, always the same: by their content some are for validation."""
    words = ["to", "train", "on", "long", "and", "short", "documents"]
    for number in range(20):
        drawn = random.Random(number)
        (folder / f"{number}.txt").write_text(" ".join(drawn.choices(words, k=drawn.randrange(1, longest))))
    return folder


def on_rank(root: Path, checkpoint: Path | None, last: int) -> None:
    """Train as one rank in a world that is already connected, up to step `last`, and save a checkpoint."""
    folder = RunFolder(root)
    config = read_resolved(folder.resolved)
    groups = create_groups(config, control(), torch.device("cpu"), local_rank=0)
    trainer = Trainer(folder, config, groups, config.run.weights if checkpoint is None else None)
    trainer.begin(checkpoint)
    trainer.run(lambda: trainer.step >= last)
    trainer.data.close()


def in_worlds(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Let the launcher run ranks as processes that have imported everything, up to step `last`.

    The launcher writes no report, because that takes as long as many small steps.
    """

    def run_ranks(commands: Sequence[NodeCommand], folder: RunFolder, tick: Callable[[], None], *rest: object) -> None:
        checkpoint = newest_first(folder.checkpoints)[:1]
        ranks = sum(len(command.ranks) for command in commands)
        run_world(ranks, on_rank, folder.root, *(checkpoint or [None]), last)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    monkeypatch.setattr(outcome, "write_page", lambda folder, say: None)
