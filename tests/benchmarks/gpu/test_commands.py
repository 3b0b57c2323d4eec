"""Results of our own commands, from what the commands leave."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import commands
from engine.config.load import load

pytestmark = pytest.mark.long


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked.append(arguments)
        return subprocess.CompletedProcess(arguments, 0, text)

    monkeypatch.setattr(commands, "run", run)
    return asked


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
