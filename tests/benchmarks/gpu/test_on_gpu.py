from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import attention, commands, machine, memory, on_gpu, probe, train
from benchmarks.gpu.on_gpu import Options, allocated, alone, leave, new_peak, parse_options
from tests.benchmarks.gpu.fates import fate

pytestmark = pytest.mark.long


@pytest.mark.parametrize("benchmark", [attention, commands, machine, memory, probe, train])
def test_without_a_gpu_a_benchmark_of_one_leaves_with_3(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [benchmark.__name__])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        benchmark.main()
    assert left.value.code == 3
    assert "no CUDA device" in capsys.readouterr().err


def test_a_section_can_be_selected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["benchmark", "--json", "a", "--only", "two"])
    assert parse_options("", ("one", "two")) == Options(Path("a"), "two")
    monkeypatch.setattr("sys.argv", ["benchmark", "--only", "two"])
    with pytest.raises(SystemExit):
        parse_options("")
    assert "--only" in capsys.readouterr().err


def test_a_dry_run_needs_no_gpu_and_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("sys.argv", ["benchmark", "--dry-run"])
    options = parse_options("")
    assert options.dry_run and on_gpu.device_of(options) == torch.device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert on_gpu.device_of(Options(None)) == torch.device("cuda", 0)


def test_figures_are_written_with_the_machine(tmp_path: Path) -> None:
    on_gpu.write(tmp_path / "a.json", torch.device("cpu"), rows=[{"ms": 1.5}])
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["device"], found["torch"], found["rows"]) == ("CPU", torch.__version__, [{"ms": 1.5}])
    assert found["command"].startswith("python ") and "commit" in found
    on_gpu.write(None, torch.device("cpu"), rows=[])


def test_each_case_has_its_process_and_its_fate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the settings under which the estimate holds; a case that fails or dies is told, and others go on."""
    monkeypatch.setattr(on_gpu, "ALLOCATORS", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    failed, died, found = (alone({"case": what}, fate, what) for what in ("fail", "die", "run"))
    assert failed == {"case": "fail", "error": "MemoryFitError: no room"}
    assert died["case"] == "die" and died["error"].startswith("BrokenProcess")
    assert found["process"] != os.getpid()
    assert (found["case"], found["settings"]) == ("run", "expandable_segments:True")
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "- fail: failed: MemoryFitError: no room" and told[1].startswith("- die: failed: BrokenProcess")


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"case": "a", "holds": True}, {"case": "b"}], 0),
        ([{"case": "a", "error": "no room"}, {"case": "b"}], 1),
        ([{"case": "a", "holds": True}, {"case": "b", "holds": False}], 4),
        ([{"case": "a", "holds": False}, {"case": "b", "error": "no room"}], 1),
    ],
)
def test_a_case_that_fails_or_misses_its_target_is_in_the_exit_code(rows: list[dict[str, Any]], code: int) -> None:
    with pytest.raises(SystemExit) as left:
        leave(rows)
    assert left.value.code == code


@pytest.mark.parametrize(("row", "code"), [({"holds": False}, 0), ({"error": "no room"}, 1)])
def test_targets_do_not_count_in_a_dry_run(row: dict[str, Any], code: int) -> None:
    with pytest.raises(SystemExit) as left:
        leave([row], dry_run=True)
    assert left.value.code == code


@pytest.mark.parametrize(
    ("seconds", "most", "count"), [(0.0, 20, 20), (0.1, 20, 10), (0.4, 20, 3), (9.0, 20, 3), (9.0, 2, 2)]
)
def test_long_runs_are_repeated_less(seconds: float, most: int, count: int) -> None:
    assert on_gpu.repeated(lambda: seconds, most, most_s=0.95) == [seconds] * count


def test_a_cpu_holds_no_tensors_of_a_gpu() -> None:
    assert allocated(torch.device("cpu")) == 0 and new_peak(torch.device("cpu")) >= 0
