"""Layers are cut into stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.cost import flops
from engine.cost.datasheets import nominal
from engine.cost.stages import stages, work_shares


def config(layers: int, pp: int, vocab: int, more: str = "auto") -> Config:
    wide = ["context=2K", f"cluster.ranks_per_node={pp}", "capacity=2K", f"model.vocab={vocab}"]
    return load([f"model.layers={layers}", f"parallel.pp={pp}", f"parallel.stages={more}", *wide])


@pytest.mark.parametrize("vocab", [258, 1_000, 4_000, 10_000])
@pytest.mark.parametrize(("layers", "pp"), [(1, 1), (4, 4), (5, 2), (7, 3), (9, 4), (12, 5)])
def test_no_other_cut_has_a_faster_slowest_stage(layers: int, pp: int, vocab: int) -> None:
    made = config(layers, pp, vocab)
    cut = stages(made)
    assert [layer for stage in cut for layer in stage] == list(range(layers)) and all(cut) and len(cut) == pp
    head = made.model.hidden * vocab / flops.largest_layer(made.model, experts=1)

    def slowest(sizes: list[int]) -> float:
        return max(*sizes[:-1], sizes[-1] + head) if pp > 1 else sizes[0] + head

    ends = [(0, *inner, layers) for inner in combinations(range(1, layers), pp - 1)]
    best = min(slowest([stop - start for start, stop in pairwise(one)]) for one in ends)
    sizes = [len(stage) for stage in cut]
    assert slowest(sizes) == pytest.approx(best)
    assert sizes[:-1] == sorted(sizes[:-1]), "earlier stages have more micro-batches in flight"
    shares = work_shares(made, nominal("local"))
    assert sum(shares) == pytest.approx(1)
    assert max(shares) == pytest.approx(best / (layers + head))


def test_a_config_may_say_the_stages() -> None:
    assert stages(config(7, 3, 258, "[1,4,2]")) == [range(1), range(1, 5), range(5, 7)]
