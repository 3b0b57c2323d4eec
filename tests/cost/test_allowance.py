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
    assert Allowance.of(load([])) == Allowance(480 << 20, 0)
    assert Allowance.of(one) == Allowance(1 << 30, 5)
    assert Allowance.of(eight) == Allowance.of(one, devices=8) == Allowance(2 << 30, 5)


def test_on_a_cpu_what_zero_3_reduces_or_gathers_at_once_is_there_twice() -> None:
    """A bucket of fp32; of a model whose layers are larger than that, a layer."""
    for stage in (1, 2):
        assert Allowance.of(load([f"zero.stage={stage}"])) == Allowance.of(load([]))
    small, large = load(["zero.stage=3", "dtype=bf16"]), load(["zero.stage=3", "model=llama7b", "dtype=bf16"])
    all_of_tiny = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96) + 5 * 32 + 2 * 258 * 32  # layers, norms, both ends
    layer_of_7b = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 11008  # q and the output, k and v, SwiGLU's three
    assert Allowance.of(small).context == (480 << 20) + 4 * all_of_tiny
    assert Allowance.of(large).context == (480 << 20) + 2 * layer_of_7b
    assert Allowance.of(load(["zero.stage=3", "cluster=h200x8"])).context == 2 << 30
