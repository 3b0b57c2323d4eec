"""The driver with stand-ins for its parts: what succeeds, fails, hangs or is killed, and what a second run does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import first_hour
from benchmarks.gpu.first_hour import PARTS, QUARTER, QUARTER_S, Call, Part, main, read_outcomes

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


def test_the_calls_of_15_minutes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a deadline of its own; --call selects one, and a dry run takes as long as it needs."""
    seconds = [call.seconds for call in QUARTER]
    assert seconds == [300, 180, 180] and QUARTER_S - sum(seconds) >= 60 + 60, "its start, and transfers"
    assert all(sum(part.limit_s for part in call.parts) <= call.seconds for call in QUARTER)
    limits = {part.name: part.command for part in PARTS}
    for part_ in (part for call in QUARTER for part in call.parts):
        assert (Path(first_hour.__file__).parent / part_.command[0]).exists()
        assert limits.get(part_.name, part_.command) == part_.command, "they share their results"

    monkeypatch.setattr(first_hour, "QUARTER", (Call(60, (part("good"),)), Call(0, (part("missed"),))))
    budget = ["--budget", "15m", "--out", str(folder)]
    assert main([*budget, "--call", "1"]) == 0
    assert (runs(folder, "good"), runs(folder, "missed")) == (1, 0)
    assert main(budget) == 1 and runs(folder, "missed") == 0 and "not started" in capsys.readouterr().out
    assert main([*budget, "--dry-run"]) == 0 and runs(folder, "missed") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["--call", "1"])


def test_missing_packages_are_installed_from_prepared_wheels(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "prepared" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / "a.whl").touch()
    called: list[list[str]] = []
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    monkeypatch.setattr(first_hour, "NEEDED", {"no_such_module": "no-such"})
    monkeypatch.setattr(subprocess, "run", lambda command, check: called.append(command))
    first_hour.main(["--out", str(folder)], [])
    assert len(called) == 1 and "--no-index" in called[0] and called[0][-1].endswith("a.whl")


def test_the_program_needs_the_standard_library_only() -> None:
    code = "import sys, benchmarks.gpu.first_hour as f; f.main(['--list']); print(set(sys.modules) & set(f.NEEDED))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=first_hour.ROOT)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
    *listed, total = done.stdout.splitlines()[:-1]
    assert [line.split()[0] for line in listed] == [one.name for one in PARTS]
    assert total == f"all: at most {sum(one.limit_s for one in PARTS) / 60:.0f} minutes"
