"""The cost of attention's first call with a shape, of a stand-in that moves the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.kernels import cudnn, reference
from engine.attention.kernels.call import Call, Functions
from engine.attention.kernels.choice import choose
from engine.config.load import load
from engine.hardware import shape_build
from engine.hardware.shape_build import builder, shape_build_s
from tests.hardware.ranks import groups_of_world
from tests.world import run_world

CPU = torch.device("cpu")
BUILD_S = {"forward": 0.05, "backward": 0.02}


class Building:
    """A kernel that builds a plan for each new shape, forward and backward, and the clock that shows it."""

    def __init__(self, rank: int) -> None:
        self.seen: set[tuple[str, int]] = set()
        self.slower, self.clock = 1 + rank, 0.0  # rank 1 takes twice as long

    def now(self) -> float:
        return self.clock

    def build(self, way: str, q: Tensor) -> None:
        self.clock += self.slower * (0.01 + (BUILD_S[way] if (way, len(q)) not in self.seen else 0.0))
        self.seen.add((way, len(q)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        self.build("forward", q)
        return q, q[..., 0]

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
        self.build("backward", q)
        return q, k, v


def _extra() -> tuple[tuple[float, float], tuple[float, float], int]:
    groups, shape, kernel = groups_of_world(), load([]).model, Building(dist.get_rank())
    shape_build.Stopwatch = lambda device: kernel  # type: ignore[assignment, misc]
    plain = shape_build_s(reference.load(), shape, torch.float32, groups)
    built = shape_build_s(Functions(kernel.forward, kernel.backward), shape, torch.float32, groups)
    return built, plain, len(kernel.seen)


@pytest.mark.world
def test_the_first_call_of_a_shape_is_compared_with_the_next() -> None:
    first, second = run_world(2, _extra)
    (forward, backward), (plain_forward, plain_backward), seen = first
    assert first[:2] == second[:2], "the slowest rank's"
    assert (forward, backward) == pytest.approx((2 * BUILD_S["forward"], 2 * BUILD_S["backward"]))
    assert plain_forward == plain_backward == 0, "the reference is not asked"
    assert seen == 4, "two lengths, forward and backward"


def test_cudnn_is_asked_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself may send a new shape to another kernel, so as not to build a plan."""
    kernel, always = choose(CPU, torch.float32, 64), reference.load()
    monkeypatch.setattr(cudnn, "load", {0.0: always}.get)
    assert builder(kernel) == (kernel.forward, kernel.backward) != always
    assert builder(replace(kernel, name="cudnn")) == always
