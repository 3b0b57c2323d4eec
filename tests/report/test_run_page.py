from __future__ import annotations

import json
import math
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.load import load
from engine.files import LOCK, locked
from engine.report import run_page
from engine.report.run import read_run
from engine.run import launches
from engine.run.folder import RunFolder
from engine.run.launches import begin, end
from tests.report.runs import metrics, plan, write_run
from tests.run.records import operation, write


def test_the_head_says_what_the_run_was(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, lines=metrics(120), traced=plan(2)))
    head = dict(run_page.head(run))
    assert head["model"] == "tiny, 804,480 parameters"
    assert head["ranks"] == "2"
    assert head["planner"] == "adaptive"
    assert head["mode"].startswith("free: ")
    assert head["steps"] == "120 of 120"
    assert head["last training loss"] == f"{run.lines[-1]['loss']:.3f} nats per token"


@pytest.mark.parametrize(("traced", "ranks"), [(False, "1 HDP rank"), (True, "2 HDP ranks")])
def test_the_head_says_how_many_devices_a_rank_has(tmp_path: Path, traced: bool, ranks: str) -> None:
    run = read_run(write_run(tmp_path, lines=metrics(1), traced=plan(2) if traced else None))
    meshed = run.config.model_copy(update={"parallel": run.config.parallel.model_copy(update={"tp": 2})})
    head = dict(run_page.head(replace(run, config=meshed)))
    assert head["ranks"] == f"{ranks} of 2 devices (tp 2 x pp 1)"


@pytest.mark.parametrize(("loss", "verdict"), [(2.4, "below"), (2.432, "not below"), (3.0, "not below")])
def test_validation_is_judged_against_the_bigram_entropy(tmp_path: Path, loss: float, verdict: str) -> None:
    lines = [line | {"validation_loss": 9.0} for line in metrics(1)]
    lines += [line | {"step": 2, "validation_loss": loss} for line in metrics(1)]
    head = dict(run_page.head(read_run(write_run(tmp_path, lines=lines, traced=None))))
    expected = f"{loss:.3f} nats per token, {verdict} the corpus's bigram entropy of 2.432"
    assert head["last validation loss"] == expected


def test_without_a_bigram_entropy_there_is_no_verdict(tmp_path: Path) -> None:
    """Tokenizers other than bytes have none."""
    folder = write_run(tmp_path, lines=[line | {"validation_loss": 9.0} for line in metrics(1)], traced=None)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"bigram_nats": None}))
    run = read_run(folder)
    assert dict(run_page.head(run))["last validation loss"] == "9.000 nats per token"
    assert "bigram" not in run_page.run_page(run).html()


def test_the_table_sums_up_the_steps(tmp_path: Path) -> None:
    table = dict(run_page.table(read_run(write_run(tmp_path, lines=metrics(4), traced=None))))
    assert table["steps"] == "4"
    assert table["tokens"] == "64,010"
    assert table["steps with a ring of 2 or more ranks"] == "2 (50%)"
    assert table["largest ring"] == "2 ranks"
    assert table["wait for data"] == "0.02 s (0.2% of step time)"


def test_the_mixture_shows_what_each_source_had_and_should_have_had(tmp_path: Path) -> None:
    """After the last step; a source without a weight has none."""
    lines = metrics(2)
    lines[0]["mixture"] = {"web": {"tokens": 9, "wanted": 9.0}, "code": {"tokens": 1, "wanted": 1.0}}
    lines[1]["mixture"] = {
        "web": {"tokens": 74_000, "wanted": 75_000.0},
        "code": {"tokens": 26_000, "wanted": 25_000.0},
        "held": {"tokens": 0, "wanted": 0.0},
    }
    run = read_run(write_run(tmp_path, lines=lines, traced=None))
    found = run_page.mixture(run)
    assert found is not None and found.columns == ("source", "tokens", "wanted", "ahead", "share", "wanted share")
    assert found.rows == [
        ("web", "74,000", "75,000", "-1,000", "74.00%", "75.00%"),
        ("code", "26,000", "25,000", "+1,000", "26.00%", "25.00%"),
        ("held", "0", "0", "+0", "0.00%", "0.00%"),
    ]
    page = run_page.run_page(run)
    assert [table.title for table in page.tables][:2] == ["Key numbers of the run", "Mixture of the sources"]
    assert '<th scope="row">web</th><td>74,000</td><td>75,000</td><td>-1,000</td>' in page.html()


@pytest.mark.parametrize("lines", [[], metrics(3)])
def test_a_run_of_one_source_has_no_mixture(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    assert run_page.mixture(read_run(write_run(tmp_path, lines=lines, traced=None))) is None


def test_a_run_without_steps_has_no_table_and_says_so(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, lines=[], traced=None))
    assert run_page.table(run) == []
    head = dict(run_page.head(run))
    assert head["last training loss"] == "no step was completed"
    assert head["last validation loss"] == "validation never ran"
    assert head["ranks"] == "2"  # of the config: there is no plan


def test_a_loss_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    lines = metrics(4)
    lines[2]["loss"], lines[3]["loss"] = math.nan, math.inf
    run = read_run(write_run(tmp_path, lines=lines, traced=None))
    assert run_page.warning(run) == "The loss is not finite in 2 of 4 steps, first in step 3."
    assert dict(run_page.head(run))["last training loss"] == "not finite"
    assert run_page.warning(read_run(write_run(tmp_path, lines=metrics(4), traced=None))) is None


def test_the_page_says_what_was_run_where_and_with_what(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lines=metrics(3), traced=None)
    before = dict(run_page.about(read_run(folder)).rows)
    assert before == {
        "data": "data.path=stdlib-lines: 9 documents",
        "tokenizer": "bytes",
        "run folder": "runs/quickstart",
    }
    begin(folder / "launches.jsonl", 1, 2, [f"gpu-{n}" for n in range(10)])
    found = dict(run_page.about(read_run(folder)).rows)
    assert found["hosts"] == "gpu-0, gpu-1, gpu-2, gpu-3, gpu-4, gpu-5, gpu-6, gpu-7 and 2 more"
    assert found["command"].split()[0] == "bytescale"
    assert f"python {platform.python_version()}, " in found["versions"] and "torch " in found["versions"]
    assert found["system"] == platform.platform()


def test_the_page_says_where_the_config_differs_from_the_recipe(tmp_path: Path) -> None:
    sizes = ("cluster.device_memory=3159507456", "batch_tokens=48K")
    overrides = ("optimizer.lr=0.5", "run.out=elsewhere", *sizes)
    run = read_run(write_run(tmp_path, overrides=overrides, lines=[], traced=None))
    found = run_page.differing(run)
    memory, tokens = ("cluster.device_memory", "4.0 GiB", "2.9 GiB"), ("batch_tokens", "16K", "48K")
    assert sorted(found.rows) == [tokens, memory, ("optimizer.lr", "0.004", "0.5"), ("run.steps", "600", "120")]
    same = replace(run, config=load(["recipe=llama7b-2m"]))
    assert run_page.differing(same).note == "Nowhere: all values are those of the recipe llama7b-2m."
    own = replace(run, config=run.config.model_copy(update={"recipe": "mine"}))
    assert run_page.differing(own).note.startswith("mine is not a packaged recipe")


def test_the_page_names_the_operation_of_nccl_that_could_not_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lines=metrics(3), traced=None)
    begin(folder / "launches.jsonl", 1, 2, ["a"])
    assert run_page.nccl(read_run(folder)) is None
    for rank, last in ((0, 4), (1, 3)):
        write(RunFolder(folder), rank, {"0": [0, 1]}, operation("0", last, "all_reduce", 1, ended=last == 3))
    table = run_page.nccl(read_run(folder))
    assert table is not None and "rank 0 waits in all_reduce [[8]] for rank 1" in table.rows[0][1]
    assert table.rows[0][1] in run_page.run_page(read_run(folder)).html()


def test_the_page_has_all_starts_and_how_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, lines=metrics(3), traced=None)
    assert run_page.starts(read_run(folder)) is None
    times = iter((0.0, 4000.0, 90_000.0, 90_042.0, 100_000.0))
    monkeypatch.setattr(launches, "time", SimpleNamespace(time=lambda: next(times)))
    for step, outcome in ((1, "rank 1 failed: <b>"), (51, "")):
        begin(folder / "launches.jsonl", step, 2, ["a"])
        end(folder / "launches.jsonl", outcome)
    begin(folder / "launches.jsonl", 101, 4, ["a"])
    run = read_run(folder)
    table = run_page.starts(run)
    assert table is not None
    assert table.rows == [
        ("1", "1970-01-01 00:00:00 UTC", "1 h 7 min", "1", "2", "rank 1 failed: <b>"),
        ("2", "1970-01-02 01:00:00 UTC", "42 s", "51", "2", "all steps are done"),
        ("3", "1970-01-02 03:46:40 UTC", "-", "101", "4", "no end was recorded"),
    ]
    with locked(folder / LOCK):
        table = run_page.starts(read_run(folder))
    assert table is not None and table.rows[-1][-1] == "running"
    assert dict(run_page.head(run))["duration"] == "1 h 7 min"
    assert "rank 1 failed: &lt;b&gt;" in run_page.run_page(run).html()


def test_metrics_that_a_run_does_not_have_are_not_drawn(tmp_path: Path) -> None:
    lines = [line | {"peak_memory": 3 * 2**30, "grad_norm": 0.1 + 9.0 * (line["step"] == 1)} for line in metrics(20)]
    titles = [one.title for one in run_page.run_page(read_run(write_run(tmp_path, lines=lines, traced=None))).figures]
    assert titles[-5:] == ["Throughput", "Learning rate", "Gradient norm", "Memory", "Waits"]
    bare = [{"step": 1, "loss": 2.0, "tokens": 9, "max_degree": 1}]
    titles = [one.title for one in run_page.run_page(read_run(write_run(tmp_path, lines=bare, traced=None))).figures]
    assert titles == ["Loss", "Timeline of a step", "Throughput"]


def test_waits_and_loaders_by_source_over_steps(tmp_path: Path) -> None:
    cost = {"blocks": 1, "documents": 2, "bytes": 3, "tokens": 4, "seconds": 4.5, "memory": 5}
    lines = [line | {"packed": {"web": cost}} if line["step"] in (2, 3) else line for line in metrics(4)]
    lines[2]["packed"] = {"code": cost | {"seconds": 2.25}, "web": cost}
    folder = write_run(tmp_path, lines=lines, traced=None)
    waits, loaders = run_page.data_plane(read_run(folder))
    assert (waits.title, loaders.title) == ("Waits", "Loaders by source")
    assert "for plans: from 0.001 to 0.001; for data: from 0.004 to 0.004." in waits.wide
    # Seconds of loaders over those of a step, 2.25.
    assert "step 2: web 2, code 0" in loaders.wide and "step 3: web 2, code 1" in loaders.wide
    assert "step 4: web 0, code 0" in loaders.wide and "all" not in loaders.wide.partition("<path")[0]
    event = {"time": 1, "what": "scaled", "step": 3, "host": None, "before": 1, "after": 4, "source": "web"}
    (folder / "data").mkdir()
    (folder / "data" / "events-host-1.jsonl").write_text(json.dumps(event) + "\n")
    _, loaders = run_page.data_plane(read_run(folder))
    assert "step 2: all 1, web 2, code 0" in loaders.wide and "step 3: all 4, web 2, code 1" in loaders.wide


def test_the_headline_is_the_median_throughput_and_the_last_loss(tmp_path: Path) -> None:
    lines = [line | {"tokens_per_s": 1000.0 * line["step"]} for line in metrics(4)]
    found = run_page.run_page(read_run(write_run(tmp_path, lines=lines, traced=None))).headline
    assert found.figure == "3,000 tokens/s"
    assert found.text == f"median of steps 2 to 4; loss {lines[-1]['loss']:.3f} after step 4."
    lines = [line | {"mfu": 0.413, "unsplit": 0.8, "loss": None} for line in lines]
    found = run_page.run_page(read_run(write_run(tmp_path, lines=lines, traced=None))).headline
    assert "MFU 41.3%; 80% of the tokens in unsplit sequences; loss not finite" in found.text
    assert run_page.run_page(read_run(write_run(tmp_path, lines=[], traced=None))).headline.figure == "No step"
