"""What a GPU will be asked for is a config that loads, and a tiny one of it runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import on_gpu, train
from engine.config.load import load
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world


@pytest.mark.parametrize("case", [*train.CASES, *train.PLANS, *train.TRACES], ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_case_is_a_config(case: tuple[str, int, str, tuple[str, ...]]) -> None:
    config = train.config_of(*case)
    assert (config.context, config.recompute, config.model.vocab) == (case[1], case[2], train.VOCAB)


def test_rows_say_which_case_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, object]] = []
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(on_gpu, "alone", lambda case, work, *rest: case | {"error": "no room"})
    monkeypatch.setattr(on_gpu, "write", lambda path, device, rows: found.extend(rows[-1:]))
    with pytest.raises(SystemExit, match="True"):
        train.main()
    assert found == [
        {"section": section, "model": model, "tokens": tokens, "recompute": recompute, "error": "no room"}
        for section, (_, cases, _) in train.SECTIONS.items()
        for model, tokens, recompute, _ in cases
    ]


def tiny() -> dict[str, str | float]:
    return train.measure(load(["recipe=quickstart", "context=64", "capacity=64", "batch_tokens=64"]), alone())


def planned() -> dict[str, Any]:
    found = train.planned(train.config_of("tiny", 64, "none", ()), alone())
    return found | {"line": train.SECTIONS["plan"][2].format(model="tiny", tokens=64, recompute="none", **found)}


@pytest.mark.world
def test_steps_of_plans_run_twice() -> None:
    (found,) = run_world(1, planned)
    assert len(found["new_s"]) == len(found["seen_s"]) == len(found["sequences"]) == train.STEPS
    assert len(set(found["sequences"])) > 1, "steps differ"
    assert found["tokens_per_s"] > 0 < found["tokens_per_s_new"]
    assert found["line"].startswith("| tiny | 64 | none |")


def test_a_trace_is_summarised() -> None:
    def kernel(name: str, start: float, microseconds: float, stream: int = 7) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": microseconds, "args": {"stream": stream}}

    events = [kernel("gemm", 0, 400), kernel("add", 500, 100), kernel("gemm", 550, 200, stream=8), {"cat": "cpu_op"}]
    found = train.summary(events, seconds=1e-3)
    assert (found["launches"], found["seconds"]) == (3, 1e-3)
    assert found["busy"] == pytest.approx(0.65), "0 to 400 and 500 to 750 us"
    assert found["top"] == [
        {"kernel": "gemm", "ms": pytest.approx(0.6), "count": 2},
        {"kernel": "add", "ms": pytest.approx(0.1), "count": 1},
    ]


@pytest.mark.world
def test_a_tiny_model_is_measured() -> None:
    (found,) = run_world(1, tiny)
    assert found["tokens_per_s"] > 0 and 0 < found["mfu"] < 1 and found["kernel"] == "fused_cpu"
