"""`train` passes a checked config to the launcher and prints the result."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.config.resolved import diff, resolved_yaml
from engine.config.schema import Config
from engine.errors import BytescaleError, ExitCode
from engine.launch.schedulers import join
from engine.run.folder import RunFolder
from tests.run.damage import state, write_all

Calls = list[dict[str, Any]]
Say = Callable[[str], None]
OnStep = Callable[[dict[str, Any]], None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """A stand-in for the launcher that records its calls."""
    monkeypatch.chdir(tmp_path)  # where `train` makes run folders
    noted: Calls = []

    def train(config: Config, *, say: Say, on_step: OnStep, **options: object) -> dict[str, Any]:
        noted.append({"config": config, **options})
        if options["dry_run"]:
            ranks = config.cluster.nodes * config.cluster.ranks_per_node
            commands = ["python -m x"] * min(config.cluster.nodes, 40)
            lacks = [{"key": "zero.stage", "message": "not yet", "hint": "set 1"}] if config.zero.stage > 1 else []
            left = config.run.steps > 1
            return {
                "dry_run": {
                    "ranks": ranks,
                    "nodes": config.cluster.nodes,
                    "program": "python -m y" if left else None,
                    "hdp_ranks": config.cluster.ranks_per_node // config.parallel.tp,
                    "tp": config.parallel.tp,
                    "pp": 1,
                    "out": config.run.out,
                    "source": "data.path=stdlib",
                    "plan_source": "data.path=stdlib" if config.lengths.name == "data" else "lengths=github",
                    "documents": 1500,
                    "planner": "static",
                    "mode": "free",
                    "outlook": "starting at step 1" if left else "nothing left to train",
                    "steps": [{"step": 1, "tokens": 16384, "balance": 0.5}] if left else [],
                    "commands": commands if left else [],
                    "refused": lacks,
                }
            }
        say("starting")
        on_step({"step": 1, "loss": 3.0, "tokens_per_s": 1e4, "balance": 1.0, "max_degree": 2, "validation_loss": 2.5})
        return {"train": {"out": config.run.out}}

    fake = types.ModuleType("engine.launch.run")
    fake.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine.launch.run", fake)
    return noted


def test_defaults(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "recipe=quickstart"]) == 0
    assert calls == [
        {"config": load([]), "resume": "auto", "launcher": None, "dry_run": False, "joins": None, "note": None}
    ]
    captured = capsys.readouterr()
    assert captured.out == "runs/quickstart\n"
    assert captured.err.splitlines() == [
        "starting",
        "step 1/600  loss 3.000  10,000 tokens/s  plan balance 1.00  largest ring 2  validation loss 2.500",
    ]


def test_flags_are_aliases_of_keys(calls: Calls) -> None:
    assert run(["train", "context=4K", "--nproc", "4", "--out", "runs/a b"]) == 0
    assert run(["train", "--hostfile", "hosts"]) == 0
    same = [["context=4K", "cluster.ranks_per_node=4", "run.out=runs/a b"], ["cluster.hostfile=hosts"]]
    assert [call["config"] for call in calls] == [load(one) for one in same]


def test_each_run_gets_a_folder_of_its_own(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else an experiment would go on with the checkpoint of the one before, or be refused."""
    command = ["train", "recipe=quickstart"]
    assert run(command) == run(command) == 0
    assert not [*(tmp_path / "runs").iterdir()], "folders to which nothing was written are removed"
    for name in ("quickstart", "quickstart-2"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "resolved.yaml").write_text("")
    capsys.readouterr()
    assert run(command) == run([*command, "--dry-run"]) == 0
    for call in calls[-2:]:  # the launcher says it, if it does not refuse the run
        assert "runs/quickstart-3" in call["note"] and "--resume runs/quickstart" in call["note"]
    assert "quickstart-3" not in capsys.readouterr().err
    assert run([*command, "run.out=runs/quickstart"]) == run([*command, "--out", "runs/other"]) == 0
    folders = ["quickstart", "quickstart", "quickstart-3", "quickstart-3", "quickstart", "other"]
    assert [call["config"].run.out for call in calls] == [f"runs/{name}" for name in folders]
    assert {call["resume"] for call in calls} == {"auto"}


def test_a_recipe_that_names_its_run_folder_keeps_it(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: quickstart\nrun: {out: here}\n")
    (tmp_path / "here").mkdir()
    assert run(["train", "--config", "mine.yaml"]) == 0
    assert calls[0]["config"].run.out == "here"


def test_a_job_that_is_queued_again_finds_its_folder(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps the format of its documents, whatever is at data.path by now."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    Path("runs/quickstart").mkdir(parents=True)
    assert run(["train", "recipe=quickstart"]) == 0
    assert calls[0]["config"].run.out == "runs/quickstart"
    Path("documents").mkdir()
    Path("documents/a.txt").write_text("a text")
    command = ["train", "recipe=quickstart", "data.path=documents"]
    config = load([*command[1:], "data=folder", "data.pattern=**/*.txt"])
    Path("runs/quickstart/resolved.yaml").write_text(resolved_yaml(config))
    Path("documents/a.jsonl").write_text('{"text": "a"}\n')
    assert run(command) == 0
    assert calls[1]["config"].data == config.data


def test_resume_names_a_run_to_continue(calls: Calls, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    config = load(["recipe=1b-64k-1node", "context=32K", "data=folder", "data.path=texts", f"run.out={folder}"])
    (folder / "resolved.yaml").write_text(resolved_yaml(config))
    assert run(["train", "--resume", "runs/mine"]) == run(["train", "run.steps=7", "--resume", str(folder)]) == 0
    same = config.run.model_copy(update={"out": "runs/mine"})
    longer = config.run.model_copy(update={"steps": 7})
    assert [call["config"] for call in calls] == [config.model_copy(update={"run": one}) for one in (same, longer)]
    assert {call["resume"] for call in calls} == {"auto"}
    assert run(["train", "recipe=quickstart", "--resume", "runs/mine", "--out", "runs/branch"]) == 0
    assert (calls[-1]["config"].recipe, calls[-1]["resume"]) == ("quickstart", "runs/mine")


@pytest.mark.parametrize("place", ["runs/mine", "runs/mine/checkpoints/step-00000002", "checkpoints/step-00000002"])
def test_a_new_run_from_a_checkpoint_has_the_config_of_its_run(
    place: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(Path("runs/mine").absolute())
    config = load(["recipe=1b-64k-1node", "context=32K", "data=folder", "data.path=texts", f"run.out={folder.root}"])
    write_all(folder.checkpoints, state(2))
    folder.resolved.write_text(resolved_yaml(config))
    if place.startswith("checkpoints"):
        monkeypatch.chdir(folder.root)
    command = ["train", "--resume", place, "optimizer.lr=2e-5"]
    assert run([*command, "--out", "branch"]) == 0
    assert calls[0]["resume"] == place
    assert diff(config, calls[0]["config"]) == [
        f"run.out: {folder.root} -> branch",
        f"optimizer.lr: {config.optimizer.lr} -> 2e-05",
    ]
    assert "resolved.yaml" in capsys.readouterr().err
    assert run([*command, "--out", "branch", "recipe=quickstart"]) == 0
    assert calls[1]["config"] == load(["recipe=quickstart", "optimizer.lr=2e-5", "run.out=branch"])
    assert "resolved.yaml" not in capsys.readouterr().err


def test_a_checkpoint_without_the_config_of_its_run_needs_a_recipe(calls: Calls) -> None:
    for folder in ("copies", "runs/mine/checkpoints"):
        write_all(Path(folder), state(2))
    places = ["copies/step-00000002", "runs/mine", "runs/mine/checkpoints/step-00000002", "s3://bucket/run"]
    for place in places:
        command = ["train", "--resume", place, "--out", "branch"]
        assert run(command) == ExitCode.USAGE and not calls
    for place in places:
        assert run(["train", "recipe=quickstart", "--resume", place, "--out", "branch"]) == 0
    assert [call["resume"] for call in calls] == places


def test_other_flags_are_passed_on(calls: Calls) -> None:
    assert run(["train", "--dry-run", "--resume", "never", "--launcher", "local"]) == 0
    assert (calls[0]["dry_run"], calls[0]["resume"], calls[0]["launcher"]) == (True, "never", "local")


def test_json(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "recipe=quickstart", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "ok": True, "train": {"out": "runs/quickstart"}}


def test_a_dry_run_prints_plans_and_commands(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "planner static, 2 ranks, free mode; 1,500 documents from data.path=stdlib",
        "runs/quickstart: starting at step 1",
    ]
    assert lines[2].split() == ["step", "tokens", "balance"]
    assert lines[3].split() == ["1", "16,384", "0.500"]
    assert lines[4:] == ["python -m x", "and on each node for each rank: python -m y"]


def test_a_dry_run_says_how_many_devices_a_rank_has(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--dry-run", "--nproc", "8", "parallel.tp=2"]) == 0
    assert "static, 4 HDP ranks of 2 devices (tp 2 x pp 1), free mode" in capsys.readouterr().out.splitlines()[0]


def test_a_dry_run_says_that_the_plan_command_reads_other_lengths(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "--dry-run", "lengths=github"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("data.path=stdlib (`bytescale plan` reads lengths=github)")


def test_a_dry_run_of_a_finished_run_has_no_table(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--dry-run", "run.steps=1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["runs/quickstart: nothing left to train"]


def test_a_dry_run_says_what_training_would_refuse(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    """A large recipe can be inspected anywhere: what is refused, its plan, its first commands."""
    many = ["train", "--dry-run", "cluster.nodes=32"]
    assert run([*many, "zero.stage=3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2:4] == ["problems that would stop a run without --dry-run:", "  zero.stage: not yet; set 1"]
    assert said[6:] == [
        "python -m x",
        "python -m x",
        "and 30 more like these (--json lists all)",
        "and on each node for each rank: python -m y",
    ]
    assert run([*many, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["dry_run"]["commands"]) == 32
    assert run(["train", "--dry-run", "cluster.nodes=50"]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == "and 48 more like these (--json lists 40)"


def test_nothing_is_launched_when_the_config_is_wrong(calls: Calls) -> None:
    for words in ([], ["run.steps=0"], ["--nproc", "0"], ["run.out=a", "--out", "b"]):
        assert run(["train", *words]) == 2
    assert calls == []


def test_the_command_exits_with_the_code_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class RankError(BytescaleError):
        code = ExitCode.HANG

    def train(*args: object, **kwargs: object) -> dict[str, object]:
        raise RankError("rank 1: no message for 60 s", key="rank 1", hint="logs: runs/a/logs")

    fake = types.ModuleType("engine.launch.run")
    fake.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine.launch.run", fake)
    assert run(["train", "recipe=quickstart", f"run.out={tmp_path}"]) == 124
    assert len(capsys.readouterr().err.splitlines()) == 2


RANKS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def started_by_others(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Let this process be one of four on two nodes."""
    for name, value in {**RANKS, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)


def test_the_first_process_that_somebody_else_has_started_is_the_launcher(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_by_others(monkeypatch, 0)
    assert run(["train", "--dry-run"]) == 0
    (call,) = calls
    assert (call["config"].cluster.nodes, call["config"].cluster.ranks_per_node) == (2, 2)
    assert call["joins"].joined.nodes == 2
    assert run(["train", "--dry-run", "--launcher", "local"]) == 0
    assert calls[1]["joins"] is None and calls[1]["config"].cluster.nodes == 1


@pytest.mark.parametrize("code", [0, 75, 130])
def test_the_other_processes_take_part_and_print_nothing(
    calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    started_by_others(monkeypatch, 2)
    asked = list[object]()
    monkeypatch.setattr(join, "take_part", lambda place, folder: asked.append((place.node, folder.root)) or code)
    with pytest.raises(SystemExit) as ended:
        run(["train", "--json", "--out", str(tmp_path / "run")])
    assert ended.value.code == code
    assert asked == [(1, tmp_path / "run")] and not calls
    assert capsys.readouterr() == ("", "")


def test_a_mistake_is_reported_by_the_first_process_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started_by_others(monkeypatch, 0)
    assert run(["train", "--nproc", "3", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["key"] == "--nproc 3"
    started_by_others(monkeypatch, 3)
    with pytest.raises(SystemExit) as ended:
        run(["train", "--nproc", "3"])
    assert ended.value.code == 2 and capsys.readouterr() == ("", "")
