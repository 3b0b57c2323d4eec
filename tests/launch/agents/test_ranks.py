"""The launcher finds the first failing rank, passes signals on, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.control import reduction
from engine.errors import BytescaleError, PreflightError
from engine.launch.agents import launchers, nodes, ranks
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.ranks import InterruptedRunError, PreemptedError, RankError, run_ranks
from engine.launch.restarts import Restarts
from engine.run.folder import RunFolder
from tests.launch.agents.nodes import AGENT, WAITS, failure, node, real_rank, walks, work
from tests.refusals import refused
from tests.run.records import operation, write

pytestmark = pytest.mark.long

FAIL = """
import json, os, sys, time
time.sleep({delay})
cause = dict(code={code}, message="{message}", key=None, hint=None, time=time.time())
open({path!r}, "w").write(json.dumps(cause))
time.sleep({teardown})
sys.exit({code})
"""


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


def sends(*numbers: int) -> Callable[[], None]:
    """A tick that sends this process one signal per call; the launcher's handlers are installed by then."""
    left = list(numbers)
    return lambda: os.kill(os.getpid(), left.pop(0)) if left else None


def sends_when(path: Path, number: int) -> Callable[[], None]:
    """A tick that sends this process a signal once, as soon as there is a file."""
    left = [number]
    return lambda: os.kill(os.getpid(), left.pop()) if left and path.exists() else None


def run(folder: RunFolder, *programs: str, tick: Callable[[], None] = lambda: None) -> None:
    run_ranks([node(folder, *programs)], folder, tick, lambda line: None)


def children() -> list[psutil.Process]:
    """Running agents, ranks and stand-ins for ssh. Other tests in this process leave helpers of multiprocessing."""
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    helpers = ("multiprocessing", "confined")  # the latter runs chat templates
    return [p for p in found if not any(helper in word for word in p.cmdline() for helper in helpers)]


def test_all_ranks_succeed(folder: RunFolder) -> None:
    run(folder, "print('hello')", "pass")
    assert folder.log(0).read_text() == "hello\n"


def test_the_first_failure_is_reported_with_its_own_code(folder: RunFolder) -> None:
    late = fails(folder, 0, 0.6, 70, "connection reset")
    first = fails(folder, 1, 0.1, 4, "file gone")
    with failure(folder, 1, 4) as problems:
        run(folder, late, first)
    assert problems[0].message == "rank 1 failed: file gone"


def test_a_killed_rank_is_the_cause_and_the_others_are_ended(folder: RunFolder) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    complains = fails(folder, 1, 0.2, 70, "connection closed by peer")
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    with failure(folder, 0, 137):
        run(folder, killed, complains, hangs)
    time.sleep(0.2)
    assert not children()


def test_a_known_cause_precedes_the_deaths_that_follow_from_it(folder: RunFolder) -> None:
    """When a rank fails, NCCL may abort the others without a message, even before that rank has exited."""
    cause = fails(folder, 0, 0.1, 10, "out of memory", teardown=0.6)
    with failure(folder, 0, 10):
        run(folder, cause, "import os, time; time.sleep(0.4); os.abort()")


def test_a_refusal_of_a_host_by_its_ranks_alone_ends_the_run_without_a_restart(folder: RunFolder) -> None:
    """Such as that of a GPU without FP8: other hosts' ranks have joined groups with it, and lose their connections."""
    refusal = (
        "def work(stop, control):\n    raise HostError('linear_dtype=fp8 needs more than gpu-7 has', hint='same')\n"
    )
    refuses = real_rank(folder).replace(
        "raise SystemExit", f"from engine.errors import HostError\n{refusal}raise SystemExit"
    )
    waits = real_rank(folder).replace("while not stop():", "while True:")
    with refused(RankError, folder.log(1), code=3, hardware=False) as problems:
        try:
            run(folder, waits, refuses, fails(folder, 2, 0.1, 124, "lost its connection to another rank"))
        except RankError as error:
            Restarts(3, folder).after(error, 0)
    assert problems[0].message == "linear_dtype=fp8 needs more than gpu-7 has"
    assert not children()


def test_a_death_precedes_a_known_cause_that_follows_from_it(folder: RunFolder) -> None:
    with failure(folder, 1, 134):
        run(folder, fails(folder, 0, 0.6, 74, "cannot write"), "import os; os.abort()")


# What a process prints that NCCL's watchdog aborts, with the stack that follows.
WATCHDOG = """
import os, sys, time
time.sleep({delay})
print("terminate called after throwing an instance of 'c10::DistBackendError'", file=sys.stderr)
print("  what():  [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with exception: {why}")
print("Exception raised from checkForNCCLErrors at ProcessGroupNCCL.cpp:2136 (most recent call first):")
print("frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f in libc10.so)\\n" * 60)
sys.stdout.flush()
os.abort()
"""


@pytest.mark.parametrize(("code", "message"), [(70, "AcceleratorError: unspecified"), (124, "lost its connection")])
def test_an_abort_by_the_watchdog_of_nccl_is_a_consequence_even_of_what_is_seen_later(
    folder: RunFolder, code: int, message: str
) -> None:
    """The rank that failed first takes its time to say so, and the watchdog of its peer is quick."""
    aborted = WATCHDOG.format(delay=0.1, why="NCCL error: remote process exited or there was a network error")
    with failure(folder, 0, code):
        run(folder, fails(folder, 0, 0.5, code, message), aborted)


def test_an_abort_by_the_watchdog_of_nccl_alone_is_a_hang(folder: RunFolder) -> None:
    with failure(folder, 1, 124) as problems:
        run(folder, "pass", WATCHDOG.format(delay=0, why="Watchdog caught collective operation timeout"))
    assert "collective operation timeout" in problems[0].message


def test_an_error_of_cuda_that_the_watchdog_meets_first_is_the_cause(folder: RunFolder) -> None:
    aborted = WATCHDOG.format(delay=0.1, why="CUDA error: an illegal memory access was encountered")
    with failure(folder, 1, 134):
        run(folder, fails(folder, 0, 0.5, 70, "KeyError: x"), aborted)


def test_a_gpu_whose_failure_the_watchdog_meets_first_is_named(folder: RunFolder) -> None:
    aborted = WATCHDOG.format(delay=0.1, why="CUDA error: uncorrectable ECC error encountered")
    with failure(folder, 1, 3) as problems:
        run(folder, fails(folder, 0, 0.5, 124, "lost its connection"), aborted)
    assert problems[0].message.startswith("the GPU of rank 1 on localhost has failed: ")


def test_a_lost_connection_is_a_consequence_of_any_other_failure(folder: RunFolder) -> None:
    """Also of a bug that is seen later: the rank that has it takes its time to end."""
    lost = fails(folder, 0, 0.1, 124, "lost its connection to another rank: closed by peer")
    with failure(folder, 1, 70):
        run(folder, lost, fails(folder, 1, 0.5, 70, "KeyError: x"))
    with failure(folder, 0, 124):
        run(folder, lost, "pass")


def test_the_error_file_of_an_earlier_run_is_ignored(folder: RunFolder) -> None:
    folder.error(0).write_text('{"code": 4, "message": "old", "key": null, "hint": null, "time": 0}')
    with failure(folder, 0, 70):
        run(folder, "import sys; sys.exit(3)")


def test_a_rank_without_a_cause_is_reported_with_the_last_line_of_its_log(folder: RunFolder) -> None:
    folder.log(0).write_text("a line of an earlier run\n")
    with failure(folder, 0, 70) as problems:
        run(folder, "import sys; print('Traceback\\n  no such module\\n'); sys.exit(5)")
    assert problems[0].message == "rank 0 exited with code 5: no such module"


SSH_HINT = "check `ssh gpu-a`, which must work without a password; `bytescale doctor --hostfile FILE` checks every host"
PATHS_HINT = f"every host needs this folder, the run folder and {sys.executable} under the same paths"


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        (255, "ssh: Could not resolve hostname gpu-a", SSH_HINT),
        (127, "env: 'python': No such file or directory", PATHS_HINT),
        (1, "bash: line 1: cd: /work: No such file or directory", PATHS_HINT),
    ],
)
def test_a_host_on_which_no_agent_starts_is_a_failed_check(folder: RunFolder, code: int, said: str, hint: str) -> None:
    fails = f"import sys; print({said!r}, file=sys.stderr); sys.exit({code})"
    remote = node(folder, "pass", host="gpu-a", start=(sys.executable, "-c", fails))
    marks = f"open({str(folder.root / 'started')!r}, 'w')"
    with refused(PreflightError, folder.node_log(1)) as problems:
        run_ranks([node(folder, marks, first=1), remote], folder, lambda: None, lambda line: None)
    assert problems[0].message == f"gpu-a cannot run ranks: ssh ended with code {code}: {said}"
    assert problems[0].hint == hint
    assert not (folder.root / "started").exists(), "no rank starts before all hosts have answered"
    assert not children()


def test_all_hosts_that_cannot_be_used_are_named_at_once(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that answers late is none of them."""
    fails = (sys.executable, "-c", "raise SystemExit(255)")
    refuses = (sys.executable, "-c", "raise SystemExit('no such key')")
    late = (sys.executable, "-c", f"import os, sys, time; time.sleep(30); os.execv(sys.executable, {list(AGENT)})")
    monkeypatch.setattr(ranks, "_NAMED", 2)
    hosts = ["gpu-0", "me@gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5"]
    starts = [refuses if host == "gpu-2" else fails for host in hosts]
    nodes = [node(folder, "pass", host=hosts[n], first=n, start=starts[n]) for n in range(6)]
    with refused(PreflightError, *map(folder.node_log, range(3))) as problems:
        run_ranks([*nodes, node(folder, "pass", host="late", first=6, start=late)], folder, lambda: None, print)
    more = f"; the same on gpu-3, gpu-4 and 1 more, whose logs are in {folder.logs}"
    assert [one.message for one in problems] == [
        f"gpu-0 cannot run ranks: ssh ended with code 255{more}",
        "me@gpu-1 cannot run ranks: ssh ended with code 255",
        "gpu-2 cannot run ranks: ssh ended with code 1: no such key",
    ]


def test_a_host_that_never_answers_is_named(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers.Starts, "answer_s", 0.5)
    silent = node(folder, "pass", host="gpu-a", start=(sys.executable, "-c", "import time; time.sleep(60)"))
    with refused(PreflightError, folder.node_log(0)):
        run_ranks([silent], folder, lambda: None, print)
    assert not children()


def test_hosts_that_answer_one_after_the_other_are_waited_for(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python starts slowly where many hosts read it from one file system. The last answers 7 s after the start."""
    monkeypatch.setattr(launchers.Starts, "answer_s", 6.0)
    nodes = []
    for number, seconds in enumerate((0, 3.5, 7)):
        late = f"import os, sys, time; time.sleep({seconds}); os.execv(sys.executable, {list(AGENT)})"
        start = (sys.executable, "-c", late)
        nodes.append(node(folder, "print('works')", host=f"gpu-{number}", first=number, start=start))
    run_ranks(nodes, folder, lambda: None, print)
    assert folder.log(2).read_text() == "works\n"


def test_what_an_agent_said_at_an_earlier_start_is_kept_and_not_taken_for_its_last_words(folder: RunFolder) -> None:
    folder.node_log(0).write_text("connection reset\n")
    with refused(PreflightError, folder.node_log(0)) as problems:
        run_ranks([node(folder, "pass", start=(sys.executable, "-c", "raise SystemExit(1)"))], folder, print, print)
    assert problems[0].message.endswith(" ended with code 1")
    assert folder.node_log(0).read_text() == "connection reset\n"


def test_a_log_folder_that_is_gone_is_not_taken_for_a_missing_program(folder: RunFolder) -> None:
    folder.logs.rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        run(folder, "pass")
    assert caught.value.filename == str(folder.node_log(0))


def test_without_ssh_the_other_agents_are_ended(folder: RunFolder) -> None:
    remote = node(folder, "pass", host="gpu-a", first=1, start=("no-such-ssh", "gpu-a"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    with refused(PreflightError, None) as problems:
        run_ranks([node(folder, "pass"), remote], folder, lambda: None, print)
    assert problems[0].message == "gpu-a cannot be reached: no-such-ssh is not installed"
    assert not children() and len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_rank_that_cannot_be_started_is_a_failed_check(folder: RunFolder) -> None:
    """The other ranks of its node are started."""
    command = node(folder, "import time; time.sleep(60)", first=1)
    command = replace(command, work=replace(command.work, ranks=[(0, ["/no/such/python"]), *command.work.ranks]))
    with failure(folder, 0, 3) as problems:
        run_ranks([command], folder, lambda: None, print)
    assert problems[0].message.endswith(": /no/such/python: No such file or directory")
    assert problems[0].hint == PATHS_HINT and folder.log(1).exists()


def test_hosts_with_another_version_are_named_before_any_rank_starts(folder: RunFolder) -> None:
    """Of messages, with the same problem on two hosts; or a version before they had a number."""
    newer = "from engine.control import protocol\nprotocol.PROTOCOL = 99\n"
    newer += "protocol.Hello.__init__.__defaults__ = (99,)\nfrom engine.launch.agents import agent\nagent.main()"
    older = "import json, sys; print(json.dumps(dict(hello=True)), flush=True); sys.stdin.read()"
    others = [
        node(folder, "pass", host=f"gpu-{rank}", first=rank, start=(sys.executable, "-c", program))
        for rank, program in enumerate((newer, newer, older), start=1)
    ]
    with refused(PreflightError, folder.node_log(1), folder.node_log(3)) as problems:
        run_ranks([node(folder, "open('started', 'w')"), *others], folder, lambda: None, print)
    first, second = (one.message for one in problems)
    assert "gpu-1" in first and "gpu-2" in first and "gpu-3" in second and "`hello`" in second
    assert not folder.log(0).exists() and not children()


def test_a_host_that_is_lost_during_training_is_no_failed_check(folder: RunFolder) -> None:
    """The agent is killed behind a stand-in for ssh, which then ends as ssh does."""
    says = "print('closed by gpu-a', file=sys.stderr)"
    ends = f"import subprocess, sys; subprocess.call({list(AGENT)}); {says}; sys.exit(255)"
    kills = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
    remote = node(folder, kills, host="gpu-a", start=(sys.executable, "-c", ends))
    with failure(folder, 0, 124, "gpu-a") as problems:
        run_ranks([remote, node(folder, WAITS, first=1)], folder, lambda: None, print)
    assert problems[0].message == "gpu-a was lost: ssh ended with code 255: closed by gpu-a"


def wait_for_orphans(folder: RunFolder) -> None:
    """Wait for the ranks of a killed agent: the kernel has killed them too, and they may not have ended yet."""
    deadline = time.monotonic() + 10
    while still_run(folder):
        assert time.monotonic() < deadline


def still_run(folder: RunFolder) -> list[psutil.Process]:
    """Processes, whoever started them, with the folder among the variables of a rank's log file."""
    left = []
    for process in psutil.process_iter():
        try:
            opened = [file.path for file in process.open_files()]
            if process.status() == psutil.STATUS_ZOMBIE:  # it ended meanwhile
                continue
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(path.startswith(str(folder.logs)) for path in opened):
            left.append(process)
    return left


GATHERS = """
import os
from engine.control.control import Control
from engine.control.link import Link
control = Control(int(os.environ["RANK"]), Link.to_agent())
print(control.gather(control.rank), control.largest(control.rank), flush=True)
"""


def test_ranks_of_several_nodes_exchange_values_through_their_agents(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in a chain: each agent has one child, which starts when its parent listens."""
    monkeypatch.setattr(reduction, "FAN_OUT", 1)
    nodes = [node(folder, GATHERS, GATHERS, first=first) for first in (0, 2, 4)]
    run_ranks(nodes, folder, lambda: None, lambda line: None)
    assert [folder.log(rank).read_text() for rank in range(6)] == ["[0, 1, 2, 3, 4, 5] [5.0]\n"] * 6


@pytest.mark.parametrize(("target", "named"), [("rank", 3), ("agent", 2)])
def test_ranks_that_wait_for_one_that_is_gone_are_ended(folder: RunFolder, target: str, named: int) -> None:
    """Rank 3 never joins, and is killed, or its agent is, and then its node is the cause."""
    pid = {"rank": "os.getpid()", "agent": "os.getppid()"}[target]
    kills = f"import os, time; time.sleep(1); os.kill({pid}, 9); time.sleep(60)"
    nodes = [node(folder, GATHERS, GATHERS), node(folder, GATHERS, kills, first=2)]
    began, before = time.monotonic(), len(children())
    with failure(folder, named, 137) as problems:
        run_ranks(nodes, folder, lambda: None, lambda line: None)
    assert ("rank 3" in problems[0].message) == (target == "rank") and time.monotonic() - began < 30
    assert [folder.log(rank).read_text() for rank in range(3)] == [""] * 3
    assert len(children()) == before
    wait_for_orphans(folder)


def test_a_stopped_rank_is_named_with_its_place_within_seconds(folder: RunFolder) -> None:
    """It takes 3 to 5 s, and at most 10 s on a busy machine.

    The healthy rank waits for the stopped one in a collective, and must not be blamed.
    """
    stops = real_rank(folder).replace("    while", "    os.kill(os.getpid(), 19)\n    while")
    began = time.monotonic()
    with failure(folder, 1, 124) as problems:
        run(folder, real_rank(folder), stops)
    assert "stopped by a signal in step 3 (forward, pass 1)" in problems[0].message
    assert time.monotonic() - began < 10
    assert not children() and not still_run(folder)


def test_the_operation_of_nccl_that_waits_for_a_stopped_rank_is_named(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_RECORDS_S", 0.5)
    command = node(folder, real_rank(folder), real_rank(folder).replace("while", "os.kill(os.getpid(), 19)\n    while"))

    def tick() -> None:
        # Only the launcher takes the ranks for ranks on GPUs: their agent, which has started them, would look for GPUs.
        object.__setattr__(command.work, "gpus", True)
        write(folder, 0, {"0": [0, 1]}, operation("0", 7, "all_reduce", 1))

    with failure(folder, 1, 124) as problems:
        run_ranks([command], folder, tick, print)
    said = "rank 0 waits in all_reduce [[8]]; there is no record of rank 1"
    assert problems[0].message.endswith(f"; NCCL: collective 7 of the group of ranks 0, 1: {said}")


def test_a_rank_that_is_stopped_for_a_moment_is_left_alone(folder: RunFolder) -> None:
    moment = (
        "import subprocess, os, time; p = subprocess.Popen(['sh', '-c', 'sleep 1.5; kill -CONT '+str(os.getpid())]);"
    )
    run(folder, f"{moment} os.kill(os.getpid(), 19); p.wait(); time.sleep(3)")


def test_a_stopped_agent_is_noticed_and_its_ranks_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SILENCE_S", 2.0)
    monkeypatch.setattr(launchers, "_GRACE_S", 1.0)
    monkeypatch.setattr(ranks, "_GRACE_S", 1.0)
    stops = "import os, time; os.kill(os.getppid(), 19); time.sleep(60)"
    with failure(folder, 0, 124) as problems:
        run(folder, stops)
    assert problems[0].message == "localhost has not answered for 2 s"
    assert not children()
    wait_for_orphans(folder)  # the launcher has killed the agent


def test_a_rank_that_does_not_get_on_is_named_and_stacks_are_in_its_log(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.launch.agents.patience._LEAST_S", 2.0)
    record = "from tests.run.records import operation, write\nfrom engine.run.folder import RunFolder\n"
    record += f"import pathlib\nwrite(RunFolder(pathlib.Path({str(folder.root)!r})), RANK, {{'0': [0, 1]}}, LAST)\n"
    last = "operation('0', 7, 'all_reduce', 1)", "operation('0', 6, 'all_reduce', 1, ended=True)"
    begun = [record.replace("RANK", str(rank)).replace("LAST", last[rank]) for rank in (0, 1)]
    with failure(folder, 1, 124) as problems:  # test_patience.py has the first part of the message
        run(folder, begun[0] + walks(folder, 6), begun[1] + walks(folder, 5))
    assert "; NCCL: collective 7 of the group of ranks 0, 1: rank 0 waits in all_reduce" in problems[0].message
    for rank in (0, 1):
        assert "in work" in folder.log(rank).read_text(), "the stack of the function that the rank runs"
    assert not children()


def test_the_launcher_gets_the_paces_of_ranks(folder: RunFolder) -> None:
    noted = dict[int, float]()

    def stop() -> None:
        if len(noted) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    programs = [
        real_rank(folder).replace("    while", f"    progress.tell_pace({pace})\n    while") for pace in (1.25, 2.5)
    ]
    with pytest.raises(PreemptedError):
        run_ranks([node(folder, *programs)], folder, stop, print, paces=noted.__setitem__)
    assert noted == {0: 1.25, 1: 2.5}


def test_agents_hear_the_launcher_while_it_waits_for_storage_or_a_terminal(folder: RunFolder) -> None:
    """What it does between two looks, such as reading the metrics, may take longer than agents wait for it."""
    impatient = "from engine.launch.agents import agent\nagent.SILENCE_S = 1.5\nagent.main()"
    command = NodeCommand("localhost", (sys.executable, "-c", impatient), {}, work(folder, WAITS, alone=False))
    waits = [lambda: time.sleep(4), lambda: os.kill(os.getpid(), signal.SIGTERM)]
    with pytest.raises(PreemptedError):
        run_ranks([command], folder, lambda: waits.pop(0)() if waits else None, lambda line: None)


def launch(folder: RunFolder, program: str, before: str = "") -> psutil.Popen:
    """Start a launcher with one rank in a process of its own."""
    launcher = (
        "from pathlib import Path\nfrom engine.launch.agents import nodes, ranks\n"
        "from tests.launch.agents.nodes import node\n"
        f"from engine.run.folder import RunFolder\n{before}\nfolder = RunFolder(Path({str(folder.root)!r}))\n"
        f"ranks.run_ranks([node(folder, {program!r})], folder, lambda: None, print)"
    )
    return psutil.Popen([sys.executable, "-c", launcher])


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_launcher_that_is_stopped_goes_on_afterwards(folder: RunFolder) -> None:
    """Ctrl-Z: the ranks go on, and the time in which the launcher could hear nothing is no silence of theirs."""
    ticks = folder.root / "ticks"
    works = f"import time\nfor n in range(80):\n    open({str(ticks)!r}, 'a').write('.'); time.sleep(0.1)"
    process = launch(folder, works, before="nodes.SILENCE_S = 3")
    wait_for(ticks)
    process.suspend()
    before = ticks.stat().st_size
    time.sleep(5)
    assert ticks.stat().st_size > before + 10
    process.resume()
    assert process.wait(30) == 0


def test_a_request_that_comes_too_late_leaves_a_finished_run_a_success(folder: RunFolder) -> None:
    run(folder, "import time; time.sleep(0.3)", tick=sends(signal.SIGTERM))


def test_a_request_before_ranks_start_starts_none(folder: RunFolder) -> None:
    marks = f"open({str(folder.root / 'started')!r}, 'w')"
    asks = f"import os; os.kill({os.getpid()}, 15); os.execv({sys.executable!r}, {list(AGENT)})"
    for code in (130, 75):  # without and with a checkpoint
        with pytest.raises(PreemptedError) as caught:
            run_ranks([node(folder, marks, start=(sys.executable, "-c", asks))], folder, lambda: None, print)
        assert caught.value.code == code and not (folder.root / "started").exists()
        named = f"bytescale train --resume {folder.root}" in str(caught.value.problems[0].hint)
        assert named == (code == 75)
        (folder.checkpoints / "step-00000001").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(
    ("place", "code"), [("report('start')", 130), ("report('plan', step=7)", 130), ("report('data', step=7)", 75)]
)
def test_a_request_before_the_first_step_ends_the_run_at_once(folder: RunFolder, place: str, code: int) -> None:
    """A rank that still starts, or waits for its first plan, may never come to the end of a step."""
    waits = real_rank(folder).replace('report("forward", 1, step=3)', place)
    waits = waits if code == 75 else waits.replace("while not stop():", "while True:")
    with pytest.raises(PreemptedError) as caught:
        run(folder, waits, tick=sends_when(folder.root / "up", signal.SIGTERM))
    assert caught.value.code == code and (folder.root / "saved").exists() == (code == 75)


@pytest.mark.parametrize(("place", "after_step"), [("pass", False), ("progress.report('forward', 1, step=3)", True)])
def test_only_a_step_that_has_begun_is_awaited(folder: RunFolder, place: str, after_step: bool) -> None:
    said, ready = list[str](), sends_when(folder.root / "up", signal.SIGTERM)
    waits = real_rank(folder).replace('progress.report("forward", 1, step=3)', place)

    def tick() -> None:
        up = folder.root / "up"
        if up.exists() and (not after_step or time.time() > up.stat().st_mtime + 2.5):  # until agents say where it is
            ready()

    with pytest.raises(PreemptedError):
        run_ranks([node(folder, waits)], folder, tick, said.append)
    assert ["after this step" in line for line in said] == [after_step]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_the_ranks_to_stop_and_preemption_is_reported(folder: RunFolder, number: signal.Signals) -> None:
    with pytest.raises(PreemptedError) as caught:
        run(folder, WAITS, WAITS, tick=sends(number))
    assert caught.value.code == 75


def test_after_a_warning_the_end_is_no_reason_to_hurry(folder: RunFolder) -> None:
    """Slurm sends SIGUSR1 some time before SIGTERM, and perhaps again; by then the ranks may still be saving."""
    numbers = (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)
    with pytest.raises(PreemptedError):
        run(folder, real_rank(folder).replace("Path(", "time.sleep(1); Path(", 2), tick=sends(*numbers))
    assert (folder.root / "saved").exists()
    with pytest.raises(PreemptedError):
        run(folder, "import time; time.sleep(30)", tick=sends(signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM))


def test_a_warning_that_reaches_agents_and_ranks_too_lets_them_save(folder: RunFolder) -> None:
    """`srun --signal` sends it to every process of the job."""
    warned = list[bool]()

    def warns() -> None:
        if (folder.root / "up").exists() and not warned:  # a second one could reach a rank that is ending
            warned.append(True)
            for agent in psutil.Process().children():
                with suppress(psutil.Error):  # a process of another test that has ended
                    if "engine.launch.agents.agent" in agent.cmdline():
                        for process in (agent, *agent.children()):
                            process.send_signal(signal.SIGUSR1)

    with pytest.raises(PreemptedError):
        run(folder, real_rank(folder), tick=warns)
    assert (folder.root / "saved").exists()


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
        run_ranks([node(folder, WAITS)], folder, broken, broken)


def test_a_stop_reaches_a_rank_behind_ssh(folder: RunFolder) -> None:
    """A signal would end only the local ssh; ssh forwards its standard input."""
    ssh = f"import subprocess, sys; sys.exit(subprocess.call({list(AGENT)}, start_new_session=True))"
    remote = node(folder, real_rank(folder), host="gpu-a", start=(sys.executable, "-c", ssh))
    with pytest.raises(PreemptedError):
        run_ranks([remote], folder, sends(signal.SIGTERM), lambda line: None)
    assert (folder.root / "saved").exists()


# As ssh, it carries what the agent and the launcher say to each other, and its end is that of the connection.
SSH = f"""
import os, subprocess, sys, threading
agent = subprocess.Popen({list(AGENT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
def carry(source, target):
    while part := os.read(source, 65536):
        os.write(target, part)
    os.close(target)
threading.Thread(target=carry, args=(0, agent.stdin.fileno()), daemon=True).start()
carry(agent.stdout.fileno(), 1)
sys.exit(agent.wait())
"""


def test_a_signal_to_all_processes_of_a_job_does_not_end_ssh(folder: RunFolder) -> None:
    """Schedulers send it to the ssh beside the launcher, too; the ranks behind it must get their time to save."""
    remote = node(folder, real_rank(folder), host="gpu-a", start=(sys.executable, "-c", SSH))
    signalled = list[int]()

    def signal_all() -> None:
        if (folder.root / "up").exists() and not signalled:
            (process,) = (one for one in psutil.Process().children() if SSH in one.cmdline())
            signalled.append(process.pid)
            process.send_signal(signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(PreemptedError) as caught:
        run_ranks([remote], folder, signal_all, lambda line: None)
    assert caught.value.code == 75 and (folder.root / "saved").exists()


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
    with refused(InterruptedRunError, folder.root):  # 75 would tell a scheduler that a checkpoint was saved
        run(folder, deaf, deaf, tick=sends(signal.SIGINT, signal.SIGINT))
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    with refused(PreemptedError, folder.root):
        run(folder, deaf, deaf, tick=sends(signal.SIGINT, signal.SIGINT))


@pytest.mark.parametrize(("code", "kind"), [(70, InterruptedRunError), (74, RankError)])
def test_asked_twice_a_rank_that_saw_the_others_die_is_not_the_cause(
    folder: RunFolder, code: int, kind: type[BytescaleError]
) -> None:
    """A full disk is a cause at any time."""
    stop = sends(signal.SIGINT, signal.SIGINT)
    sees = fails(folder, 1, 0.1, code, "connection reset", teardown=30)
    with refused(kind):
        run(folder, "import time; time.sleep(30)", sees, tick=lambda: stop() if folder.error(1).exists() else None)


def test_a_full_disk_is_reported_even_if_the_rank_could_not_write_its_cause(folder: RunFolder) -> None:
    with failure(folder, 0, 74):
        run(folder, "import sys; sys.exit(74)")


def test_the_hint_names_the_step_from_which_a_run_resumes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert launchers.how_to_resume(folder) == "run the same command to start again; no checkpoint had been saved yet"
    for step in (7, 20):
        (folder.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    assert launchers.how_to_resume(folder) == (
        f"`bytescale train --resume {folder.root}` resumes; the last checkpoint is of step 20"
    )
