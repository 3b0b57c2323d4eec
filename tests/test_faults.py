"""A run that is harmed at exact moments goes on by itself, and learns the same. `make soak` has all faults.

Two pipeline stages; `make soak` has eight ranks, with tensor parallelism. Slow tests of tests/test_crash.py have rings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.control.chaos import Fault
from engine.run.checkpoints import newest_first
from tests.faults import Launcher, command, documents, ledger, losses, train_unharmed

pytestmark = pytest.mark.world


def test_a_run_goes_on_by_itself_after_faults_at_exact_moments_and_keeps_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is killed before the first checkpoint and while it writes its part of the second, and a connection is cut.
    A checkpoint is lost before it is renamed.

    tests/launch/agents/test_ranks.py tests the report of a stopped rank, and `make soak` its restart. The run folder
    and the messages contain no secrets of the environment, whatever ranks and libraries log (docs/security.md).
    """
    data, out, whole = documents(tmp_path), tmp_path / "run", tmp_path / "whole"
    mesh = ["parallel.pp=2", "cluster.ranks_per_node=2", "capacity=256"]
    train_unharmed(whole, data, 12, *mesh)
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"s3cret-{name}")
    launcher = Launcher(command(out, data, 12, "run.restarts=4", *mesh), out)
    launcher.plant(1, Fault("kill-rank", at="transfer", step=2))
    launcher.plant(1, Fault("kill-rank", at="write", step=6))
    launcher.plant(1, Fault("cut-link", at="forward", step=8))
    launcher.plant(0, Fault("kill-rank", at="rename", step=9))
    ended = launcher.end()
    assert ended.code == 0, ended.said
    assert "report: " in ended.said and "report could not be written" not in ended.said, "of a mesh, after faults"
    causes = [line for line in ended.said.splitlines() if "; restart " in line]
    assert len(causes) == 4, ended.said
    assert "connection" in causes.pop(2) and all("SIGKILL" in cause for cause in causes)
    assert [cause[:7] for cause in causes] == ["rank 1 ", "rank 1 ", "rank 0 "]
    resumed = [line for line in ended.said.splitlines() if "resuming from" in line]
    assert "step-00000003" in resumed[0], "the checkpoint of step 6 lacked a part"
    assert all(len(list(folder.glob("zero/*"))) == 1 for folder in newest_first(out / "checkpoints")), "a file a node"
    assert losses(out) == losses(whole) and len(losses(whole)) == 12
    assert ledger(out) == ledger(whole)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {"resolved.yaml", "summary.json", "report.html", "rank-0.log"} <= {path.name for path in files}
    assert not [path for path in files if b"s3cret" in path.read_bytes()] and "s3cret" not in ended.said
