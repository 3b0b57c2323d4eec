"""What a GPU will be asked for is a config that loads, and a tiny one of it runs here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu import on_gpu, one_rank, train
from engine.attention.kernels.call import Kernel
from engine.config.load import load
from engine.config.schema import Config
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world

pytestmark = pytest.mark.long


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
    with pytest.raises(SystemExit, match="1"):
        train.main()
    assert found == [
        {"section": section, "model": model, "tokens": tokens, "recompute": recompute, "error": "no room"}
        for section, (_, cases, _) in train.SECTIONS.items()
        for model, tokens, recompute, _ in cases
    ]


def test_the_same_case_with_another_kernel_is_a_row_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"tokens_per_s": 2.0, "mfu": 0.5, "peak_gib": 1.0}
    others = [figures | {"kernel": "torch_varlen"}, {"kernel": "third", "error": "no room"}]
    written: list[Any] = []
    monkeypatch.setattr("sys.argv", ["train", "--only", "cases", "--dry-run"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(on_gpu, "alone", lambda case, *_: case | figures | {"kernel": "cudnn", "others": list(others)})
    monkeypatch.setattr(on_gpu, "write", lambda path, device, rows: written.extend(rows))
    with pytest.raises(SystemExit, match="1"):
        train.main()
    assert [(row["section"], row["tokens"], row["kernel"]) for row in written] == [
        ("cases", 64, name) for name in ("cudnn", "torch_varlen", "third")
    ]
    assert not any("others" in row for row in written)
    assert [line.split(" | ")[3] for line in capsys.readouterr().out.splitlines()] == ["cudnn", "torch_varlen"]


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


def with_cudnn() -> tuple[dict[str, Any], list[str], list[float | None]]:
    """Measure with stand-ins: the selected kernel is called cudnn, and the varlen kernel works here."""
    asked: list[float | None] = []
    used: list[str] = []

    def named(kernel: Kernel, name: str) -> Kernel:
        def forward(*arguments: Any) -> Any:
            used.append(name)
            return kernel.forward(*arguments)

        return replace(kernel, name=name, forward=forward)

    def kernel_of(config: Config, device: torch.device, ranks: int, plan_build_s: float | None = None) -> Kernel:
        asked.append(plan_build_s)
        return named(selected(config, device, ranks), "cudnn")

    selected, plain = one_rank.kernel_of, train.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_rank, "kernel_of", kernel_of)
        patch.setattr(train, "choose", lambda *arguments, prefer: named(plain(*arguments), prefer))
        return tiny(), used, asked


@pytest.mark.world
def test_cudnn_serves_all_calls_and_varlen_those_of_the_second_row() -> None:
    """In training a shape would change from one to the other in the middle of the measurement."""
    ((found, used, asked),) = run_world(1, with_cudnn)
    (other,) = found["others"]
    assert (found["kernel"], other["kernel"]) == ("cudnn", "torch_varlen") and found.keys() - other.keys() == {"others"}
    assert asked == [0.0], "no time of a plan: cuDNN from the first call on"
    assert used == sorted(used) and set(used) == {"cudnn", "torch_varlen"}, "one after the other"
