"""Micro-batches of real plans, for one rank."""

from __future__ import annotations

import numpy as np
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


def test_lengths_are_those_of_github_and_differ_between_steps() -> None:
    steps = planned(config_of(1, 512, 512, 2048), 3)
    lengths = [sorted(shard.length for micro in step for shard in micro.shards) for step in steps]
    assert len({tuple(of_step) for of_step in lengths}) == 3
    assert all(np.max(of_step) <= 512 for of_step in lengths)


def test_most_pairs_are_in_rings_and_most_steps_have_new_shapes() -> None:
    """The sizes of the GPU benchmarks: 8 ranks of 8K tokens, a context of 64K. Only full pieces come again."""
    steps = planned(config_of(8, 8192, 65536, 524288), 6)
    rings = [[shard for micro in step for shard in micro.shards if shard.degree > 1] for step in steps]
    assert min(len(of_step) for of_step in rings) > 0
    shapes = [{(shard.length, shard.degree) for shard in of_step} for of_step in rings]
    assert sum(bool(shapes[number] - set.union(*shapes[:number])) for number in range(1, 6)) >= 3
    whole = sum(shard.length**2 for step in steps for micro in step for shard in micro.shards if shard.degree == 1)
    assert whole < 0.2 * sum(shard.length**2 / shard.degree for of_step in rings for shard in of_step)
