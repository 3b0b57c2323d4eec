from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.load import load, resolved_yaml
from engine.errors import ConfigError, RunFolderError
from engine.launch.prepare import check_owner, locked, set_aside
from engine.trainer.folder import RunFolder


def test_a_folder_of_another_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    check_owner(folder, load(["recipe=quickstart"]))
    folder.resolved.write_text(resolved_yaml(load(["recipe=quickstart", "optimizer.lr=0.5"])))
    check_owner(folder, load(["recipe=quickstart", "optimizer.lr=0.5", "run.out=another/name/of/the/folder"]))
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.5 -> 0\.25"):
        check_owner(folder, load(["recipe=quickstart", "optimizer.lr=0.25"]))


def test_a_run_in_use_is_locked_and_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    hold = (
        "import sys\nfrom pathlib import Path\nfrom engine.launch.prepare import locked\n"
        "from engine.trainer.folder import RunFolder\n"
        f"with locked(RunFolder(Path({str(tmp_path)!r}))):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(RunFolderError, match="another run is using this folder") as caught, locked(RunFolder(tmp_path)):
        pass
    assert caught.value.code == 73
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    with locked(RunFolder(tmp_path)):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RunFolderError, match="cannot write the run folder"),
        locked(RunFolder(tmp_path / "file" / "run")),
    ):
        pass


def test_an_old_run_is_set_aside_and_kept(tmp_path: Path) -> None:
    for expected in ("run.1", "run.2"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "resolved.yaml").write_text("x")
        assert set_aside(RunFolder(tmp_path / "run")) == tmp_path / expected
    assert (tmp_path / "run.1" / "resolved.yaml").read_text() == "x"
