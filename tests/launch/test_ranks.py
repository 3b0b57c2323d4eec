"""The launcher finds the first failing rank, passes signals on, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from engine.launch.commands import RankCommand
from engine.launch.ranks import PreemptedError, RankError, run_ranks
from engine.trainer.folder import RunFolder

FAIL = """
import json, os, sys, time
time.sleep({delay})
cause = dict(code={code}, message="{message}", key=None, hint=None, time=time.time())
open({path!r}, "w").write(json.dumps(cause))
sys.exit({code})
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def run(folder: RunFolder, *programs: str) -> None:
    commands = [RankCommand(r, "localhost", (sys.executable, "-c", p), {}) for r, p in enumerate(programs)]
    run_ranks(commands, folder, lambda: None, lambda line: None)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_all_ranks_end_well(folder: RunFolder) -> None:
    run(folder, "print('hello')", "pass")
    assert folder.log(0).read_text() == "hello\n"


def test_the_first_failure_is_told_with_its_own_code(folder: RunFolder) -> None:
    late = FAIL.format(delay=0.6, code=70, message="connection reset", path=str(folder.error(0)))
    first = FAIL.format(delay=0.1, code=4, message="file gone", path=str(folder.error(1)))
    with pytest.raises(RankError, match="rank 1 failed: file gone") as caught:
        run(folder, late, first)
    assert caught.value.code == 4
    assert caught.value.problems[0].key == str(folder.log(1))


def test_a_killed_rank_is_the_cause_and_the_others_do_not_survive_it(folder: RunFolder) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    complains = FAIL.format(delay=0.2, code=70, message="connection closed by peer", path=str(folder.error(1)))
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    before = len(children())
    with pytest.raises(RankError, match="rank 0 was killed by SIGKILL") as caught:
        run(folder, killed, complains, hangs)
    assert caught.value.code == 137
    time.sleep(0.2)
    assert len(children()) == before


def test_an_old_error_is_not_taken_for_a_new_one(folder: RunFolder) -> None:
    folder.error(0).write_text('{"code": 4, "message": "old", "key": null, "hint": null, "time": 0}')
    with pytest.raises(RankError, match="ended with exit code 3 and gave no reason"):
        run(folder, "import sys; sys.exit(3)")


def test_a_signal_reaches_the_ranks_once_and_preemption_is_told(folder: RunFolder) -> None:
    waits = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); time.sleep(30)"
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(PreemptedError) as caught:
        run(folder, waits, waits)
    assert caught.value.code == 75


def test_asked_twice_the_ranks_are_killed_and_it_is_still_a_stop_that_was_asked_for(folder: RunFolder) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(30)"
    for delay in (1.0, 1.5):
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(PreemptedError, match="stopped as asked") as caught:
        run(folder, deaf, deaf)
    assert "starts again" in (caught.value.problems[0].hint or "")


def test_a_rank_that_could_not_write_its_reason_still_tells_a_full_disk(folder: RunFolder) -> None:
    with pytest.raises(RankError, match="disk is full") as caught:
        run(folder, "import sys; sys.exit(74)")
    assert caught.value.code == 74


def test_a_rank_ends_when_its_launcher_is_gone(tmp_path: Path, folder: RunFolder) -> None:
    """Orphans would go on computing on a cluster that thinks it is free."""
    from engine.trainer.rank import _end_with_launcher  # noqa: F401  (the program below imports it)

    rank = (
        "import threading, time\nfrom engine.trainer.rank import _end_with_launcher\n"
        "threading.Thread(target=_end_with_launcher, daemon=True).start()\n"
        f"open({str(tmp_path / 'up')!r}, 'w').close()\ntime.sleep(60)"
    )
    launcher = (
        "import sys\nfrom pathlib import Path\nfrom engine.launch.commands import RankCommand\n"
        "from engine.launch.ranks import run_ranks\nfrom engine.trainer.folder import RunFolder\n"
        f"run_ranks([RankCommand(0, 'localhost', (sys.executable, '-c', {rank!r}), {{}})],"
        f" RunFolder(Path({str(tmp_path)!r})), lambda: None, print)"
    )
    process = psutil.Popen([sys.executable, "-c", launcher])
    deadline = time.monotonic() + 30
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    orphans = process.children(recursive=True)
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(orphans, timeout=10)
    assert gone and not alive
