"""The driver with stand-ins for its parts: what succeeds, fails, hangs or is killed, and what a second run does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import first_hour, on_gpu
from benchmarks.gpu.first_hour import MISSED, PARTS, Outcome, Part, duration, keys_of, least_s, main, read_outcomes

pytestmark = pytest.mark.long

STAND_INS = {
    "good.py": "write({'rows': [{'case': 'a', 'x': 1}], 'n': 2})",
    "missed.py": "write({'rows': [{'case': 'a', 'holds': False, 'said': '2 s', 'target': '1 s'}]}); sys.exit(4)",
    # One case failed; the others are in its result.
    "refused.py": "write({'rows': [{'case': 'a', 'error': 'no GPU'}, {'case': 'b', 'holds': True}]}); sys.exit(1)",
    "crashed.py": "print('working'); raise OSError('no room')",
    "crashed_late.py": "write({'rows': [{'case': 'a'}]}); raise OSError('no room')",
    "missed_nothing.py": "sys.exit(4)",
    "silent.py": "pass",
    # Writes what it has, then hangs in a child that outlives it unless the whole session is ended.
    "hangs.py": "write({'rows': []}); subprocess.run(['sleep', '1000'])",
}
HEAD = """
import json, subprocess, sys
from pathlib import Path
path = Path(sys.argv[sys.argv.index('--json') + 1])
path.with_suffix('.args').write_text(' '.join(sys.argv[1:]))
with path.with_suffix('.runs').open('a') as runs:
    runs.write('x')
def write(result):
    path.write_text(json.dumps(result))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the results; the programs are in another one."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(HEAD + text)
    monkeypatch.setattr(first_hour, "FOLDER", programs)
    return tmp_path / "out"


def part(name: str, limit_s: float = 60.0) -> Part:
    return Part(name, limit_s, (f"{name}.py", "--only", "x"), f"what {name} answers")


def runs(folder: Path, name: str) -> int:
    path = folder / f"{name}.runs"
    return len(path.read_text()) if path.exists() else 0


def test_each_part_has_its_fate_and_the_others_go_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["crashed", "crashed_late", "refused", "silent", "missed_nothing", "hangs", "missed", "good"]
    assert main(["--out", str(folder)], [part(name, 1.0 if name == "hangs" else 60.0) for name in names]) == 1
    outcomes = read_outcomes(folder)
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "crashed": "failed",
        "crashed_late": "failed",
        "refused": "failed",
        "silent": "failed",
        "missed_nothing": "failed",
        "hangs": "timed out",
        "missed": "missed",
        "good": "done",
    }
    assert outcomes["crashed"].cause == "OSError: no room" and outcomes["good"].cause == ""
    assert json.loads((folder / "good.json").read_text())["n"] == 2
    assert json.loads((folder / "hangs.json").read_text()) == {"rows": []}, "what it had measured is kept"
    assert (folder / "good.args").read_text().startswith("--only x --json /")
    said = capsys.readouterr().out
    assert re.search(r"^crashed: failed after \d+ s: OSError: no room$", said, re.MULTILINE)
    assert "- missed: missed: a: 2 s (target: 1 s)" in said and "- refused: failed: a: no GPU" in said


def test_a_part_that_is_stopped_leaves_no_process(folder: Path) -> None:
    main(["--out", str(folder)], [part("hangs", 0.5)])
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "sleep 1000" not in found
    assert not any(str(folder) in line for line in found)


def test_a_second_run_continues(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that are done or missed their target are skipped; new ones come before those with a failure."""
    names = ("crashed", "refused", "crashed_late", "missed", "good")
    parts = [part(name) for name in names]
    main(["--out", str(folder)], parts)
    for name in ("crashed", "refused", "crashed_late", "late"):
        (first_hour.FOLDER / f"{name}.py").write_text(HEAD + "write({})")
    capsys.readouterr()
    assert main(["--out", str(folder)], [*parts, part("late")]) == 0
    assert [runs(folder, name) for name in (*names, "late")] == [2, 2, 2, 1, 1, 1]
    said = capsys.readouterr().out
    assert "good: done before, skipped" in said and "missed: missed before, skipped" in said
    assert said.index("what late answers") < said.index("what crashed answers")


@pytest.mark.parametrize("name", ["silent", "missed_nothing", "hangs_at_once"])
def test_a_part_without_a_result_keeps_that_of_an_earlier_run(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier result does not count as this run's."""
    (first_hour.FOLDER / "hangs_at_once.py").write_text("import time; time.sleep(1000)")
    folder.mkdir()
    (folder / f"{name}.json").write_text('{"n": 1}')
    assert main(["--out", str(folder)], [part(name, 1.0)]) == 1
    outcome = read_outcomes(folder)[name]
    assert outcome.state in ("failed", "timed out") and not outcome.wrote
    assert json.loads((folder / f"{name}.json").read_text()) == {"n": 1}
    assert "s; its result is of an earlier run" in capsys.readouterr().out


def test_a_new_result_replaces_the_earlier_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir()
    (folder / "hangs.json").write_text('{"n": 1}')
    main(["--out", str(folder)], [part("hangs", 0.5)])
    assert json.loads((folder / "hangs.json").read_text()) == {"rows": []}, "what it had measured when it was stopped"
    assert json.loads((folder / "hangs.old").read_text()) == {"n": 1}
    assert "earlier run" not in capsys.readouterr().out


def test_the_exit_code_of_a_missed_target_is_that_of_the_benchmarks() -> None:
    assert on_gpu.MISSED == MISSED


def test_a_selected_part_runs_again(folder: Path) -> None:
    parts = [part("missed"), part("good")]
    main(["--out", str(folder)], parts)
    assert main(["--out", str(folder), "--only", "good"], parts) == 0
    assert (runs(folder, "good"), runs(folder, "missed")) == (2, 1)


def test_the_budget_bounds_all_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that gets less than half of its limit is left for the next run; shorter ones still run."""
    parts = [part("hangs", 1.5), part("missed", 60.0), part("good", 30.0)]
    assert main(["--out", str(folder), "--budget", "20s"], parts) == 1
    assert [runs(folder, name) for name in ("hangs", "missed", "good")] == [1, 0, 1]
    assert "missed" not in read_outcomes(folder)
    said = capsys.readouterr().out
    assert (
        "missed: not started, 18 s left of at least 30 s" in said and "good: what good answers (at most 18 s)" in said
    )


def test_a_part_that_was_done_before_starts_with_the_time_it_took() -> None:
    done, slow, failed = Outcome("done", 9.0, 60.0), Outcome("missed", 50.0, 60.0), Outcome("failed", 1.0, 60.0)
    assert [least_s(part("good"), before) for before in (None, done, slow, failed)] == [30, 9, 30, 30]


def test_ctrl_c_ends_the_part_and_summarises(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    programs = first_hour.FOLDER
    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    monkeypatch.setattr(first_hour, "FOLDER", programs)
    assert main(["--out", str(folder)], [part("hangs"), part("good")]) == 1
    said = capsys.readouterr()
    assert "stopped; run the same command to continue" in said.err
    assert "hangs         not run" in said.out, "it is tried again"


def test_a_dry_run_asks_every_part_for_one_and_prints_its_keys(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(folder), "--dry-run"], [part("good")]) == 0
    assert (folder / "good.args").read_text().endswith("--dry-run")
    assert "    n, rows[].case, rows[].x" in capsys.readouterr().out


def test_a_dry_run_has_results_of_its_own() -> None:
    assert first_hour.parse([], []).out == Path("first_hour")
    assert first_hour.parse(["--dry-run"], []).out == Path("dry_run")


def test_missing_packages_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = {"deepspeed", "hydra"}
    monkeypatch.setattr(first_hour, "find_spec", lambda module: None if module in absent else object())
    assert main(["--out", str(folder)], [part("good")]) == 0, "other parts still run"
    assert "not installed: deepspeed, hydra-core; parts that need them fail" in capsys.readouterr().err
    absent.add("torch")
    assert main(["--out", str(folder)], [part("good")]) == 3
    assert runs(folder, "good") == 1


def test_the_program_needs_the_standard_library_only() -> None:
    code = "import sys, benchmarks.gpu.first_hour as f; f.main(['--list']); print(set(sys.modules) & set(f.NEEDED))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=first_hour.ROOT)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    *listed, total = done.stdout.splitlines()[:-1]
    assert [line.split()[0] for line in listed] == [one.name for one in PARTS]
    assert total == f"all: at most {sum(one.limit_s for one in PARTS) / 60:.0f} minutes"


def test_every_part_is_a_program_with_its_options() -> None:
    assert len({one.name for one in PARTS}) == len(PARTS)
    for one in PARTS:
        assert (first_hour.FOLDER / one.command[0]).exists()
    assert all(one.limit_s < 600 for one in PARTS)
    order = [one.name for one in PARTS]
    assert order[:3] == ["machine", "tests", "probe"] and order[-1] == "longest", "the most informative first"


@pytest.mark.parametrize(("text", "seconds"), [("28m", 1680), ("90s", 90), ("0.5h", 1800)])
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("arguments", [["--budget", "28"], ["--only", "good,bad"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments, [part("good")])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "invalid duration value: '28'" in said or "unknown part bad; the parts are good" in said


def test_keys_of_rows_are_joined() -> None:
    assert keys_of({"a": 1, "rows": [{"x": 1}, {"y": 2, "x": 3}]}) == ["a", "rows[].x", "rows[].y"]
