"""A dry run plans as a run does, refuses what it refuses, and changes nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from engine.config.load import resolved_yaml
from engine.data.overview import Corpora
from engine.errors import BytescaleError, ConfigError, MemoryFitError
from engine.fit import host as host_memory
from engine.launch.run import train
from engine.weights import check
from tests.launch.starts import config, files, saved
from tests.refusals import refused


def test_a_dry_run_plans_three_steps_and_writes_nothing(tmp_path: Path) -> None:
    shown = train(config(tmp_path), dry_run=True)["dry_run"]
    assert [step["step"] for step in shown["steps"]] == [1, 2, 3]
    assert all(step["max_degree"] == 2 for step in shown["steps"])
    assert len(shown["commands"]) == shown["nodes"] == 1 and shown["ranks"] == 2
    assert "engine.launch.agents.agent" in shown["commands"][0]
    assert shown["program"].endswith(f" -m engine.trainer {tmp_path / 'run'}")
    assert shown["refused"] == []
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_larger_than_the_corpus_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = train(config(tmp_path, "batch_tokens=1M", "capacity=8K"), dry_run=True)["dry_run"]["warnings"]
    assert (found["code"], found["key"]) == ("small_corpus", "batch_tokens")
    assert f"warning: batch_tokens: {found['message']}" in capsys.readouterr().out


def test_a_dry_run_lists_what_a_run_refuses(tmp_path: Path) -> None:
    asked = config(tmp_path, "cluster.nodes=2", "parallel.tp=2")
    shown = train(asked, dry_run=True)["dry_run"]
    assert [problem["key"] for problem in shown["refused"]] == ["cluster.nodes=2"]
    assert shown["refused"][0]["message"] == "several nodes need a hostfile"
    assert len(shown["commands"]) == shown["nodes"] == 2
    with pytest.raises(ConfigError) as caught:
        train(asked)
    assert [problem.key for problem in caught.value.problems] == [problem["key"] for problem in shown["refused"]]
    assert not (tmp_path / "run").exists()


def test_a_dry_run_lists_a_full_host_as_a_run_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(tmp_path, "optimizer.on_host=true")
    assert train(asked, dry_run=True)["dry_run"]["refused"] == []
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    (listed,) = train(asked, dry_run=True)["dry_run"]["refused"]
    with refused(MemoryFitError) as problems:
        train(asked)
    assert listed == asdict(problems[0])
    (tmp_path / "hosts").write_text("alpha slots=2\n")
    elsewhere = config(tmp_path, "optimizer.on_host=true", f"cluster.hostfile={tmp_path / 'hosts'}")
    assert train(elsewhere, dry_run=True)["dry_run"]["refused"] == [], "its memory is not known here"


def test_a_dry_run_of_millions_of_devices_builds_only_the_first_commands(tmp_path: Path) -> None:
    wide = ["model.hidden=131072", *(f"model.{key}=65536" for key in ("heads", "kv_heads", "ffn"))]
    devices = ["cluster.nodes=16384", "cluster.ranks_per_node=64", "parallel.tp=65536", *wide]
    shown = train(config(tmp_path, *devices), dry_run=True)["dry_run"]
    assert (shown["ranks"], len(shown["commands"])) == (2**20, 2**14)


def test_a_dry_run_names_its_lengths_and_those_of_the_plan_command(tmp_path: Path) -> None:
    """Otherwise somebody compares steps of the two commands."""
    shown = train(config(tmp_path, "lengths=github", "planner=static"), dry_run=True)["dry_run"]
    assert (shown["planner"], shown["mode"], shown["plan_source"]) == ("static", "free", "lengths=github")
    assert (shown["source"], shown["outlook"]) == (f"data.path={tmp_path / 'data'}", "starting at step 1")
    known = Corpora(config(tmp_path)).overview
    assert known is not None and shown["documents"] == known.training


def test_the_outlook_names_the_weights_that_a_run_starts_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_weights", lambda folder, config: [])
    asked = config(tmp_path, "run.weights=hf")
    assert train(asked, dry_run=True)["dry_run"]["outlook"] == "starting at step 1 with the weights of hf"
    saved(tmp_path / "run" / "checkpoints", asked)
    assert "resuming from" in train(asked, dry_run=True)["dry_run"]["outlook"], "then they are not read"


def test_devices_are_distinguished_from_hdp_ranks(tmp_path: Path) -> None:
    wide = config(tmp_path, "cluster.ranks_per_node=8", "parallel.tp=2")
    shown = train(wide, dry_run=True)["dry_run"]
    assert [shown[name] for name in ("ranks", "hdp_ranks", "tp", "pp")] == [8, 4, 2, 1]


def test_a_dry_run_resumes_from_a_checkpoint_and_changes_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path)
    old, damaged = (saved(tmp_path / "run" / "checkpoints", settings, step) for step in (1, 2))
    (damaged / "a").write_text("flipped")
    before, said = files(tmp_path), list[str]()
    shown = train(settings, dry_run=True, say=said.append)["dry_run"]
    assert files(tmp_path) == before
    assert [step["step"] for step in shown["steps"]] == [2, 3, 4]
    assert (shown["steps_done"], shown["checkpoint"]) == (1, str(old))
    assert shown["outlook"] == f"resuming from {old} at step 2"
    assert shown["program"].endswith(str(old)) and said[0].endswith("using step-00000001 instead")
    (tmp_path / "run" / "resolved.yaml").write_text(resolved_yaml(settings))
    before = files(tmp_path)
    fresh = train(settings, dry_run=True, resume="never", say=said.append)["dry_run"]
    assert f"a run would rename the folder of the old run to {tmp_path / 'run.1'}" in said
    assert (fresh["steps"][0]["step"], fresh["checkpoint"]) == (1, None) and files(tmp_path) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_dry_run_refuses_what_a_run_refuses_and_neither_leaves_files(tmp_path: Path, dry_run: bool) -> None:
    config(tmp_path)
    other = str(saved(tmp_path / "saved", config(tmp_path, "run.seed=7")))
    (tmp_path / "file").touch()
    out, before = f"run.out={tmp_path / 'new' / 'run'}", files(tmp_path)
    refusals: list[tuple[list[str], str, int]] = [
        ([out, "data.path=/nowhere"], "auto", 4),
        ([out], str(tmp_path / "nowhere"), 5),
        ([out], other, 5),
        ([out, "cluster.device_memory=1MiB"], "auto", 10),
        ([f"run.out={tmp_path / 'file' / 'run'}"], "auto", 73),
    ]
    for overrides, resume, code in refusals:
        with pytest.raises(BytescaleError) as caught:
            train(config(tmp_path, *overrides), resume=resume, dry_run=dry_run, say=lambda line: None)
        assert (caught.value.code, files(tmp_path)) == (code, before)
