"""`simulate` needs no GPU and no torch, its JSON has the keys that others read; mistakes are told before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli import output
from bytescale_cli.main import run
from bytescale_cli.simulate import _compare_offload, _text
from engine.config.load import load
from engine.data.lengths import step_lengths
from engine.job import Job
from engine.report.headline import of_simulation
from engine.simulator.compare import compare
from tests.presets import LLAMA7B_2M
from tests.report.events import checked

PROMISED = {
    "planner", "tuned", "ranks", "context", "lengths", "step_s", "tokens_per_s", "speedup", "compute_s",
    "exposed_comm_s", "bubble",
}  # fmt: skip
SMALL = ["lengths=byted", "lengths.max=8K", "batch_tokens=64K", "context=8K", "capacity=2K", "cluster.ranks_per_node=4"]
PLANNERS = ["static", "naive", "balanced", "adaptive"]
TUNE = "bytescale tune recipe=quickstart"
Capture = pytest.CaptureFixture[str]


def simulated(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    assert run(["simulate", "--no-tuned", *SMALL, *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["ok"]) == (1, True)
    runs: list[dict[str, Any]] = answer["runs"]
    return runs


def test_json_has_the_promised_keys_for_each_planner(capsys: Capture) -> None:
    runs = simulated(capsys)
    assert [one["label"] for one in runs] == PLANNERS
    for one in runs:
        assert set(one) >= PROMISED
        assert (one["ranks"], one["context"], one["lengths"]) == (4, 8192, "byted")
        assert 0 < one["compute_s"] <= one["step_s"] and 0 <= one["bubble"] < 1 and one["exposed_comm_s"] >= 0
        assert one["speedup"] == pytest.approx(runs[0]["step_s"] / one["step_s"])
    assert runs[0]["speedup"] == 1


@pytest.mark.long
def test_static_at_its_best_settings_is_a_row(capsys: Capture) -> None:
    """It is what `tune planner=static` finds. The keys that are set do not limit it."""
    assert run(["simulate", *SMALL, "--planners", "adaptive", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["label"], one["planner"], one["tuned"]) for one in runs] == [
        ("static", "static", False),
        ("static, tuned", "static", True),
        ("adaptive", "adaptive", False),
    ]
    static, tuned, adaptive = runs
    assert tuned["complete"] and tuned["left"] == 0 and tuned["step_s"] <= static["step_s"]
    assert adaptive["speedup_tuned"] == pytest.approx(tuned["step_s"] / adaptive["step_s"])
    others = [text for text in SMALL if not text.startswith("capacity")]
    assert run(["tune", *others, "planner=static", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tune"]
    assert found["complete"] and found["best"][0]["step_s"] == pytest.approx(tuned["step_s"], rel=1e-6)
    assert run(["simulate", *SMALL, *tuned["set"].split(), "--planners", "static", "--no-tuned", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["step_s"] == tuned["step_s"], "its settings can be typed"
    assert tuned["set"] in _text(runs, TUNE) and "incomplete" not in _text(runs, TUNE)
    assert "incomplete: 3 of" in _text(
        [one | ({"complete": False, "left": 3} if one["tuned"] else {}) for one in runs], TUNE
    )


@pytest.mark.long
def test_the_first_entry_of_a_planner_has_the_settings_of_the_config(capsys: Capture) -> None:
    """Readers of JSON that know one entry per planner take the first. Others have a label of their own."""
    swept = ["--sweep", "capacity=2K,4K", "--planners", "naive,adaptive"]
    assert run(["simulate", *SMALL, *swept, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    plain = simulated(capsys, *swept)
    for sweep in ("capacity=2K", "capacity=4K"):
        here = [one for one in runs if one["sweep"] == sweep]
        before = [one for one in plain if one["sweep"] == sweep]
        assert len({one["label"] for one in here}) == len(here)
        for name in ("static", "naive", "adaptive"):
            first, only = (next(one for one in each if one["planner"] == name) for each in (here, before))
            assert {key: first[key] for key in PROMISED} == {key: only[key] for key in PROMISED}
            assert first["label"] == name and not first["tuned"]


def test_a_faster_static_is_named_with_a_command_that_searches_more(capsys: Capture) -> None:
    runs = simulated(capsys, "--planners", "adaptive")
    static, adaptive = (one | {"speedup_tuned": None, "set": "capacity=4K", "complete": True} for one in runs)
    best = static | {"label": "static, tuned", "tuned": True, "step_s": adaptive["step_s"] / 2}
    assert TUNE in _text([static, best, adaptive], TUNE) and TUNE not in _text([static, adaptive], TUNE)
    found = of_simulation([static, best, adaptive], TUNE)
    assert "2.00 times" in found.figure and "static, tuned" in found.figure and TUNE in found.text
    assert TUNE not in of_simulation([static | {"step_s": 2 * adaptive["step_s"]}, adaptive], TUNE).text


def test_naive_and_balanced_have_a_row_without_equation_3(capsys: Capture) -> None:
    """Only where they offload by it, and where no sweep compares offload."""
    long = [*LLAMA7B_2M, "lengths=byted", "cluster.nodes=8", "lengths.max=256K", "batch_tokens=2M"]
    long += ["context=256K", "--no-tuned", "--planners", "naive,balanced"]
    labels = ["static", "naive", "naive, no eq. 3", "balanced", "balanced, no eq. 3"]
    assert run(["simulate", *long]) == 0
    printed = capsys.readouterr().out
    assert [line.split("  ")[0] for line in printed.splitlines()[4:9]] == labels and "no eq. 3: " in printed
    assert run(["simulate", *long, "--sweep", "offload.ratio=0,auto", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["label"], one["equation_3"]) for one in runs] == [
        ("static", False), ("naive", False), ("balanced", False),
        ("static", False), ("naive", True), ("balanced", True),
    ]  # fmt: skip


def test_a_simulation_is_a_function_of_the_config(capsys: Capture) -> None:
    assert simulated(capsys) == simulated(capsys)
    assert simulated(capsys, "run.seed=77") != simulated(capsys)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("static", ["static"]),
        ("adaptive", ["static", "adaptive"]),
        ("adaptive,static,naive", ["static", "adaptive", "naive"]),
        ("naive,naive", ["static", "naive"]),
    ],
)
def test_chosen_planners_stand_beside_static_each_once(asked: str, found: list[str], capsys: Capture) -> None:
    assert [one["label"] for one in simulated(capsys, "--planners", asked)] == found
    assert [one["label"] for one in simulated(capsys, "--sweep", f"planner={asked}")] == found


def test_steps_are_averaged(capsys: Capture) -> None:
    (mean,) = simulated(capsys, "run.seed=5", "--planners", "static", "--steps", "3")
    config = load([*SMALL, "run.seed=5"])
    single = [
        compare([lengths], {"static": Job(config).settings.by("static")})[0]["step_s"]
        for lengths in step_lengths(config, 3)
    ]
    assert mean["steps"] == 3
    assert mean["step_s"] == pytest.approx(sum(map(float, single)) / 3)


def test_a_sweep_is_every_combination(capsys: Capture) -> None:
    swept = ["--sweep", "cluster.ranks_per_node=4,8", "--sweep", "lengths=github,byted", "--planners", "adaptive"]
    runs = simulated(capsys, *swept)
    assert [(one["ranks"], one["lengths"], one["planner"]) for one in runs] == [
        (ranks, lengths, planner)
        for ranks in (4, 8)
        for lengths in ("github", "byted")
        for planner in ("static", "adaptive")
    ]
    assert {one["sweep"] for one in runs} == {
        f"cluster.ranks_per_node={ranks} lengths={lengths}" for ranks in (4, 8) for lengths in ("github", "byted")
    }
    assert [one["speedup"] for one in runs if one["planner"] == "static"] == [1] * 4, "each against its own baseline"
    alone = simulated(capsys, "cluster.ranks_per_node=8", "lengths=byted", "--planners", "adaptive")
    assert [{name: one[name] for name in one if name != "sweep"} for one in runs[-2:]] == alone


def test_more_ranks_are_faster(capsys: Capture) -> None:
    runs = simulated(capsys, "--sweep", "cluster.ranks_per_node=4,8,16", "--planners", "balanced", "batch_tokens=256K")
    times = [one["step_s"] for one in runs if one["label"] == "balanced"]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("mode", [["zero.stage=3"], ["parallel.pp=2"], ["parallel.tp=2"], ["recompute=layer"]])
def test_modes_and_degrees_that_cannot_be_trained_yet_can_be_simulated(mode: list[str], capsys: Capture) -> None:
    runs = simulated(capsys, "cluster.ranks_per_node=8", *mode)
    assert [one["label"] for one in runs] == PLANNERS
    assert {one["ranks"] for one in runs} == {4 if mode[0].startswith("parallel") else 8}
    for one in runs:
        assert one["compute_s"] + one["exposed_comm_s"] <= one["step_s"]


def test_people_get_a_table(capsys: Capture) -> None:
    assert run(["simulate", "--no-tuned", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ranks 4, context 8,192, lengths byted"
    assert lines[2] == "How fast is a step?"
    assert lines[3].split() == ["planner", "step_s", "tokens_per_s", "speedup"]
    assert [line.split()[0] for line in lines[4:8]] == PLANNERS
    assert lines[9] == "Where does its time go?"
    assert [line.split()[0] for line in lines[11:15]] == PLANNERS
    assert lines[16].startswith("speedup: step time of static with the settings of this config")


def test_a_sweep_has_a_column_that_tells_its_rows_apart(capsys: Capture) -> None:
    assert run(["simulate", "--no-tuned", *SMALL, "--sweep", "capacity=2K,4K", "--planners", "static"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[3:6]] == ["sweep", "capacity=2K", "capacity=4K"]


def test_what_a_sweep_changes_in_the_cluster_is_a_column(capsys: Capture) -> None:
    assert run(["simulate", "--no-tuned", *SMALL, "--sweep", "cluster.ranks_per_node=4,8", "--planners", "static"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "context 8,192, lengths byted"
    assert [line.split()[2] for line in lines[3:6]] == ["ranks", "4", "8"]


def test_a_sweep_of_offload_shows_what_it_gains_and_takes(capsys: Capture) -> None:
    """Each planner and each other point of the sweep against its own run at the first ratio."""
    long = [*LLAMA7B_2M, "lengths=byted", "cluster.nodes=8", "lengths.max=256K", "batch_tokens=2M"]
    swept = ["--sweep", "context=128K,256K", "--sweep", "offload.ratio=0,auto", "--planners", "adaptive"]
    assert run(["simulate", "--no-tuned", *long, *swept, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    for context in (131072, 262144):
        static, before, _, after = (one for one in runs if one["context"] == context)
        assert static["offload_gain"] == before["offload_gain"] == 1
        assert after["offload_gain"] == pytest.approx(before["step_s"] / after["step_s"]) and after["offload_gain"] >= 1
        assert (before["host_bytes"], after["host_node_bytes"]) == (0, 8 * after["host_bytes"])
    assert run(["simulate", "--no-tuned", *long, "context=256K", *swept[2:]]) == 0
    out = capsys.readouterr().out
    headers = [line.split()[2:] for line in out.splitlines() if line.startswith("planner ")]
    assert headers[0][-1] == "offload_gain" and headers[2] == ["host_bytes", "host_node_bytes"]
    assert "offload_gain: step time" in out and "host_bytes: peak" in out
    assert all("offload_gain" not in one for one in simulated(capsys))


def test_offload_of_the_papers_planners_is_explained_only_where_it_happens(capsys: Capture) -> None:
    runs = simulated(capsys)
    for planner, explained in (("naive", True), ("balanced", True), ("adaptive", False), ("nobody", False)):
        shown = _text([one | {"host_bytes": 2**30 if one["label"] == planner else 0} for one in runs], TUNE)
        assert ("equation 3" in shown) == explained


def test_errors_in_a_sweep_name_their_runs_and_the_others_are_shown(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "page.html"
    sweep = ["--sweep", "cluster.device_memory=1MiB,100GiB,2MiB", "--planners", "static", "--plot", str(path)]
    assert run(["simulate", "--no-tuned", *SMALL, *sweep]) == 10
    captured = capsys.readouterr()
    assert [line.split()[1] for line in captured.out.splitlines()[3:5]] == ["sweep", "cluster.device_memory=100GiB"]
    # Where numba has not compiled these functions before, a line says so.
    charts, *lines = [line for line in captured.err.splitlines() if not line.startswith("compiling")]
    assert charts == f"charts: {path}" and len(lines) == 2
    for line, value in zip(lines, ("1MiB", "2MiB"), strict=True):
        assert line.startswith("error: cluster.device_memory: ")
        assert f"(in the run with cluster.device_memory={value}); " in line
    assert run(["simulate", "--no-tuned", *SMALL, *sweep, "--json"]) == 10
    answer = json.loads(capsys.readouterr().out)
    assert [one["sweep"] for one in answer["runs"]] == ["cluster.device_memory=100GiB"] and not answer["ok"]
    assert [error["message"].split("=")[-1] for error in answer["errors"]] == ["1MiB)", "2MiB)"]


def test_a_sweep_of_which_nothing_runs_shows_no_table(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "page.html"
    sweep = ["--sweep", "cluster.device_memory=1MiB", "--plot", str(path)]
    assert run(["simulate", "--no-tuned", *SMALL, *sweep]) == 10
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 2 and not path.exists()


def test_offload_gains_nothing_over_a_run_that_failed() -> None:
    runs = [
        {"label": "static", "sweep": f"offload.ratio={ratio} context={context}", "step_s": seconds}
        for ratio, context, seconds in (("0", "4K", 3.0), ("1", "4K", 2.0), ("1", "8K", 2.0))
    ]
    _compare_offload(runs, ["0"])
    assert [one["offload_gain"] for one in runs] == [1, 1.5, None]
    assert output.number(runs[-1]["offload_gain"]) == "-"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--planners fastest", "--planners"),
        ("--sweep planner=static,fastest", "--planners"),
        ("--sweep contxt=2K,4K", "contxt"),
        ("--sweep context=2K,long", "context"),
        ("cluster.calibration=gone", "cluster.calibration"),
        ("--plot .", "--plot"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    words: str, key: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.simulator.compare.compare", lambda *_: pytest.fail("it ran"))
    assert run(["simulate", "--no-tuned", *SMALL, *words.split(), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["key"] == key


def test_a_calibration_of_another_cluster_is_refused(tmp_path: Path, capsys: Capture) -> None:
    from engine.cost.datasheets import nominal

    nominal("h100x8").write(tmp_path / "h100.json")
    assert run(["simulate", "--no-tuned", *SMALL, f"cluster.calibration={tmp_path / 'h100.json'}", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["key"] == "cluster.calibration"


def test_plot_writes_a_page_and_changes_no_number(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "simulation.html"
    plain = ["--sweep", "capacity=2K,4K", "--planners", "adaptive"]
    assert simulated(capsys, *plain, "--plot", str(path)) == simulated(capsys, *plain)
    page = path.read_text(encoding="utf-8")
    assert all(text in page for text in ("Speed-up", "Where the time goes", "Timeline: adaptive", "capacity=4K"))


def test_a_trace_has_a_process_for_each_planner(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "simulation.json"
    simulated(capsys, "--planners", "adaptive,naive", "--trace", str(path))
    events = checked(path.read_bytes())
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {1: "static", 2: "adaptive", 3: "naive"}
    assert {one["pid"] for one in events if one["ph"] == "X"} == {1, 2, 3}


def test_the_peers_of_planners_that_are_not_asked_for_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe's own planner, adaptive, may need four."""
    assert run(["simulate", "--no-tuned", *SMALL, "planner.max_peers=3", "--planners", "static", "--json"]) == 0
    assert [one["planner"] for one in json.loads(capsys.readouterr().out)["runs"]] == ["static"]
