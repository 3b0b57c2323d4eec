"""Ranks that hold different plans find out, and what they exchange in each step does not grow with the world."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.control_plane import CALLS, counting
from engine.errors import PlanError
from engine.trainer.control import Control
from tests.world import run_world

pytestmark = pytest.mark.world
# Halves at the ends of 64 bits, where a sign could overflow, and digests that differ in one half only.
SAME = ("80" + "00" * 7 + "7f" + "ff" * 7, "00" * 16, "ff" * 16)
OTHER = ("00" * 15 + "01", "01" + "00" * 15, "ff" * 16)


def exchange() -> tuple[Any, ...]:
    assert dist.group.WORLD is not None
    rank, control = dist.get_rank(), Control(dist.group.WORLD)
    for digest in SAME:
        control.check_same(digest)
    said = []
    for digest in OTHER:
        with pytest.raises(PlanError) as caught:
            control.check_same(digest if rank == 1 else "00" * 16)
        said.append(str(caught.value))
    return control.total(rank + 0.5), control.largest(rank, -rank, rank == 1), control.gather(f"{rank}"), said


def test_all_ranks_get_the_same_answers() -> None:
    total, largest, gathered, said = (found := run_world(3, exchange))[0]
    assert found == [found[0]] * 3
    assert (total, largest, gathered) == (4.5, [2.0, 0.0, 1.0], ["0", "1", "2"])
    assert all(
        f"rank 1's plan differs from rank 0's (digest {digest}" in one for digest, one in zip(OTHER, said, strict=True)
    )


def counted() -> dict[str, int]:
    assert dist.group.WORLD is not None
    control, counts = Control(dist.group.WORLD), {"messages": 0, "bytes": 0}
    for name in CALLS:
        setattr(dist.ProcessGroup, name, counting(name, dist.group.WORLD.group_name, counts))
    control.check_same(SAME[0])
    control.total(1.5)
    control.largest(1, 2, 3, 4)
    found = dict(counts)
    control.gather("x" * 100)
    assert counts["bytes"] > found["bytes"] + 100 * dist.get_world_size(), "the count sees what grows with the world"
    return found


def test_what_a_step_exchanges_does_not_grow_with_the_world() -> None:
    """`benchmarks/control_plane.py` counts whole steps."""
    assert run_world(2, counted) == [{"messages": 3, "bytes": 2 * 8 * (4 + 1 + 4)}] * 2
    assert run_world(3, counted) == [{"messages": 3, "bytes": 2 * 8 * (4 + 1 + 4)}] * 3
