"""The driver with stand-ins for its parts: what succeeds, fails, hangs or is killed, and what a second run does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import first_hour
from benchmarks.gpu.first_hour import PARTS, Part, duration, keys_of, main, read_outcomes

STAND_INS = {
    "good.py": "write({'rows': [{'case': 'a', 'x': 1}], 'n': 2})",
    "missed.py": "write({'rows': [{'case': 'a', 'holds': False, 'said': '2 s', 'target': '1 s'}]}); sys.exit(1)",
    "crashed.py": "print('working'); raise OSError('no room')",
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
    parts = [part("crashed"), part("silent"), part("hangs", 1.0), part("missed"), part("good")]
    assert main(["--out", str(folder)], parts) == 1
    outcomes = read_outcomes(folder)
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "crashed": "failed",
        "silent": "failed",
        "hangs": "timed out",
        "missed": "missed",
        "good": "done",
    }
    assert outcomes["crashed"].cause == "OSError: no room" and outcomes["good"].cause == ""
    assert json.loads((folder / "good.json").read_text())["n"] == 2
    assert json.loads((folder / "hangs.json").read_text()) == {"rows": []}, "what it had measured is kept"
    assert (folder / "good.args").read_text().startswith("--only x --json /")
    said = capsys.readouterr().out
    assert "crashed: failed after 0 s: OSError: no room" in said
    assert "- missed: missed: a: 2 s (target: 1 s)" in said


def test_a_part_that_is_stopped_leaves_no_process(folder: Path) -> None:
    main(["--out", str(folder)], [part("hangs", 0.5)])
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "sleep 1000" not in found
    assert not any(str(folder) in line for line in found)


def test_a_second_run_continues(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that are done or missed their target are skipped; new ones come before those that failed."""
    parts = [part("crashed"), part("missed"), part("good")]
    main(["--out", str(folder)], parts)
    (first_hour.FOLDER / "crashed.py").write_text(HEAD + "write({})")
    (first_hour.FOLDER / "late.py").write_text(HEAD + "write({})")
    capsys.readouterr()
    assert main(["--out", str(folder)], [*parts, part("late")]) == 0
    assert [runs(folder, name) for name in ("crashed", "missed", "good", "late")] == [2, 1, 1, 1]
    said = capsys.readouterr().out
    assert "good: done before, skipped" in said and "missed: missed before, skipped" in said
    assert said.index("what late answers") < said.index("what crashed answers")


def test_results_of_an_earlier_run_do_not_count(folder: Path) -> None:
    folder.mkdir()
    (folder / "silent.json").write_text("{}")
    main(["--out", str(folder)], [part("silent")])
    assert read_outcomes(folder)["silent"].state == "failed"


def test_a_selected_part_runs_again(folder: Path) -> None:
    parts = [part("missed"), part("good")]
    main(["--out", str(folder)], parts)
    assert main(["--out", str(folder), "--only", "good"], parts) == 0
    assert (runs(folder, "good"), runs(folder, "missed")) == (2, 1)


def test_the_budget_bounds_all_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last part to start gets what is left; the others are left for the next run."""
    assert main(["--out", str(folder), "--budget", "16s"], [part("hangs", 1.5), part("good")]) == 1
    assert runs(folder, "good") == 0 and "good" not in read_outcomes(folder)
    assert "good: no time left" in capsys.readouterr().out


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
    assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == [one.name for one in PARTS]


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
