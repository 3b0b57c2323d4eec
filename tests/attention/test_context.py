from __future__ import annotations

import pytest
import torch

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.attention.layout import layout
from engine.planner.plan.step_plan import MicroBatch, Shard
from tests.copies import Copy, recorded_copies

CPU = torch.device("cpu")


def test_ids_and_lengths_of_shards_are_copied_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The balance of experts needs them in every layer: a pageable copy would make the host wait for the GPU."""
    shards = tuple(Shard(number, length, ring, 0) for number, (length, ring) in enumerate([(3, (0,)), (8, (0, 1))]))
    context = AttentionContext(layout(MicroBatch(0, 0, 0, -1, shards)), None, choose(CPU, torch.float32, 8))
    copies = recorded_copies(monkeypatch)
    context.shards(torch.device("cuda"))
    assert copies == [Copy(values, pinned=True, non_blocking=True) for values in ([0, 0, 0, 1, 1, 1, 1], [3, 8])]
