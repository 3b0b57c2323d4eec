"""Results of our own commands, from what the commands leave."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.gpu import commands

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
    for name, steps in (("run", range(1, 16)), ("longer", range(16, last + 1))):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "step_s": 1.0, "other": 3}) for step in steps]
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    found = commands.training(tmp_path, dry_run=False)
    assert [line["step"] for line in found["steps"]] == list(range(1, 16))
    assert [line["step"] for line in found["resumed"]] == list(range(16, last + 1))
    assert found["holds"] == holds
    first, second = asked
    assert "recipe=h200-1b-8k" in first and set(first) - set(second) == {f"run.out={tmp_path / 'run'}", "run.steps=15"}
    assert second[-2:-1] == (str(tmp_path / "run" / "checkpoints" / "step-00000015"),)
    assert "--resume" in second and "run.steps=20" in second and f"run.out={tmp_path / 'longer'}" in second


def test_a_profile_is_beside_the_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, json.dumps({"ok": True, "hardware": {"linear_flops_per_s": 1.0}}))
    found = commands.profile(tmp_path, dry_run=False)
    assert found["hardware"] == {"linear_flops_per_s": 1.0}
    assert found["data_sheet"]["peak_flops_per_s"] == 989e12
    assert asked[0][:2] == ("bytescale_cli", "profile-hardware")
