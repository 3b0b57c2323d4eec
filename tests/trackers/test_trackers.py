"""What trackers write, read with their own libraries: all steps once, also those of a run that was resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from engine.config.load import load
from engine.config.schema import Run
from engine.errors import ConfigError
from engine.run.folder import RunFolder
from engine.run.metrics import append, cut_back
from engine.trackers.trackers import TRACKERS
from tests.trackers.records import records
from tests.trackers.samples import finish_steps, line, run_folder, track

Written = dict[str, list[tuple[int, float]]]  # the values of each metric by step
NAMES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # of packages

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # of libraries: their readers are not ours


@pytest.fixture(autouse=True)
def nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


def of_tensorboard(folder: RunFolder) -> tuple[Written, dict[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    found = EventAccumulator(str(folder.trackers / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    content = found.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    given = metadata.parse_session_start_info_plugin_data(content).hparams
    values = {key: getattr(value, str(value.WhichOneof("kind"))) for key, value in given.items()}
    scalars = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    return scalars, values


def of_wandb(folder: RunFolder) -> tuple[Written, dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    written, config, ids = Written(), dict[str, Any](), set[str]()
    for path in sorted((folder.trackers / "wandb").glob("offline-run-*/run-*.wandb")):
        for content in records(path):
            record = Record()
            record.ParseFromString(content)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            if record.HasField("history"):
                step = record.history.step.num
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if not name.startswith("_"):
                        written.setdefault(name, []).append((step, json.loads(item.value_json)))
    assert len(ids) == 1, "one run, continued"
    return written, config


def of_mlflow(folder: RunFolder) -> tuple[Written, dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.trackers / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("bytescale")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "try"
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(one.step, one.value) for one in found] for name, found in histories.items()}, run.data.params


READERS: dict[str, Callable[[RunFolder], tuple[Written, dict[str, Any]]]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
}


def test_the_schema_names_all_trackers() -> None:
    (names, _) = get_args(Run.model_fields["trackers"].annotation)
    assert set(get_args(names)) == set(TRACKERS) == set(READERS)


@pytest.mark.parametrize("name", READERS)
def test_all_steps_are_written_once(name: str, tmp_path: Path) -> None:
    """The run goes back to step 3 after step 5; the second process begins with what the first one has not written."""
    pytest.importorskip(name)
    folder = run_folder(tmp_path, steps=5)
    done = track(folder, name)
    assert done.returncode == 0, done.stderr
    assert [json.loads(text) for text in done.stdout.splitlines()] == [{"step": 0}, {"step": 5}]
    cut_back(folder.metrics, 3)
    for step in (4, 5):  # the same losses, other times
        append(folder.metrics, line(step) | {"tokens": 7})
    finish_steps(folder, 6, 8)
    done = track(folder, name)
    assert done.returncode == 0, done.stderr
    written, config = READERS[name](folder)
    assert written["loss"] == [(step, pytest.approx(4.0 / step)) for step in range(1, 9)]
    assert written["tokens"] == [(step, 1000 + step) for step in range(1, 9)]
    assert written["validation_losses/web"] == [(step, pytest.approx(8.0 / step)) for step in (2, 4, 6, 8)]
    assert not {"ended", "host_short", "step"} & set(written)
    assert float(config["optimizer.lr"]) == 0.25 and config["run.out"] == str(folder.root)
    assert set(config) >= {"recipe", "planner.name", "data.path"}


@pytest.mark.parametrize("name", READERS)
def test_an_unwritable_folder_is_the_reason(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    folder = run_folder(tmp_path, steps=2)
    folder.trackers.write_text("a file")
    done = track(folder, name)
    assert done.returncode == 1
    assert "FileExistsError" in json.loads(done.stdout.splitlines()[-1])["error"]


def test_trackers_are_a_list() -> None:
    assert load(["run.trackers=[tensorboard,wandb]"]).run.trackers == ("tensorboard", "wandb")
    assert load(["run.trackers=wandb"]).run.trackers == ("wandb",), "one needs no brackets"
    assert load([]).run.trackers == ()


@pytest.mark.parametrize(
    ("value", "message", "hint"),
    [
        ("[tensorbord]", "must be tensorboard, wandb or mlflow, not tensorbord", "did you mean tensorboard?"),
        ("comet", "must be tensorboard, wandb or mlflow, not comet", "for example run.trackers=tensorboard"),
        ("3", "must be a list, not 3", "for example run.trackers=[tensorboard,wandb]: "),
    ],
)
def test_what_is_no_list_of_trackers_is_refused(value: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load([f"run.trackers={value}"])
    (problem,) = refused.value.problems
    assert (problem.key, problem.message) == ("run.trackers", message) and str(problem.hint).startswith(hint)
