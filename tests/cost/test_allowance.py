from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.job import Job


@given(
    st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**32), st.integers(0, 30), st.sampled_from([0, 0.03])
)
def test_what_is_usable_is_just_what_fits(
    memory: int, tensors: int, context: int, percent: int, headroom: float
) -> None:
    allowance = Allowance(context, percent, headroom)
    left = memory - allowance.free(memory)
    assert left <= (1 - headroom) * memory
    fits = tensors + allowance.fragmentation(tensors) + context <= left
    assert fits == (tensors <= allowance.usable(memory)) or (context > left and allowance.usable(memory) == 0)


def allowance(config: Config, devices: int | None = None) -> Allowance:
    return Allowance.of(config, Job(config).cluster, devices)


def test_it_follows_the_kind_of_device_and_how_many_there_are() -> None:
    one, eight = load(["cluster=h200x8", "cluster.ranks_per_node=1", "context=1K"]), load(["cluster=h200x8"])
    assert allowance(load([])) == Allowance(520 << 20, 8, 0.03)
    assert allowance(one) == Allowance(1 << 30, 5, 0.03)
    nccl = 2 * (688 << 20) + 4 * 8 * (12 << 20)  # two communicators, and four peers with 8 channels each
    assert allowance(eight) == allowance(one, devices=8) == Allowance((1 << 30) + nccl, 5, 0.03)


def test_nccl_memory_grows_with_neighbours_and_communicators() -> None:
    """Rings have at most four neighbours, a stage two; each kind of group whose ranks are no other's is counted."""

    def context(devices: int, *overrides: str) -> int:
        return allowance(load(["cluster=h200x8", *overrides]), devices).context

    def mesh(*sizes: int) -> list[str]:
        return [f"parallel.{name}={size}" for name, size in zip(("tp", "pp"), sizes, strict=False)]

    peer, communicator = 96 << 20, 688 << 20
    assert context(2) == (1 << 30) + 2 * communicator + peer  # all ranks, and rings
    assert context(3) - context(2) == peer and context(5) - context(4) == peer
    assert context(5) == context(8) == context(1024)
    assert context(16, *mesh(2)) - context(16) == 2 * communicator  # hdp, tp
    assert context(2, *mesh(2)) == (1 << 30) + 2 * communicator  # all ranks, and tp
    assert context(4, *mesh(2, 2)) == (1 << 30) + 3 * communicator + peer  # all ranks, tp, pp and one other stage
    assert context(8, *mesh(2, 2)) - context(4, *mesh(2, 2)) == 3 * communicator + peer  # rings, hdp, model
    tied = ["model.tied=true", *mesh(1, 4), "model.layers=8"]
    assert context(8, *tied) - context(8, *tied[1:], "model.tied=false") == communicator
    experts = ["model.family=mixtral", "model.experts=4", "cluster.ranks_per_node=4"]
    assert context(4, *experts, "parallel.ep=2") - context(4, *experts) == 2 * communicator  # ep, experts
    assert context(4, *experts, "parallel.ep=4") - context(4, *experts) == communicator  # each has its own experts
