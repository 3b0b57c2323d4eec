"""`plan` needs no GPU and no torch, and its JSON has the keys that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run
from bytescale_cli.options import load_with_weights
from bytescale_cli.plan import _offload
from engine.config.load import load
from engine.job import Job
from engine.report.words import short_seconds
from tests.bytescale_cli.failures import failed
from tests.presets import LLAMA7B_2M, LLAMA7B_256K
from tests.report.events import checked
from tests.report.samples import texts
from tests.root import ROOT

PROMISED = {
    "ranks", "sequences", "tokens", "micro_batches", "max_degree", "max_peers", "planner", "planning_s", "makespan_s",
    "lower_bound_s", "balance", "ring_bytes", "verified",
}  # fmt: skip
SMALL = [
    "lengths=github",
    "lengths.max=8K",
    "batch_tokens=32K",
    "context=8K",
    "capacity=2K",
    "cluster.ranks_per_node=4",
]
TOYS = (
    "placeholder defaults: model=tiny (recipe=NAME; `bytescale recipes list`), "
    "nominal hardware rates (`bytescale profile-hardware`)\n"
)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("planner", ["static", "naive", "balanced"])
def test_json_has_the_promised_keys(planner: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = planned(capsys, *SMALL, f"planner={planner}")
    plan = answer["plan"]
    assert set(plan) >= PROMISED
    assert (plan["planner"], plan["ranks"], plan["verified"]) == (planner, 4, True)
    assert 0 < plan["tokens"] <= 32768
    assert 0 < plan["balance"] <= 1
    assert 0 < plan["lower_bound_s"] <= plan["makespan_s"]


def test_a_plan_is_a_function_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = planned(capsys, *SMALL)["plan"], planned(capsys, *SMALL)["plan"]
    assert first | {"planning_s": 0} == second | {"planning_s": 0}
    assert planned(capsys, *SMALL, "run.seed=7")["plan"]["sequences"] != first["sequences"]


MODEL = [*LLAMA7B_256K, "cluster.nodes=4"]


def test_documents_that_are_named_are_planned_whatever_the_recipes_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands say in their text whose lengths these are, and in one line that named lengths win."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "some words"}\n' * 20, encoding="utf-8")
    mine, said = [*MODEL, "data=jsonl", f"data.path={path}", "batch_tokens=100", "data.validation_share=0"], []
    for command in ("plan", "simulate --no-tuned --planners adaptive", "estimate-memory --plan 1", "profile-data"):
        assert run([*command.split(), *mine]) == 0
        shown = capsys.readouterr()
        assert f"data.path={path}" in shown.out, command
        assert "lengths" not in shown.err
        assert run([*command.split(), *mine, "lengths=github", "--json"]) == 0
        shown = capsys.readouterr()
        assert "lengths=github" in shown.out
        said.append([line for line in shown.err.splitlines() if line.startswith("lengths are")])
    which = f"lengths are those of lengths=github, not of the documents of data.path={path}"
    assert said == [[f"{which}; to use the documents, remove lengths=github"]] * len(said)
    answer = planned(capsys, *mine)
    assert answer["source"] == f"data.path={path}"
    assert (answer["plan"]["sequences"], answer["plan"]["tokens"]) == (9, 99)  # BOS and ten letters are the inputs
    assert planned(capsys, *MODEL)["source"] == "lengths=github"


def test_steps_differ(capsys: pytest.CaptureFixture[str]) -> None:
    steps = planned(capsys, *SMALL, "--steps", "3")["steps"]
    assert len({step["sequences"] for step in steps}) > 1


def test_lengths_of_the_recipes_own_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, size in enumerate((10, 3000, 0, 700)):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    own = ["data=folder", f"data.path={tmp_path}", "data.validation_share=0", "batch_tokens=1M"]
    assert planned(capsys, *own)["plan"]["sequences"] > 0


def test_people_get_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *SMALL]) == 0
    text = capsys.readouterr().out
    assert text.startswith("planner adaptive, 4 ranks x capacity 2,048 tokens")
    assert "makespan_s" in text
    assert "longest" in text


def test_mistakes_in_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing folder, an empty one, a file that is not UTF-8 and a line that is not JSON: each named, each code 4."""
    empty, latin, lines = tmp_path / "empty", tmp_path / "latin", tmp_path / "lines.jsonl"
    empty.mkdir()
    latin.mkdir()
    (latin / "a.txt").write_bytes(b"caf\xe9")
    lines.write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    mistakes = {
        tmp_path / "missing": f"{tmp_path / 'missing'}",
        empty: f"{empty}",
        latin: f"{latin / 'a.txt'}",
        lines: f"{lines}:2",
    }
    for path, place in mistakes.items():
        kind = "jsonl" if path == lines else "folder"
        failed(capsys, ["plan", "recipe=quickstart", f"data={kind}", f"data.path={path}"], 4, place)


def test_plot_writes_a_page_and_leaves_stdout_to_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    assert run(["plan", *SMALL, "--steps", "2", "--plot", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["plan"]["ranks"] == 4
    assert captured.err == f"charts: {path}\n{TOYS}"
    assert "Timeline of a step" in path.read_text(encoding="utf-8")


def test_an_svg_has_the_step_and_that_of_a_fixed_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert run(["plan", *SMALL, "--plot", str(path), "--json"]) == 0
    made, found = json.loads(capsys.readouterr().out)["plan"], texts(path.read_text(encoding="utf-8"))
    assert found[0].startswith("A simulated step on 4 ranks: adaptive is ") and found[0].endswith(
        "as fast as a mesh fixed at these settings"
    )
    assert [one.split(":")[0] for one in found if one.startswith(("static: ", "adaptive: "))] == ["static", "adaptive"]
    assert any(one.startswith("adaptive: ") and one.endswith(short_seconds(made["makespan_s"])) for one in found)
    assert run(["plan", *SMALL, "planner=static", "--plot", str(path)]) == 0
    assert texts(path.read_text(encoding="utf-8"))[0] == "A simulated step on 4 ranks"


def test_the_picture_of_the_docs_is_small_and_made_by_the_command_that_they_name() -> None:
    path = ROOT / "docs" / "plan.svg"
    text = path.read_text(encoding="utf-8")
    assert len(text) < 60_000 and texts(text)[0].startswith("A simulated step on 16 ranks: adaptive is ")
    assert "prefers-color-scheme: dark" in text
    assert "--plot docs/plan.svg\n" in path.with_name("planner.md").read_text(encoding="utf-8")


def test_a_trace_has_all_planned_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run(["plan", *SMALL, "--steps", "2", "--trace", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"timeline: {path} (ui.perfetto.dev opens it)\n{TOYS}"
    events = checked(path.read_bytes())
    assert [one["name"] for one in events if one.get("cat") == "step"] == ["step 1", "step 2"]
    assert {one["tid"] for one in events if one["ph"] == "X"} == {1, 2, 3, 4, 5}
    sizes = [step["micro_batches"] for step in json.loads(captured.out)["steps"]]
    assert len([one for one in events if one["ph"] == "X" and "gang" in one["args"]]) == sum(sizes)


def test_a_bad_place_for_the_page_is_told_before_anything_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.planner.make.plan_step", lambda *_: pytest.fail("it planned"))
    failed(capsys, ["plan", *SMALL, "--plot", str(tmp_path / "none" / "a.html")], 2, "--plot")
    failed(capsys, ["plan", *SMALL, "--trace", "a.html"], 2, "--trace")


LONG = [*LLAMA7B_2M, "lengths=byted", "cluster.nodes=8", "context=256K", "lengths.max=256K", "batch_tokens=2M"]


def test_what_offload_changed_stands_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, *LONG)["plan"]
    plain = planned(capsys, *LONG, "offload.ratio=0")["plan"]
    assert plain["without_offload"] is None and plain["host_bytes"] == plain["offloaded_share"] == 0
    assert plan["without_offload"].items() <= plain.items()
    assert plan["least_ranks"] < plain["least_ranks"] == 8
    assert 0 < plan["host_bytes"] <= 192 * 2**30 and 0 < plan["offloaded_share"] < 1
    assert run(["plan", *LONG]) == 0
    text = capsys.readouterr().out
    assert "offload in step 1: " in text and " of 1.5 TiB per node" in text
    assert f"fewest ranks for the longest sequence 8 -> {plan['least_ranks']}; ring members " in text


def test_offload_that_is_allowed_and_not_used_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *LONG, "planner=static"]) == 0
    assert "offload: allowed, but not used" in capsys.readouterr().out
    assert run(["plan", *LONG, "offload.ratio=0"]) == 0
    assert "offload: " not in capsys.readouterr().out


def test_the_lines_of_offload_are_of_all_steps() -> None:
    job = Job(load(LONG))
    none = {"micro_batches": 4, "offloaded_micro_batches": 0, "offloaded_share": 0.0, "host_bytes": 0}
    some, most = (
        none | {"offloaded_micro_batches": 1, "offloaded_share": share, "host_bytes": 2**30, "without_offload": None}
        for share in (0.1, 0.2)
    )
    assert _offload(job, [none]) == ["offload: allowed, but not used: it would not shorten the step"]
    assert _offload(job, [none, none])[0].endswith("it would not shorten any of the 2 steps")
    assert _offload(job, [none, some])[0].startswith("offload in step 2: 25.0% of the micro-batches, 10.0% of all")
    (line, without) = _offload(job, [some, none, most, some])
    assert line.startswith(
        "offload in step 3 (of 3 steps with offload, the one with the most): 25.0% of the micro-batches, 20.0%"
    )
    assert without == "without offload the step does not fit"


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["model=llama7b", "cluster=h100x8"], ["recipe=quickstart", "context=2K", "capacity=1K"]),
        (["cluster=h100x8", "context=4K"], ["recipe=quickstart", "capacity=1K"]),
        (["recipe=quickstart", "cluster=h100x8"], []),
        ([], []),
    ],
)
def test_values_of_a_recipe_that_is_not_named_are(
    typed: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    load_with_weights(typed)
    said = capsys.readouterr().err
    assert all(text in said for text in named) and bool(said) == bool(named)
    assert "context=2K" not in said or "context=4K" not in typed


def test_a_tokenizer_of_missing_weights_names_their_key_and_a_way_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    own = ["recipe=llama3-8b-64k-1node", f"data.path={tmp_path / 'a.txt'}"]
    assert run(["plan", *own, "--json"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["key"] == "run.weights=weights/llama3-8b"
    assert "lengths=github" in error["hint"]
    assert "hf download weights" not in error["hint"]
