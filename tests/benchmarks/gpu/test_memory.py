"""What a GPU will be asked for fits it, ends in time, and runs here, tiny: only what CUDA counts is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.gpu import longest, memory, on_gpu, one_rank
from benchmarks.gpu.memory import PEAKS, RACES, SECTIONS, TRACES, Race, Step
from engine.attention.kernels.call import Kernel
from engine.fit.estimate import estimate
from engine.job import Job
from engine.planner.ratios import Load
from engine.units import PPM
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world

pytestmark = pytest.mark.long

STEPS = [*PEAKS, *(race.step for race in RACES), *TRACES]
TINY = ("model.layers=6",)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_every_case_fits(step: Step) -> None:
    """With what it offloads, and without, which a race runs too."""
    config = step.config
    for ratio in {step.ratio, 0.0} if step not in PEAKS else {step.ratio}:
        assert estimate(Job(config), Load(step.tokens, step.tokens, round(PPM * ratio))).fits


def test_the_estimate_is_that_of_the_first_micro_batch_of_a_step() -> None:
    """Gradients of earlier ones, which a later one finds, are not there: a case on the host shows the difference."""
    (step,) = (step for step in PEAKS if step.config.optimizer.on_host)
    load = Load(step.tokens, step.tokens, 0)
    first, later = (estimate(Job(step.config), replace(load, first=first)) for first in (True, False))
    rank = one_rank.OneRank(step.config, Mock(), Mock(), Mock())
    assert rank.estimated(step.tokens, 0.0) == first.peak - first.items["other"] < later.peak - later.items["other"]


def test_the_cases_are_those_that_were_promised() -> None:
    configs = [step.config for step in PEAKS]
    assert len(PEAKS) >= 8 and len(set(PEAKS)) == len(PEAKS)
    assert {config.recompute for config in configs} == {"none", "layer", "layer_keep_attention"}
    assert {step.ratio for step in PEAKS} == {0.0, 0.5, 1.0} and {config.zero.stage for config in configs} == {1, 3}
    assert any(config.mlp_tile for config in configs) and any(config.optimizer.on_host for config in configs)
    assert any(config.model.experts > 1 for config in configs) and {config.model.name for config in configs} == {
        "1b",
        "llama3-8b",
        "mixtral8x7b",
    }
    assert [(race.step.tokens, race.step.ratio, race.most) for race in RACES] == [
        (64 * 1024, 0.5, 0.01),
        (256 * 1024, 1.0, 0.02),
    ]


def test_no_part_of_it_takes_more_than_five_minutes() -> None:
    """By the data sheet and a third more, and 18 s for each process to start and draw its weights."""

    def seconds(step: Step, times: int) -> float:
        return times * longest.step_seconds(Job(step.config).settings.costs, step.tokens)

    steps = {
        "peak": sum(seconds(step, 2) for step in PEAKS),
        "time": sum(seconds(race.step, 1 + 2 * race.rounds) for race in RACES),
        "trace": sum(seconds(step, 2) for step in TRACES),
        "longest": sum(longest.length_of(case).runs_s for case in longest.CASES),
    }
    took = {name: 1.33 * steps[name] + 18 * len(cases) for name, (_, cases) in SECTIONS.items()}
    assert max(took.values()) < 300 and sum(took.values()) < 660, took


def test_offload_frees_half_of_the_race_that_promises_it() -> None:
    step = RACES[-1].step
    layers = step.config.model.layers
    assert (layers - 2) / layers > 1.2 * memory.SAVED, "what is no layer's stays"


def test_a_dry_run_has_a_case_of_every_section() -> None:
    assert list(memory.TINY) == list(SECTIONS)


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


def test_lines_are_written_as_they_come(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases that fail too, in the file; they have told why by then."""
    figures = {"said": "x", "target": "y", "holds": True}
    answers: list[Any] = [figures, {"error": "no room"}, figures]
    written: list[list[bool]] = []

    def run(case: dict[str, Any], work: Callable[..., Any], *arguments: str) -> Any:
        assert (work, *arguments) == (memory.measured, *case.values())
        return case | answers.pop(0)

    monkeypatch.setattr("sys.argv", ["memory", "--only", "peak"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(on_gpu, "alone", run)
    monkeypatch.setattr(on_gpu, "write", lambda path, device, rows: written.append(["error" in row for row in rows]))
    monkeypatch.setitem(memory.SECTIONS, "peak", (memory.peak, ("a", "b", "c")))
    with pytest.raises(SystemExit, match="1"):
        memory.main()
    assert capsys.readouterr().out == "peak: a: x | target: y: met\npeak: c: x | target: y: met\n"
    assert written == [[False], [False, True], [False, True, False]]
