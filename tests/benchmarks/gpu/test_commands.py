"""Results of our own commands, from what the commands leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.gpu import commands
from engine.config.load import load

pytestmark = pytest.mark.long

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one" time="0.5"/>
<testcase classname="tests.a" name="two" time="1.5"><failure message="NaN in dq&#10;assert">long</failure></testcase>
<testcase classname="tests.b" name="three" time="0"><skipped message="x"/></testcase>
<testcase classname="tests.b" name="four" time="0"><error message="no device"/></testcase>
</testsuite></testsuites>"""


def test_failed_tests_are_named() -> None:
    assert commands.outcomes(ElementTree.fromstring(REPORT)) == {
        "passed": 1,
        "skipped": 1,
        "failed": {"tests.a::two": "NaN in dq", "tests.b::four": "no device"},
        "slowest_s": 1.5,
        "holds": False,
    }
    assert not commands.outcomes(ElementTree.fromstring("<testsuites/>"))["holds"], "no test ran"


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked.append(arguments)
        return subprocess.CompletedProcess(arguments, 0, text)

    monkeypatch.setattr(commands, "run", run)
    return asked


def test_a_command_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, json.dumps({"ok": False, "error": {"key": "cluster=h200x8", "message": "no GPU"}}))
    with pytest.raises(RuntimeError, match="cluster=h200x8: no GPU"):
        commands.bytescale("train")


@pytest.mark.parametrize(("last", "holds"), [(20, True), (19, False)])
def test_training_is_resumed_from_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, holds: bool
) -> None:
    asked = answer(monkeypatch, json.dumps({"ok": True}))
    for name, steps in (("first", range(1, 16)), ("resumed", range(16, last + 1))):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "step_s": 1.0, "other": 3}) for step in steps]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    rows = commands.training(tmp_path, dry_run=False)
    found = next(rows)
    assert len(asked) == 1, "the first row is there before the second run starts"
    assert [line["step"] for line in found["steps"]] == list(range(1, 16)) and found["holds"]
    (resumed,) = rows
    assert [line["step"] for line in resumed["steps"]] == list(range(16, last + 1)) and resumed["holds"] == holds
    assert (found["run"], resumed["run"]) == ("first", "resumed")
    first, second = asked
    assert {"recipe=h200-1b-8k", "batch_tokens=64K"} < set(first)
    assert load(first[2:-2]).batch_tokens == 64 * 1024, "all of them are keys"
    assert set(first) - set(second) == {f"run.out={tmp_path / 'first'}", "run.steps=15"}
    assert second[-3:-1] == ("--resume", str(tmp_path / "first" / "checkpoints" / "step-00000015"))
    assert "run.steps=20" in second and f"run.out={tmp_path / 'resumed'}" in second


def test_rows_before_a_failure_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def section(folder: Path, dry_run: bool) -> Any:
        yield {"run": "first"}
        raise RuntimeError("no room")

    path = tmp_path / "a.json"
    monkeypatch.setitem(commands.SECTIONS, "training", section)
    monkeypatch.setattr("sys.argv", ["commands", "--only", "training", "--dry-run", "--json", str(path)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="1"):
        commands.main()
    assert json.loads(path.read_text())["rows"] == [
        {"section": "training", "run": "first"},
        {"section": "training", "error": "RuntimeError: no room"},
    ]


def test_a_command_that_is_stopped_leaves_no_folder(tmp_path: Path) -> None:
    """Checkpoints of 14 GB would stay."""
    program = Path(commands.__file__)
    code = f"""
import runpy, sys, time
from benchmarks.gpu import on_gpu
import subprocess
subprocess.run = lambda *a, **k: time.sleep(1000)
sys.argv = ["commands", "--only", "training", "--dry-run"]
runpy.run_path({str(program)!r}, run_name="__main__")
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(commands.ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("tmp*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        made = list(tmp_path.iterdir())
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
    assert made and not list(tmp_path.iterdir()), said


@pytest.mark.slow  # imports all files with tests for a GPU
def test_gpu_tests_need_only_an_old_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hypothesis, pytest's plugins and the settings of pyproject.toml, which pytest 8 refuses."""
    assert "tests/attention/kernels/test_on_gpu.py" in commands.files_with_gpu_tests()
    (tmp_path / "hypothesis.py").write_text("raise ImportError('not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    files = commands.files_with_gpu_tests()
    done = commands.run(*commands.PYTEST, "-m", "gpu", "--collect-only", "-qqq", *files)
    assert done.returncode == 0, done.stdout
    assert all(f"{file}: " in done.stdout for file in files), "each file has such a test"
    assert "pyproject" not in done.stdout


def test_a_profile_is_beside_the_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, json.dumps({"ok": True, "hardware": {"ffn_flops_per_s": 1.0}}))
    (found,) = commands.profile(tmp_path, dry_run=False)
    assert found["hardware"] == {"ffn_flops_per_s": 1.0}
    assert found["data_sheet"]["peak_flops_per_s"] == 989e12
    assert asked[0][:2] == ("bytescale_cli", "profile-hardware")
