from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.cluster import numa
from engine.offload.pinned import allocate
from tests.cluster.sysfs import fake


def test_on_a_cpu_it_is_plain_memory() -> None:
    block = allocate(1000, torch.device("cpu"))
    assert block.dtype == torch.uint8 and len(block) == 1000


@pytest.mark.parametrize("known", [True, False])
def test_it_is_pinned_by_a_processor_of_the_node_of_the_gpu(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older PyTorch does not name the place of the GPU. The thread returns to where it may run."""
    allowed, near = os.sched_getaffinity(0), {max(os.sched_getaffinity(0))}
    monkeypatch.setattr(numa, "SYS", fake(tmp_path, ["", str(*near)], {"0000:1b:00.0": "1"}))
    place = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0} if known else {}
    pinned_by = list[set[int]]()
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: pinned_by.append(os.sched_getaffinity(0)) or 0, cudaHostUnregister=lambda _: 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**place))
    allocate(1000, torch.device("cuda"))
    assert pinned_by == [near if known else allowed] and os.sched_getaffinity(0) == allowed


@pytest.mark.gpu
def test_on_a_gpu_it_is_pinned_while_it_or_a_part_of_it_lives() -> None:
    device = torch.device("cuda")
    for size in (1, 1000, 1 << 26, 1 << 26):  # the same place may be given again, and be pinned again
        block = allocate(size, device)
        assert block.is_pinned()
        assert torch.equal(block.fill_(3).to(device, non_blocking=True).cpu(), block)
        part = block[:1]
        del block
        assert part.is_pinned()
        del part


def test_it_is_let_go_of_when_its_last_part_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, with a runtime that only counts: a copy to a part may be under way when the whole is gone."""
    pinned: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append(address) or 0,
        cudaHostUnregister=lambda address: pinned.remove(address) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)
    block = allocate(1000, torch.device("cuda"))
    assert pinned == [block.data_ptr()]
    part = block[:10]
    del block
    assert pinned == [part.data_ptr()]
    del part
    assert pinned == []


@pytest.mark.gpu
def test_on_a_gpu_what_cannot_be_pinned_harms_nothing_that_is_computed_next(monkeypatch: pytest.MonkeyPatch) -> None:
    device, block = torch.device("cuda"), allocate(1 << 20, torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: block)
    with pytest.raises(RuntimeError):
        allocate(1 << 20, device)  # a second time: it is pinned already
    assert float(torch.ones(1000, device=device).sum()) == 1000
