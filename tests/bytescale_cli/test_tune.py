"""`tune` prints the best five and why others fall off, and writes a recipe that other commands take."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli import tune
from bytescale_cli.main import run
from engine.config.load import diff, load
from tests.presets import LLAMA3_8B_2M

pytestmark = pytest.mark.long

SMALL = ["recipe=llama7b-256k", "cluster=h100x8", "cluster.nodes=1", "context=32K", "batch_tokens=128K"]
SMALL += ["lengths=byted", "lengths.max=32K", "recompute=layer", "offload.ratio=0"]
QUICK = ["--seconds", "1"]  # where it does not matter how good the best one is
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What one search prints as JSON, and the recipe that it writes."""
    file, printed = tmp_path_factory.mktemp("tuned") / "best.yaml", io.StringIO()
    with redirect_stdout(printed):
        assert run(["tune", *SMALL, "--json", "--out", str(file)]) == 0
    answer = json.loads(printed.getvalue())
    assert (answer["schema"], answer["ok"]) == (1, True)
    return answer["tune"], file


def failure(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["tune", *arguments, "--json"])
    error: dict[str, Any] = json.loads(capsys.readouterr().out)["error"]
    return code, error


def test_json_has_the_best_in_order(tuned: tuple[dict[str, Any], Path]) -> None:
    found, _ = tuned
    best = found["best"]
    assert 1 < len(best) <= 5 and best[0]["slower"] == 1 and best[0]["behind"] == ""
    assert [one["step_s"] for one in best] == sorted(one["step_s"] for one in best)
    assert found["recipe_step_s"] >= best[0]["step_s"]
    assert found["fixed"] == ["recompute", "offload.ratio"]
    assert {(one["recompute"], one["offload.ratio"]) for one in best} == {("layer", 0.0)}
    for one in best:
        assert one["peak"] <= one["device_total"]
        assert one["device_ms_per_token"] == pytest.approx(8000 / one["tokens_per_s"])
    assert all(one["count"] > 0 for one in found["fallen"])


def test_the_written_recipe_is_the_best(tuned: tuple[dict[str, Any], Path], capsys: Capture) -> None:
    found, file = tuned
    best = found["best"][0]
    written = load([f"recipe={file}"])
    changed = {line.split(":")[0] for line in diff(load(SMALL), written)}
    searched = {"parallel.tp", "parallel.pp", "parallel.ep", "zero.stage", "recompute", "offload.ratio", "capacity"}
    assert changed <= {"recipe", "run.out", *searched} and written.recipe == "best"
    assert (written.parallel.tp, written.parallel.pp, written.zero.stage) == (
        best["tp"],
        best["pp"],
        best["zero.stage"],
    )
    assert (written.capacity, written.run.out) == (best["capacity"], "runs/best")
    assert run(["simulate", "--config", str(file), "--planners", "adaptive", "--no-tuned", "--json"]) == 0
    (_, adaptive) = json.loads(capsys.readouterr().out)["runs"]
    assert adaptive["step_s"] == best["step_s"]


def test_a_file_of_ones_own_is_built_on(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [llama7b-256k]\nrun:\n  steps: 7\n")
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "best.yaml"
    own = [text for text in SMALL if not text.startswith("recipe=")]
    assert run(["tune", "--config", str(tmp_path / "mine.yaml"), *own, *QUICK, "--out", str(file)]) == 0
    assert "- ./../mine.yaml" in file.read_text() and load([f"recipe={file}"]).run.steps == 7
    assert "best.yaml; use it by --config" in capsys.readouterr().out


def test_a_base_that_lacks_values_is_completed(capsys: Capture, tmp_path: Path) -> None:
    """`lengths=file` needs a path, which only the command line sets."""
    (tmp_path / "mine.yaml").write_text("defaults: [llama7b-256k, override /lengths: file]\n")
    (tmp_path / "lengths.txt").write_text("1000\n30000\n")
    file, path = tmp_path / "best.yaml", f"lengths.path={tmp_path / 'lengths.txt'}"
    own = [text for text in SMALL if not text.startswith(("recipe=", "lengths"))]
    assert run(["tune", "--config", str(tmp_path / "mine.yaml"), *own, path, *QUICK, "--out", str(file), "--json"]) == 0
    written = load([f"recipe={file}"])
    assert written.lengths.path == str(tmp_path / "lengths.txt") and written.run.out == "runs/best"
    assert written.capacity == json.loads(capsys.readouterr().out)["tune"]["best"][0]["capacity"]


def test_the_text_says_why_others_fall_off(capsys: Capture) -> None:
    assert run(["tune", *SMALL, *QUICK]) == 0
    text = capsys.readouterr().out
    for part in ("What do they set?", "How fast are they?", "the settings as given:", "break a rule"):
        assert part in text
    assert "kept as set: recompute, offload.ratio" in text


def test_nothing_fits(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_LOOK_S", 0.5)  # nothing fits on any number of nodes
    code, error = failure(capsys, *SMALL, "cluster.device_memory=4GiB")
    assert code == 10 and "device memory" in error["message"] and error["hint"]


def test_the_hint_has_the_nodes_with_which_some_settings_fit(capsys: Capture) -> None:
    code, error = failure(capsys, "recipe=llama70b-2m", "cluster.nodes=1")
    assert (code, error["hint"]) == (10, "cluster.nodes=4")


def test_values_of_the_recipe_that_are_searched_may_break_a_rule(capsys: Capture, tmp_path: Path) -> None:
    """Its tp x pp = 32 does not divide the devices; the rules hold for what is found."""
    small = [
        "recipe=llama70b-2m-paper",
        "cluster.nodes=4",
        "cluster.ranks_per_node=6",
        "context=8K",
        "batch_tokens=64K",
    ]
    file = tmp_path / "best.yaml"
    keys = [*small, "recompute=layer", "zero.stage=3", "capacity=8K", *QUICK]
    assert run(["tune", *keys, "--json", "--out", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)["tune"]
    assert found["recipe_step_s"] is None
    assert "does not divide 24 devices" in found["recipe_breaks"] and "ZeRO-3" in found["recipe_breaks"]
    assert found["recipe_breaks"].startswith("parallel.")
    assert load([f"recipe={file}"]).parallel.pp == found["best"][0]["pp"] == 1
    assert run(["tune", *keys]) == 0
    assert "the settings as given break a rule: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"), [("parallel.tp", 3), ("zero.stage", 7), ("optimizer.lr", -1), ("parallel.tp", "two")]
)
def test_values_that_are_given_may_not(capsys: Capture, tmp_path: Path, key: str, value: object) -> None:
    """On the command line, and what a file of the user sets has a wrong type or bound there too."""
    assert run(["tune", "recipe=llama70b-2m-paper", f"{key}={value}", "--json"]) == 2
    assert key in {error["key"] for error in json.loads(capsys.readouterr().out)["errors"]}
    if value != 3:  # tp=3 of a file is only one of the values that are tried
        section, name = key.split(".")
        file = tmp_path / "mine.yaml"
        file.write_text(f"defaults: [llama70b-2m-paper]\n{section}: {{{name}: {value}}}\n")
        assert run(["tune", "--config", str(file), "--json"]) == 2
        assert "mine.yaml:2" in str(json.loads(capsys.readouterr().out)["errors"])


def test_searched_keys_take_values_that_a_given_one_needs(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_LOOK_S", 0.5)  # nothing fits on any number of nodes
    code, error = failure(
        capsys, "recipe=llama70b-2m-paper", "cluster.nodes=1", "planner.mode=pipeline", "capacity=64M"
    )
    assert code == 10 and error["message"].startswith("no settings fit, for example "), "not that pp is 1"


def test_other_ways_than_nodes_are_kept(capsys: Capture) -> None:
    small = [*LLAMA3_8B_2M, "cluster.nodes=1", "cluster.ranks_per_node=1", "context=8K"]
    code, error = failure(capsys, *small)
    assert code == 10 and error["hint"].startswith("optimizer.on_host=true; or cluster.nodes=")


def test_a_hostfile_on_which_nothing_fits(capsys: Capture, tmp_path: Path) -> None:
    """The recipe's degrees, which do not divide its devices, are not at fault."""
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu-1 slots=8\n")
    code, error = failure(capsys, "recipe=llama70b-2m-paper", f"cluster.hostfile={hosts}")
    assert code == 10 and "device memory" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(["--seconds", "0"], "--seconds"), (["--steps", "0"], "--steps"), (["--out", "best.txt"], "--out")],
)
def test_wrong_flags_are_refused(capsys: Capture, arguments: list[str], key: str) -> None:
    code, error = failure(capsys, *SMALL, *arguments)
    assert (code, error["key"]) == (2, key) and error["hint"]


def test_a_calibration_that_cannot_be_used_is_refused_before_the_search(capsys: Capture, tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        code, error = failure(capsys, "recipe=quickstart", f"cluster.calibration={path}")
        assert (code, error["key"]) == (2, "cluster.calibration") and error["hint"]


def test_an_existing_file_is_refused_before_the_search(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    file.write_text("")
    code, error = failure(capsys, *SMALL, "--out", str(file))
    assert (code, error["key"]) == (2, "--out") and file.read_text() == ""


def test_a_search_that_did_not_finish_says_so_first(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--seconds 1` may be enough, so the clock is advanced."""
    clock = iter(range(0, 10**6, 1000))
    monkeypatch.setattr("bytescale_cli.tune.time.monotonic", lambda: next(clock))
    assert run(["tune", *SMALL, *QUICK]) == 0
    assert capsys.readouterr().out.startswith("incomplete: ")
    assert run(["tune", *SMALL, *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tune"]
    assert not found["complete"] and found["left"] > 0
    monkeypatch.undo()
    assert run(["tune", *SMALL, "planner=static"]) == 0
    assert "incomplete" not in capsys.readouterr().out.splitlines()[0]
