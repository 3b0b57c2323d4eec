from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.cost.allowance import Allowance


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**32), st.integers(0, 30))
def test_what_is_usable_is_just_what_fits(memory: int, tensors: int, context: int, percent: int) -> None:
    allowance = Allowance(context, percent)
    fits = tensors + allowance.fragmentation(tensors) + context <= memory
    assert fits == (tensors <= allowance.usable(memory)) or (context > memory and allowance.usable(memory) == 0)


def test_it_follows_the_kind_of_device_and_how_many_there_are() -> None:
    one, eight = load(["cluster=h200x8", "cluster.ranks_per_node=1", "context=1K"]), load(["cluster=h200x8"])
    assert Allowance.of(load([])) == Allowance(480 << 20, 100)
    assert Allowance.of(one) == Allowance(1 << 30, 5)
    assert Allowance.of(eight) == Allowance.of(one, devices=8) == Allowance(2 << 30, 5)
