"""The launcher finds the first failing rank, passes signals on, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.errors import BytescaleError
from engine.launch.commands import RankCommand
from engine.launch.ranks import PreemptedError, RankError, run_ranks
from engine.run.folder import RunFolder

FAIL = """
import json, os, sys, time
time.sleep({delay})
cause = dict(code={code}, message="{message}", key=None, hint=None, time=time.time())
open({path!r}, "w").write(json.dumps(cause))
time.sleep({teardown})
sys.exit({code})
"""

WAITS = "import sys, time; sys.stdin.read(1); time.sleep(0.2); sys.exit(75)"

RANK = """
import os, time
from pathlib import Path
from engine.run.folder import RunFolder
from engine.trainer.rank import run_rank

def work(stop):
    Path({root!r}, "up").touch()
    while not stop():
        time.sleep(0.02)
    Path({root!r}, "saved").touch()
    return 75

os.environ["RANK"] = "0"
raise SystemExit(run_rank(RunFolder(Path({root!r})), work, saves={saves}))
"""


def real_rank(folder: RunFolder, saves: bool = True) -> str:
    """A program with the main function of a real rank, which works until it is asked to stop."""
    return RANK.format(root=str(folder.root), saves=saves)


@pytest.fixture(autouse=True)
def hang_up() -> Iterator[None]:
    """CI may run these tests under nohup, which ignores SIGHUP; here it must arrive."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def fails(folder: RunFolder, rank: int, delay: float, code: int, message: str, teardown: float = 0) -> str:
    """A program that writes its cause after `delay` seconds and ends `teardown` seconds later."""
    return FAIL.format(delay=delay, code=code, message=message, path=str(folder.error(rank)), teardown=teardown)


def commands(*programs: str) -> list[RankCommand]:
    return [RankCommand(r, "localhost", (sys.executable, "-c", p), {}) for r, p in enumerate(programs)]


def sends(*numbers: int) -> Callable[[], None]:
    """A tick that sends this process one signal per call; the launcher's handlers are installed by then."""
    left = list(numbers)
    return lambda: os.kill(os.getpid(), left.pop(0)) if left else None


def run(folder: RunFolder, *programs: str, tick: Callable[[], None] = lambda: None) -> None:
    run_ranks(commands(*programs), folder, tick, lambda line: None)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_all_ranks_succeed(folder: RunFolder) -> None:
    run(folder, "print('hello')", "pass")
    assert folder.log(0).read_text() == "hello\n"


def test_the_first_failure_is_reported_with_its_own_code(folder: RunFolder) -> None:
    late = fails(folder, 0, 0.6, 70, "connection reset")
    first = fails(folder, 1, 0.1, 4, "file gone")
    with pytest.raises(RankError, match="rank 1 failed: file gone") as caught:
        run(folder, late, first)
    assert caught.value.code == 4
    assert caught.value.problems[0].key == str(folder.log(1))


def test_a_killed_rank_is_the_cause_and_the_others_are_ended(folder: RunFolder) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    complains = fails(folder, 1, 0.2, 70, "connection closed by peer")
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    before = len(children())
    with pytest.raises(RankError, match="rank 0 was killed by SIGKILL") as caught:
        run(folder, killed, complains, hangs)
    assert caught.value.code == 137
    time.sleep(0.2)
    assert len(children()) == before


def test_a_known_cause_precedes_the_deaths_that_follow_from_it(folder: RunFolder) -> None:
    """When a rank fails, NCCL may abort the others without a message, even before that rank has exited."""
    cause = fails(folder, 0, 0.1, 10, "out of memory", teardown=0.6)
    with pytest.raises(RankError, match="rank 0 failed: out of memory") as caught:
        run(folder, cause, "import os, time; time.sleep(0.4); os.abort()")
    assert caught.value.code == 10


def test_a_death_precedes_a_known_cause_that_follows_from_it(folder: RunFolder) -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGABRT"):
        run(folder, fails(folder, 0, 0.6, 74, "cannot write"), "import os; os.abort()")


def test_the_error_file_of_an_earlier_run_is_ignored(folder: RunFolder) -> None:
    folder.error(0).write_text('{"code": 4, "message": "old", "key": null, "hint": null, "time": 0}')
    with pytest.raises(RankError, match="exited with code 3 without an error message"):
        run(folder, "import sys; sys.exit(3)")


def test_a_rank_without_a_cause_is_reported_with_the_last_line_of_its_log(folder: RunFolder) -> None:
    folder.log(0).write_text("a line of an earlier run\n")
    with pytest.raises(RankError, match=r"rank 0 exited with code 5: no such module$") as caught:
        run(folder, "import sys; print('Traceback\\n  no such module\\n'); sys.exit(5)")
    assert caught.value.code == 70


SSH_HINT = "check `ssh gpu-a`, which must work without a password"
PATHS_HINT = f"every host needs this folder, the run folder and {sys.executable} under the same paths"


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        (255, "ssh: Could not resolve hostname gpu-a", SSH_HINT),
        (127, "env: 'python': No such file or directory", PATHS_HINT),
        (1, "bash: line 1: cd: /work: No such file or directory", PATHS_HINT),
    ],
)
def test_a_host_on_which_no_rank_starts_is_a_failed_check(folder: RunFolder, code: int, said: str, hint: str) -> None:
    fails = f"import sys; print({said!r}); sys.exit({code})"
    remote = RankCommand(0, "gpu-a", (sys.executable, "-c", fails), {})
    waits = RankCommand(1, "localhost", (sys.executable, "-c", WAITS), {})
    with pytest.raises(RankError) as caught:
        run_ranks([remote, waits], folder, lambda: None, lambda line: None)
    (problem,) = caught.value.problems
    assert (caught.value.code, problem.key) == (3, str(folder.log(0)))
    assert problem.message == f"rank 0 on gpu-a exited with code {code}: {said}"
    assert problem.hint == hint
    metrics = f"open({str(folder.metrics)!r}, 'a').write('a step'); {fails}"
    with pytest.raises(RankError, match="gpu-a exited") as caught:
        run_ranks([RankCommand(0, "gpu-a", (sys.executable, "-c", metrics), {})], folder, lambda: None, print)
    assert caught.value.code == 70, "a host that is lost during training has passed the check"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_the_ranks_to_stop_and_preemption_is_reported(folder: RunFolder, number: signal.Signals) -> None:
    with pytest.raises(PreemptedError) as caught:
        run(folder, WAITS, WAITS, tick=sends(number))
    assert caught.value.code == 75


def test_under_nohup_a_hang_up_does_not_stop_a_run(folder: RunFolder) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(folder, "import time; time.sleep(0.2)", tick=sends(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_broken_pipe_does_not_end_a_run(folder: RunFolder) -> None:
    """Ctrl-C under `| tee` ends tee too; the ranks must still get their time to save."""
    stop = sends(signal.SIGINT)

    def broken(*words: str) -> None:
        stop()
        raise BrokenPipeError

    with pytest.raises(PreemptedError):
        run_ranks(commands(WAITS), folder, broken, broken)


def test_a_stop_reaches_a_rank_behind_ssh(folder: RunFolder) -> None:
    """A signal would end only the local ssh; ssh forwards its standard input."""
    there = f"[sys.executable, '-c', {real_rank(folder)!r}]"
    ssh = f"import subprocess, sys; sys.exit(subprocess.call({there}, start_new_session=True))"
    with pytest.raises(PreemptedError):
        run(folder, ssh, tick=sends(signal.SIGTERM))
    assert (folder.root / "saved").exists()


def test_a_stop_while_ranks_start_waits_for_them(folder: RunFolder) -> None:
    """A rank imports for seconds before it handles requests."""
    with pytest.raises(PreemptedError):
        run(folder, f"import time; time.sleep(0.5)\n{real_rank(folder)}", tick=sends(signal.SIGTERM))
    assert (folder.root / "saved").exists()


def test_a_rank_that_saves_nothing_ends_when_it_is_asked_to(folder: RunFolder) -> None:
    with pytest.raises(PreemptedError):
        run(folder, real_rank(folder, saves=False), tick=sends(signal.SIGTERM))
    assert not (folder.root / "saved").exists()


def test_asked_twice_the_ranks_are_killed_and_the_run_still_counts_as_stopped_on_request(folder: RunFolder) -> None:
    deaf = "import time; time.sleep(30)"
    with pytest.raises(PreemptedError, match="stopped on request") as caught:
        run(folder, deaf, deaf, tick=sends(signal.SIGINT, signal.SIGINT))
    assert "to start again" in (caught.value.problems[0].hint or "")
    assert caught.value.code == 130, "75 tells a scheduler that a checkpoint was saved"
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    with pytest.raises(PreemptedError, match="stopped on request") as caught:
        run(folder, deaf, deaf, tick=sends(signal.SIGINT, signal.SIGINT))
    assert caught.value.code == 75


@pytest.mark.parametrize(("code", "expected"), [(70, "stopped on request"), (74, "connection reset")])
def test_asked_twice_a_rank_that_saw_the_others_die_is_not_the_cause(
    folder: RunFolder, code: int, expected: str
) -> None:
    """A full disk is a cause at any time."""
    stop = sends(signal.SIGINT, signal.SIGINT)
    sees = fails(folder, 1, 0.1, code, "connection reset", teardown=30)
    with pytest.raises(BytescaleError, match=expected):
        run(folder, "import time; time.sleep(30)", sees, tick=lambda: stop() if folder.error(1).exists() else None)


def test_a_full_disk_is_reported_even_if_the_rank_could_not_write_its_cause(folder: RunFolder) -> None:
    with pytest.raises(RankError, match="disk is full") as caught:
        run(folder, "import sys; sys.exit(74)")
    assert caught.value.code == 74


def test_a_rank_ends_when_its_launcher_is_gone(tmp_path: Path, folder: RunFolder) -> None:
    """Orphans would keep computing on a cluster whose scheduler takes it for free."""
    launcher = (
        "import sys\nfrom pathlib import Path\nfrom engine.launch.commands import RankCommand\n"
        "from engine.launch.ranks import run_ranks\nfrom engine.run.folder import RunFolder\n"
        f"run_ranks([RankCommand(0, 'localhost', (sys.executable, '-c', {real_rank(folder)!r}), {{}})],"
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
