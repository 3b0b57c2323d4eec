from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.config.resolved import resolved_yaml
from engine.files import LOCK, locked
from engine.report.comparison_page import comparison_page
from engine.report.run import read_run
from engine.report.run_page import run_page
from engine.run import launches, metrics
from engine.run.folder import RunFolder
from tests.permissions import locked_out

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two runs of three steps, of which the second one was stopped, and a damaged one."""
    for name, lr, steps in (("a", 0.1, 3), ("b", 0.2, 2)):
        folder = RunFolder(tmp_path / name)
        folder.logs.mkdir(parents=True)
        config = load(["run.steps=3", f"run.out={folder.root}", f"optimizer.lr={lr}"])
        folder.resolved.write_text(resolved_yaml(config), encoding="utf-8")
        for step in range(1, steps + 1):
            line = {"step": step, "loss": lr * 10 / step, "tokens": 1000, "tokens_per_s": 17408.0}
            metrics.append(folder.metrics, line)
        folder.log(0).write_text("first\nsecond\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "resolved.yaml").write_text("nonsense")
    return tmp_path


def answer(capsys: Capture, *words: str) -> dict[str, object]:
    assert run(["runs", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["ok"]) == (1, True)
    return dict(found)


def test_list(runs: Path, capsys: Capture) -> None:
    assert run(["runs", "list", str(runs)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["state", "steps", "loss", "tokens/s", "recipe", "run"]
    assert sorted(row.split() for row in rows[:2]) == [
        ["finished", "3/3", "0.333", "17,408", "quickstart", str(runs / "a")],
        ["stopped", "2/3", "1.000", "17,408", "quickstart", str(runs / "b")],
    ]
    assert rows[2] == f"{runs / 'c'}: is not a resolved config"
    found = answer(capsys, "list", str(runs))
    assert isinstance(found["runs"], list) and len(found["runs"]) == 2
    assert found["unreadable"] == [{"run": str(runs / "c"), "reason": "is not a resolved config"}]


def test_a_run_that_may_not_be_read_is_listed_with_the_reason(runs: Path, capsys: Capture) -> None:
    with locked_out(runs / "b"):
        found = answer(capsys, "list", str(runs))
    assert isinstance(found["runs"], list) and [one["run"] for one in found["runs"]] == [str(runs / "a")]
    reasons = {str(runs / "b"): "resolved.yaml: Permission denied", str(runs / "c"): "is not a resolved config"}
    assert isinstance(found["unreadable"], list)
    assert {one["run"]: one["reason"] for one in found["unreadable"]} == reasons


def test_a_run_with_a_strange_file_is_listed_with_the_reason(runs: Path, capsys: Capture) -> None:
    RunFolder(runs / "b").metrics.unlink()
    os.mkfifo(RunFolder(runs / "b").metrics)
    found = answer(capsys, "list", str(runs))
    assert isinstance(found["runs"], list) and [one["run"] for one in found["runs"]] == [str(runs / "a")]
    assert isinstance(found["unreadable"], list) and str(runs / "b") in {one["run"] for one in found["unreadable"]}


def test_a_folder_without_runs(tmp_path: Path, capsys: Capture) -> None:
    assert run(["runs", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"


def test_slow_runs_have_no_decimals_of_tokens_either(runs: Path, capsys: Capture) -> None:
    """`train` prints 923 for the same step."""
    RunFolder(runs / "b").metrics.unlink()
    metrics.append(RunFolder(runs / "b").metrics, {"step": 1, "loss": 1.0, "tokens": 1000, "tokens_per_s": 923.206})
    assert run(["runs", "status", str(runs / "b")]) == 0
    assert capsys.readouterr().out.splitlines()[6].split() == ["tokens/s", "923"]
    assert run(["runs", "compare", str(runs / "a"), str(runs / "b")]) == 0
    assert " 923 " in capsys.readouterr().out


def test_all_commands_and_pages_have_the_same_median_of_the_steps(runs: Path, capsys: Capture) -> None:
    """Not the speed of the last step, and not that of steps that warm up, after a start."""
    folder = RunFolder(runs / "b")
    folder.metrics.unlink()
    for step, rate in enumerate((10.0, 800.0, 900.0, 20.0, 1000.0, 3000.0), start=1):
        line = {"step": step, "loss": 1.0, "tokens": 1000, "step_s": 1000 / rate, "mfu": rate / 1e4, "max_degree": 1}
        metrics.append(folder.metrics, line | {"tokens_per_s": rate, "unsplit": 0.25})
    for step in (1, 4):
        launches.begin(folder.launches, step, 2, ["localhost"])
    found = answer(capsys, "list", str(runs))["runs"]
    assert isinstance(found, list) and [one["tokens_per_s"] for one in found if one["run"] == str(folder.root)] == [950]
    status = answer(capsys, "status", str(folder.root))["status"]
    assert isinstance(status, dict)
    assert (status["tokens_per_s"], status["mfu"], status["unsplit"]) == (950, 0.095, 0.25)
    compared = answer(capsys, "compare", str(runs / "a"), str(folder.root))["compare"]
    assert isinstance(compared, dict) and compared["runs"][1]["tokens_per_s"] == 950
    page, other = read_run(folder.root), read_run(runs / "a")
    assert run_page(page).headline.figure == "950 tokens/s"
    assert dict(run_page(page).tables[0].rows)["median tokens/s"] == "950"
    rows = {row[0]: row[1:] for row in comparison_page([page, other], ["b", "a"]).tables[0].rows}
    assert rows["median tokens/s"] == ("950", "17,408") and rows["MFU"] == ("9.5%", "-")


def test_runs_of_the_same_steps_are_compared_by_their_time(runs: Path, capsys: Capture) -> None:
    for name, planner, seconds in (("a", "static", 3.0), ("b", "adaptive", 1.5)):
        folder = RunFolder(runs / name)
        folder.resolved.write_text(resolved_yaml(load(["run.steps=3", f"planner={planner}"])), encoding="utf-8")
        folder.metrics.unlink()
        for step in (1, 2, 3):
            line = {"step": step, "loss": 1.0, "tokens": 1000, "step_s": seconds, "tokens_per_s": 1000 / seconds}
            metrics.append(folder.metrics, line)
    both = [str(runs / "a"), str(runs / "b")]
    assert run(["runs", "compare", *both]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert said.startswith("adaptive is 2.00 times as fast as static") and "6 s" in said and "3 s" in said
    found = answer(capsys, "compare", *both)["compare"]
    assert isinstance(found, dict)
    assert found["faster"] == {"fast": 1, "slow": 0, "ratio": 2.0, "steps": [2, 3], "seconds": [3.0, 6.0]}


def test_status(runs: Path, capsys: Capture) -> None:
    assert run(["runs", "status", str(runs / "b")]) == 0
    head, *facts = capsys.readouterr().out.splitlines()
    assert head == f"{runs / 'b'}: stopped"
    shown = {line[2:].split("  ")[0]: line.split("  ")[-1].strip() for line in facts}
    assert (shown["step"], shown["loss"], shown["tokens"], shown["tokens/s"]) == ("2 of 3", "1.000", "2,000", "17,408")
    assert shown["checkpoint"] == "none yet"
    found = answer(capsys, "status", str(runs / "b"))["status"]
    assert isinstance(found, dict) and (found["state"], found["step"], found["loss"]) == ("stopped", 2, 1.0)


def test_the_status_of_a_run_that_failed_has_the_cause_once(runs: Path, capsys: Capture) -> None:
    folder = RunFolder(runs / "b")
    launches.begin(folder.launches, 1, 2, ["localhost"])
    launches.end(folder.launches, "rank 1 failed: out of memory (model.py:3)")
    for rank, cause in ((0, "the connection to rank 1 was lost"), (1, "out of memory")):
        folder.error(rank).write_text(json.dumps({"message": cause, "time": 2.0 - rank}))
    assert run(["runs", "status", str(folder.root)]) == 0
    head, *facts = capsys.readouterr().out.splitlines()
    assert head == f"{folder.root}: failed"
    assert [line.split(maxsplit=1)[1] for line in facts if "cause" in line] == [
        "rank 1 failed: out of memory (model.py:3)"
    ]
    assert facts[-1].split(maxsplit=2) == ["rank", "0", "failed: the connection to rank 1 was lost"]


def test_a_run_without_steps_has_no_time_of_the_last(runs: Path, capsys: Capture) -> None:
    RunFolder(runs / "b").metrics.unlink()
    assert run(["runs", "status", str(runs / "b")]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "last step" in line] == [
        ["last", "step", "-"]
    ]


def test_logs(runs: Path, capsys: Capture) -> None:
    assert run(["runs", "logs", str(runs / "a"), "--lines", "1"]) == 0
    assert capsys.readouterr().out == f"rank 0: {runs / 'a' / 'logs' / 'rank-0.log'}\nsecond\n"
    (log,) = answer(capsys, "logs", str(runs / "a"), "--rank", "0")["logs"]  # type: ignore[misc]
    assert log["lines"] == ["first", "second"]
    log = RunFolder(runs / "a").log(0)
    log.rename(log.with_name("node-0.log"))
    assert run(["runs", "logs", str(runs / "a"), "--lines", "1"]) == 0
    assert capsys.readouterr().out == f"node 0: {runs / 'a' / 'logs' / 'node-0.log'}\nsecond\n"


def test_compare(runs: Path, capsys: Capture) -> None:
    assert run(["runs", "compare", str(runs / "a"), str(runs / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith(("a  ", "b  "))] == [
        ["a", "finished", "3/3", "3,000", "17,408", "-"],
        ["b", "stopped", "2/3", "2,000", "17,408", "-"],
        ["a", "0.500", "0.333", "-"],
        ["b", "1.000", "1.000", "-"],
    ]
    assert [line.split() for line in lines[-2:]] == [["key", "a", "b"], ["optimizer.lr", "0.1", "0.2"]]
    found = answer(capsys, "compare", str(runs / "a"), str(runs / "b"))["compare"]
    assert isinstance(found, dict) and found["differences"] == {"optimizer.lr": [0.1, 0.2]}
    assert (found["step"], found["losses"]) == (2, [0.5, 1.0])


def test_runs_that_do_not_differ(runs: Path, capsys: Capture) -> None:
    shutil.copytree(runs / "a", runs / "same")
    assert run(["runs", "compare", str(runs / "a"), str(runs / "same")]) == 0
    assert capsys.readouterr().out.endswith("Where do their configs differ?\nonly in run.out\n")


@pytest.mark.parametrize(
    "words",
    ["runs list", "runs status", "runs logs", "runs compare", "report", "data trace", "data watch", "ckpt inspect"],
)
def test_a_run_that_may_not_be_read_is_refused_in_one_form(
    words: str, runs: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer's own check of a path has other words and another exit code."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(runs)) and real(path, mode))
    with locked_out(runs / "a"):
        place = runs / "a" if words != "runs list" else runs / "a" / "logs"
        more = {"runs compare": [str(runs / "b")], "data trace": ["--step", "1"]}.get(words, [])
        assert run([*words.split(), str(place), *more]) == 74
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith(": Permission denied") and said[1].startswith("hint: `namei -l ")


def test_a_damaged_line_of_metrics_is_reported_once(runs: Path, capsys: Capture) -> None:
    path = runs / "a" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\n" + lines[2])
    for words in (["list", str(runs)], ["status", str(runs / "a")]):
        assert run(["runs", *words]) == 0
        assert "".join(capsys.readouterr().out.split()).count(f"{path}:2:") == 1
    found = answer(capsys, "status", str(runs / "a"))["status"]
    assert isinstance(found, dict) and len(found["warnings"]) == 1 and found["step"] == 3
    said = list[str]()
    read_run(runs / "a", said.append)
    assert len(said) == 1 and said[0].startswith(f"{path}:2:")
    metrics.cut_back(path, 3)
    assert answer(capsys, "status", str(runs / "a"))["status"]["warnings"] == []  # type: ignore[index]


def test_a_line_that_is_being_written_is_not_damaged(runs: Path, capsys: Capture) -> None:
    path = runs / "a" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 4, "lo')
    for context, expected in ((locked(runs / "a" / LOCK), 0), (nullcontext(), 1)):
        with context:
            found = answer(capsys, "status", str(runs / "a"))["status"]
            assert isinstance(found, dict) and len(found["warnings"]) == expected


def test_runs_of_different_models_are_told_apart(runs: Path, capsys: Capture) -> None:
    """Their speeds and losses are shown, but not as if they were of the same work."""
    both = [str(runs / "a"), str(runs / "b")]
    assert run(["runs", "compare", *both]) == 0
    assert "models differ" not in capsys.readouterr().out
    config = load(["run.steps=3", f"run.out={runs / 'b'}", "model.layers=4"])
    (runs / "b" / "resolved.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    assert run(["runs", "compare", *both]) == 0
    assert "models differ" in capsys.readouterr().out
    page = comparison_page([read_run(Path(one)) for one in both], ["a", "b"])
    assert "models differ" in page.headline.text
