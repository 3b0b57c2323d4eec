"""What a GPU will be asked for fits it, ends in time, and runs here, tiny: only what CUDA counts is not there."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import memory, on_gpu, one_rank
from benchmarks.gpu.memory import PEAKS, RACES, SECTIONS, TRACES, Race, Step
from engine.attention.kernels.call import Kernel
from engine.fit.estimate import estimate
from engine.job import Job
from engine.planner.ratios import Load
from engine.units import PPM
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world

pytestmark = pytest.mark.long

TINY = ("model.layers=6",)


def test_every_case_fits() -> None:
    """With what it offloads, and without, which a race runs too."""
    for step in (*PEAKS, *(race.step for race in RACES), *TRACES):
        for ratio in {step.ratio, 0.0} if step not in PEAKS else {step.ratio}:
            assert estimate(Job(step.config), Load(step.tokens, step.tokens, round(PPM * ratio))).fits, step


def of(section: str, case: Any) -> dict[str, Any]:
    return SECTIONS[section][0](case, alone())


@pytest.mark.slow  # a rehearsal of the section "peak", which nothing else runs
@pytest.mark.world
def test_a_tiny_step_is_measured() -> None:
    """In a process of its own that joins and leaves a world of its own."""
    step = Step("tiny", 64, "none", 0.5, TINY)
    found = on_gpu.alone({"section": "peak", "case": str(step)}, memory.measured, "peak", step)
    assert found["peak"] == max(found["peaks"].values()) > 0 < found["estimate"]
    assert list(found["peaks"]) == ["forward pass", "backward pass", "update"]
    assert not found["holds"], "a process is larger than its tensors"
    assert memory.line(found).startswith("peak: tiny model.layers=6 tokens=64 recompute=none offload=0.5: ")
    assert memory.line(found).endswith("target: within 5 %: MISSED")


def race() -> tuple[dict[str, Any], list[float | None]]:
    """Run a tiny race; returns its row, and the times of a plan with which kernels were selected."""
    asked: list[float | None] = []

    def kernel_of(*arguments: Any, plan_build_s: float | None = None, **more: Any) -> Kernel:
        asked.append(plan_build_s)
        return selected(*arguments, **more)

    selected = one_rank.kernel_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_rank, "kernel_of", kernel_of)
        return of("time", Race(Step("tiny", 96, "layer_keep_attention", 1.0, TINY), rounds=3, most=1e3)), asked


@pytest.mark.slow  # a rehearsal of the section "time", which nothing else runs
@pytest.mark.world
def test_a_tiny_race_is_run_in_turns() -> None:
    ((found, asked),) = run_world(1, race)
    assert asked == [0.0], "cuDNN from the first call on: the kernel must not change in the middle of the race"
    assert [len(taken) for taken in found["seconds"].values()] == [3, 3]
    assert found["moved"] == pytest.approx(4 / 6, rel=0.02)
    assert found["holds"] and "50 % freed" in found["target"]


@pytest.mark.world
def test_a_tiny_trace_is_read() -> None:
    (found,) = run_world(1, of, "trace", Step("tiny", 96, "none", 1.0, TINY))
    assert (found["share"], found["copies_s"], found["holds"]) == (0.0, 0.0, False), "a CPU's copies have no stream"
