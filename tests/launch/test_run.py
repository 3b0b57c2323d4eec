from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import CheckpointError, ConfigError, DataError
from engine.launch.run import train


def config(tmp_path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    (tmp_path / "data").mkdir(exist_ok=True)
    for number in range(12):
        (tmp_path / "data" / f"{number}.py").write_text(f"print({number})\n" * 40)
    small = ["recipe=quickstart", f"data.path={tmp_path / 'data'}", f"run.out={tmp_path / 'run'}"]
    return load([*small, "context=256", "capacity=128", "batch_tokens=1K", *overrides])


def test_a_dry_run_plans_three_steps_and_writes_nothing(tmp_path: Path) -> None:
    shown = train(config(tmp_path), dry_run=True)["dry_run"]
    assert [step["step"] for step in shown["steps"]] == [1, 2, 3]
    assert all(step["max_degree"] == 2 for step in shown["steps"])
    assert len(shown["commands"]) == shown["ranks"] == 2
    assert "RANK=1" in shown["commands"][1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "launcher", "message"),
    [
        (["dtype=fp64"], None, "fp64 is for tests"),
        (["model.vocab=100"], None, "258 tokens"),
        (["cluster.nodes=2"], None, "several nodes need a hostfile"),
        ([], "hostfile", "there is no hostfile"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, overrides: list[str], launcher: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path, *overrides), launcher=launcher, dry_run=True)


def test_other_hosts_are_not_local(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("alpha slots=2\n")
    hosts = config(tmp_path, f"cluster.hostfile={tmp_path / 'hosts'}")
    assert "ssh" in train(hosts, dry_run=True)["dry_run"]["commands"][0]
    with pytest.raises(ConfigError, match="names other hosts"):
        train(hosts, launcher="local", dry_run=True)


def test_missing_data_and_missing_checkpoint_are_told_before_any_rank_starts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone|missing|no such|not exist"):
        train(config(tmp_path, f"data.path={tmp_path / 'gone'}"), say=lambda line: None)
    with pytest.raises(CheckpointError) as caught:
        train(config(tmp_path), resume=str(tmp_path / "nowhere"), say=lambda line: None)
    assert caught.value.code == 5


def test_changed_documents_are_told_on_resume(tmp_path: Path) -> None:
    from engine.data.index import build_index
    from engine.launch.prepare import index_documents
    from engine.trainer.checkpoint import TrainState, write
    from engine.trainer.folder import RunFolder

    settings, folder = config(tmp_path), RunFolder(tmp_path / "run")
    folder.root.mkdir()
    state = TrainState(1, 0, 1, 1, build_index(settings.data).fingerprint)
    checkpoint = write(tmp_path, state, 0, lambda f: None, lambda hashes: [hashes])
    index_documents(folder, settings, checkpoint)
    (tmp_path / "data" / "3.py").write_text("changed")
    with pytest.raises(DataError, match="documents changed"):
        index_documents(folder, settings, checkpoint)
