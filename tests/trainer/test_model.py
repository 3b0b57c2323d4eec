from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.attention.context import AttentionContext
from engine.attention.kernels.call import merge
from engine.attention.kernels.choice import choose
from engine.attention.layout import layout
from engine.cluster.mesh import Mesh
from engine.config.load import load
from engine.cost.calibration import PLAN_BUILD_S
from engine.job import Job
from engine.models.recompute import MODES
from engine.offload.arena import Arena
from engine.offload.offload import Offload
from engine.trainer import model as trainer_model
from engine.trainer.model import build, kernel_of, make_model, make_offload, reserve_host
from engine.units import PPM
from tests.attention.rings import unsplit
from tests.planner.samples import by_hand

CPU, TOKENS, LAYERS = torch.device("cpu"), 201, 6
SIZE = [f"model.{key}" for key in (f"layers={LAYERS}", "hidden=32", "heads=4", "kv_heads=2", "ffn=96", "vocab=50")]


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_that_fills_the_host_goes_there_whole(mode: str) -> None:
    """Although tensors are aligned in the arena, which the planner's bytes do not count."""
    config = load(["recipe=quickstart", "compile=never", f"recompute={mode}", *SIZE])
    offload = make_offload(config, CPU, int(Job(config).costs.host_bytes(np.int64(TOKENS), PPM)))
    model = make_model(config, CPU, offload=offload)
    attention = AttentionContext(unsplit(TOKENS), None, choose(CPU, torch.float32, 8))
    numbers = torch.arange(TOKENS)
    offload.begin(1.0, TOKENS)
    model(numbers % 50, numbers, numbers % 50, attention)
    assert offload.moved_bytes == offload.saved_bytes * (LAYERS - 2) // LAYERS


def test_the_kernel_of_a_rank_has_the_costs_and_the_merge_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has no rings, so it compiles no merge; benchmarks replace the time of a plan, and name a kernel."""
    asked: list[Any] = []

    def recorded(answer: Any) -> Callable[..., Any]:
        def answering(*arguments: Any, **more: Any) -> Any:
            asked.append((*arguments, *more.values()))
            return answer

        return answering

    def other(*tensors: torch.Tensor) -> None: ...

    plain = choose(CPU, torch.bfloat16, 64)
    monkeypatch.setattr(trainer_model, "choose", recorded(plain))
    monkeypatch.setattr(trainer_model, "choose_merge", recorded(other))
    config = load(["recipe=h200-1b-8k", "compile=always"])
    assert kernel_of(config, CPU, ranks=1) == plain and plain.merge is merge
    assert kernel_of(config, CPU, ranks=2, plan_build_s=0.0).merge is other
    with_tp = load(["recipe=h200-1b-8k", "compile=always", "cluster.ranks_per_node=2", "parallel.tp=2"])
    assert kernel_of(with_tp, CPU, ranks=2, plan_build_s=0.0, prefer="cudnn").merge is other
    assert asked == [
        (CPU, torch.bfloat16, 64, None, PLAN_BUILD_S),
        (CPU, torch.bfloat16, 64, None, 0.0),
        (CPU, torch.bfloat16, 32, 64, "always"),
        (CPU, torch.bfloat16, 64, "cudnn", 0.0),
        (CPU, torch.bfloat16, 16, 64, "always"),  # the heads of a device
    ]


def test_weights_are_drawn_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands in for a GPU. A CPU core would take 7 s for 10^9 weights."""
    drawn_on: list[Any] = []

    def initialise(model: nn.Module, seed: int, device: torch.device, *rest: Any) -> None:
        drawn_on.extend([device, {parameter.device for parameter in model.parameters()}])

    monkeypatch.setattr(trainer_model, "initialise", initialise)
    meta = torch.device("meta")
    make_model(load(["recipe=quickstart", "compile=never", "zero.stage=1", *SIZE]), meta)
    assert drawn_on == [meta, {meta}]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_with_rings_merge_blocks_with_the_compiled_function(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*tensors: torch.Tensor) -> None: ...

    monkeypatch.setattr(trainer_model, "choose_merge", lambda *given: compiled)
    for heavy in ("make_model", "build_optimizer", "ZeroEngine", "RingComm"):
        monkeypatch.setattr(trainer_model, heavy, lambda *given: None)
    groups: Any = SimpleNamespace(device=CPU, rank=0, hdp_rank=0, mesh=Mesh(ranks), rings=None, axes=None)
    job: Any = SimpleNamespace(config=load(["recipe=quickstart", *SIZE]), settings=SimpleNamespace(offload=0))
    _, _, context = build(job, groups)
    assert context.kernel.merge is (compiled if ranks > 1 else merge)


def test_the_host_memory_of_a_step_does_not_grow_within_it() -> None:
    """Rank 0 offloads most in its second micro-batch, which has neither the most tokens nor the highest ratio; rank 1
    offloads more than rank 0."""
    plan = by_hand([120, 120, 70, 50, 90], [(0,), (0, 1), (0,), (0,), (1,)], [[[0], [1, 3], [2]], [[1], [4]]])
    plan.offload[:] = [500_000, 600_000, 700_000, 0, 800_000]
    for rank in range(2):
        offload, sizes = Offload(LAYERS, CPU, [Arena(CPU, 1 << 30)], token_bytes=1 << 20), list[int]()
        assert reserve_host(plan, rank, offload) is None
        reserved = offload.arenas[0].size
        for micro in plan.of_rank(rank):
            offload.begin(micro.offload, layout(micro).tokens)
            sizes.append(offload.arenas[0].size)
        assert reserved > 0 and set(sizes) == {reserved}
