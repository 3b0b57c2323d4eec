"""Micro-batches of real plans, for one rank."""

from __future__ import annotations

import pytest

from benchmarks.gpu.plans import config_of, pairs_of, planned, tokens_of
from engine.attention.layout import layout
from engine.data.lengths import step_lengths

pytestmark = pytest.mark.long

SIZES = (64, 512, 2048)  # capacity, context and tokens of a step


def test_the_ranks_of_a_step_hold_all_its_tokens() -> None:
    config = config_of(8, *SIZES)
    (lengths,) = step_lengths(config, 1)
    ranks = [planned(config, 1, rank)[0] for rank in range(8)]
    assert sum(layout(micro).tokens for step in ranks for micro in step) == int(lengths.sum())
    pairs = sum(pairs_of(micro) for step in ranks for micro in step)
    assert pairs == pytest.approx(float((lengths * (lengths + 1) / 2).sum()))
    assert any(shard.degree > 1 for step in ranks for micro in step for shard in micro.shards)
    assert all(abs(tokens_of(micro) - layout(micro).tokens) <= len(micro.shards) for step in ranks for micro in step)
