"""The group of one rank gives what a communicator of one rank would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.alone import alone


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield alone()
    dist.destroy_process_group()


def collectives(group: dist.ProcessGroup | None) -> list[Tensor]:
    """What DeepSpeed and ZeRO's hooks may call, each on values of its own."""
    x = torch.arange(6.0)
    dist.broadcast(x, 0, group=group)
    dist.all_reduce(x, group=group)
    dist.reduce(x, 0, group=group)
    out = [x.clone() for _ in range(6)]
    for one in out[1:]:
        one.zero_()
    dist.all_gather([out[1]], x, group=group)
    dist.reduce_scatter(out[2], [x], group=group)
    dist.all_to_all_single(out[3], x, group=group)
    work = dist.all_gather_single(out[4], x, group=group, async_op=True)
    work.wait()
    dist.reduce_scatter_single(out[5], x, group=group)
    dist.barrier(group=group)
    return out


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_its_collectives_are_those_of_a_world_of_one_rank(group: dist.ProcessGroup) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(collectives(group), collectives(None), strict=True))
    assert dist.get_world_size(group) == 1 and dist.get_rank(group) == 0
    assert dist.get_process_group_ranks(group) == [0] and dist.get_global_rank(group, 0) == 0


def test_collectives_that_are_collected_are_done_together(group: dist.ProcessGroup) -> None:
    """As DeepSpeed gathers the weights of a layer."""
    x, outs = torch.arange(4.0), [torch.zeros(2), torch.zeros(2)]
    manager = dist.distributed_c10d._coalescing_manager(group, device=torch.device("cpu"), async_ops=True)
    with manager as collected:
        for out, part in zip(outs, x.split(2), strict=True):
            dist.all_gather_single(out, part, group=group, async_op=True)
    collected.wait()
    assert torch.equal(torch.cat(outs), x)


def test_it_is_not_split_from_a_default_group_that_is_bound_to_a_gpu(group: dist.ProcessGroup) -> None:
    bound = dist.new_group([0], backend="alone", use_local_synchronization=True, device_id=torch.device("cuda", 0))
    x = torch.ones(1)
    dist.all_reduce(x, group=bound)
    assert x.tolist() == [1.0]
