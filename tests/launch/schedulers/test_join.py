"""Processes that somebody else has started find each other, train as one launch, and all end with one exit code."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from engine.control.link import Link
from engine.control.protocol import End, Join, Start, message_of
from engine.control.sockets import Listener, connect
from engine.errors import ConfigError, ExitCode, PreflightError
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.ranks import PreemptedError, RankError, run_ranks
from engine.launch.schedulers import join
from engine.launch.schedulers.join import Joins, _Followers, _meeting, _user_of, take_part
from engine.launch.schedulers.joined import Joined
from engine.run.folder import RunFolder
from tests.launch.agents.nodes import failure, node, real_rank, work
from tests.refusals import refused

pytestmark = pytest.mark.long

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
OTHER = """
import sys
from pathlib import Path
from engine.launch.schedulers import join
from engine.launch.schedulers.joined import Joined
from engine.run.folder import RunFolder
join._JOIN_S = {patience}
sys.exit(join.take_part({place!r}, RunFolder(Path({root!r}))))
"""


def place(number: int = 0, nodes: int = 2, local: int = 0, processes: int = 1, name: str = "test") -> Joined:
    return Joined("srun", f"{name}-{os.getpid()}", number, nodes, local, processes, False, False)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


@contextmanager
def others(folder: RunFolder, *places: Joined, patience: float = 60) -> Iterator[list[psutil.Popen]]:
    """Start other processes of a launch; those that are left are killed."""
    programs = [OTHER.format(place=one, root=str(folder.root), patience=patience) for one in places]
    started = [psutil.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) for program in programs]
    try:
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()


def second(folder: RunFolder, program: str) -> NodeCommand:
    """The node that joins, with rank 1."""
    return NodeCommand("node 1", (), {}, work(folder, program, first=1, alone=False))


def launch(joins: Joins, folder: RunFolder, *programs: str, tick: Callable[[], None] = lambda: None) -> None:
    """Run rank 0 here and rank 1 on the node that joins."""
    commands = [node(folder, programs[0]), second(folder, programs[1])]
    run_ranks(commands, folder, tick, lambda line: None, joins)


@contextmanager
def joining(folder: RunFolder) -> Iterator[Joins]:
    """The launcher of two nodes, which the other one can join."""
    with Joins(place(), folder, LOOPBACK) as joins:
        joins.publish()
        yield joins


def codes(processes: list[psutil.Popen]) -> list[int]:
    return [process.wait(30) for process in processes]


def test_both_nodes_run_their_ranks_and_end_with_zero(folder: RunFolder) -> None:
    says = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    with others(folder, place(1)) as started:
        with joining(folder) as joins:
            launch(joins, folder, says, says)
        assert codes(started) == [0]
    assert [folder.log(rank).read_text() for rank in (0, 1)] == ["0 0 1\n", "1 0 1\n"]
    assert not list(folder.logs.glob("launch-*")), "the secret stays nowhere"


def test_the_secret_is_for_the_owner_alone_and_in_no_command_or_environment(folder: RunFolder) -> None:
    with joining(folder) as joins:
        path = folder.launch(place().key)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = json.loads(path.read_text())["secret"]
        assert len(bytes.fromhex(secret)) == 32
        shows = (
            "import os, psutil; p = psutil.Process();"
            "print([one.cmdline() for one in [p, *p.parents()]], dict(os.environ))"
        )
        with others(folder, place(1)):
            launch(joins, folder, shows, shows)
    for log in folder.logs.iterdir():
        assert secret not in log.read_text()


def test_agents_are_used_again_for_a_restart(folder: RunFolder) -> None:
    """The second start has only its own ranks."""
    fails, works = "print(1, flush=True); raise SystemExit(1)", "print(2, flush=True)"
    with others(folder, place(1)) as started:
        with joining(folder) as joins:
            with pytest.raises(RankError):
                launch(joins, folder, "import time; time.sleep(60)", fails)
            assert joins.restarts
            launch(joins, folder, works, works)
        assert codes(started) == [0]
    assert [folder.log(rank).read_text().split() for rank in (0, 1)] == [["2"], ["1", "2"]]


def test_a_node_that_is_killed_is_lost_and_nobody_here_starts_it_again(folder: RunFolder) -> None:
    waits = "import time; time.sleep(60)"
    with others(folder, place(1)) as started:
        kills = f"import os; os.kill({started[0].pid}, 9); {waits}"
        with failure(folder, 1, 124, "node 1") as problems, Joins(place(), folder, LOOPBACK) as joins:
            joins.publish()
            # The rank may be killed while it writes, so the file gets its name afterwards.
            new, pid = str(folder.root / "new"), folder.root / "pid"
            writes = f"open({new!r}, 'w').write(str(os.getpid())); os.rename({new!r}, {str(pid)!r})"
            launch(joins, folder, kills, f"import os; {writes}; {waits}")
        assert not joins.restarts and "srun" in (problems[0].hint or "")
    left = [one for one in psutil.process_iter() if pid.exists() and one.pid == int(pid.read_text())]
    assert not psutil.wait_procs(left, timeout=10)[1], "its ranks end with the agent"


def test_a_scheduler_that_signals_all_processes_asks_once(folder: RunFolder) -> None:
    """With a warning, then with a request. A second request would kill the ranks before they have saved."""
    up = folder.root / "up"
    with others(folder, place(1, processes=2), place(1, local=1, processes=2)) as started:
        signalled = list[bool]()

        def signal_all() -> None:
            if up.exists() and not signalled:
                signalled.append(True)
                time.sleep(1)  # for the second process of the node to find the first one
                for number in (signal.SIGUSR1, signal.SIGTERM):
                    for process in (*started, psutil.Process()):
                        process.send_signal(number)

        saves = real_rank(folder).replace("return 75", "time.sleep(1)\n    return 75")
        with pytest.raises(PreemptedError), joining(folder) as joins:
            launch(joins, folder, saves, saves, tick=signal_all)
        assert codes(started) == [75, 75]
    assert (folder.root / "saved").exists()


def test_a_pod_that_is_asked_to_end_stops_the_run_with_a_checkpoint(folder: RunFolder) -> None:
    """Kubernetes signals only the pod that it drains."""
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    up = folder.root / "up"
    with others(folder, place(1)) as started:

        def drain() -> None:
            if up.exists():
                up.unlink()
                started[0].terminate()

        with pytest.raises(PreemptedError), joining(folder) as joins:
            launch(joins, folder, real_rank(folder), real_rank(folder), tick=drain)
        assert codes(started) == [75]


def test_further_processes_of_a_node_end_with_its_code(folder: RunFolder) -> None:
    """torchrun starts one for each rank; the first of a node is its agent. Here a rank of the other node fails."""
    places = [place(0, local=1, processes=2), place(1, processes=2), place(1, local=1, processes=2)]
    with others(folder, *places) as started:
        with failure(folder, 1, 70, "node 1"), Joins(place(processes=2), folder, LOOPBACK) as joins:
            joins.publish()
            launch(joins, folder, "import time; time.sleep(60)", "raise SystemExit(5)")
        assert codes(started) == [70, 70, 70]


def test_a_process_whose_first_one_was_killed_ends_as_after_a_loss(folder: RunFolder) -> None:
    """It has connected, and the first one had not accepted yet."""
    first = _Followers(place(processes=2))
    assert first._socket is not None
    with others(folder, place(local=1, processes=2)) as started:
        assert select.select([first._socket], [], [], 30)[0]
        time.sleep(0.5)  # for it to wait for the exit code
        first._socket.close()
        assert codes(started) == [124]


def test_only_processes_of_this_user_get_or_give_an_exit_code(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of a machine can use a socket that is not in the file system, and its name is easily guessed."""
    users = iter([os.geteuid() + 1, os.geteuid()])
    monkeypatch.setattr(join, "_user_of", lambda other: next(users))
    place_ = place(processes=2)
    first = _Followers(place_)
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as follower:
        for one in (stranger, follower):
            one.connect(_meeting(place_))
        first.dismiss(75)
        assert (stranger.recv(16), follower.recv(16)) == (b"", b"75")
    monkeypatch.setattr(join, "_user_of", lambda other: os.geteuid() + 1)
    monkeypatch.setattr(join, "_JOIN_S", 1)
    taken = _Followers(place_)
    with refused(PreflightError, "run.out"):
        take_part(place(local=1, processes=2), folder)
    assert taken._socket is not None
    taken._socket.close()


def test_the_user_at_the_other_end_of_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert _user_of(ours) == os.geteuid()


def test_orders_of_another_user_are_refused(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent would run what they say."""
    folder.launch(place().key).write_text("{}")
    owner = folder.root.stat().st_uid
    assert join._read(folder, place()) == {}
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with refused(PreflightError, folder.launch(place().key)) as problems:
        take_part(place(1), folder)
    assert f"user {owner}" in problems[0].message and f"user {owner + 1}" in problems[0].message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_takes_orders_from_root_and_the_owner_of_the_run_folder(folder: RunFolder) -> None:
    path = folder.launch(place().key)
    path.write_text("{}")
    os.chown(path, 12345, -1)
    with refused(PreflightError, path):
        join._read(folder, place())
    os.chown(folder.root, 12345, -1)
    assert join._read(folder, place()) == {}


def test_a_launcher_may_have_more_connections_than_select_can_watch(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node takes descriptors; select only watches those below 1,024, which is also the usual limit."""
    links = Listener.links

    def high(listener: Listener) -> list[Link]:
        found = []
        for link in links(listener):
            descriptor = fcntl.fcntl(link.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100)
            link.close()
            found.append(Link(descriptor, descriptor))
        return found

    monkeypatch.setattr(Listener, "links", high)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with others(folder, place(1)) as started, ExitStack() as undo:
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        with joining(folder) as joins:
            launch(joins, folder, "pass", "pass")
            assert joins._agents[1].link.fileno() >= 1100
        assert codes(started) == [0]


def test_the_secret_does_not_travel_to_the_nodes_that_join(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their links are not encrypted. Its agents connect to each other, else no rank would start."""
    sent = dict[int, bytes]()
    write = Link.write

    def note(link: Link, line: bytes = b"") -> bool:
        sent[link.fileno()] = sent.get(link.fileno(), b"") + line
        return write(link, line)

    monkeypatch.setattr(Link, "write", note)
    with others(folder, place(1)) as started:
        with joining(folder) as joins:
            launch(joins, folder, "pass", "pass")
            said = sent[joins._agents[1].link.fileno()]
        assert codes(started) == [0]
    trees = [message.tree for message in map(message_of, said.splitlines()) if isinstance(message, Start)]
    assert [tree and tree.secret for tree in trees] == [None]
    assert joins._secret.hex().encode() not in said


def test_a_refused_launch_ends_the_others_with_its_code_and_leaves_nothing(tmp_path: Path) -> None:
    """They may come later than the refusal, which is before there is a run folder."""
    folder = RunFolder(tmp_path / "run")
    with others(folder, place(1, processes=2), place(1, local=1, processes=2)) as started:
        with pytest.raises(ConfigError), Joins(place(), folder, LOOPBACK):
            raise ConfigError("wrong")
        assert codes(started) == [2, 2]
    assert not folder.root.exists()


def test_files_of_earlier_launches_are_not_used(folder: RunFolder) -> None:
    """Of another job, and of this one: at its port nobody listens, or somebody with another secret."""
    folder.launch("0").write_text("{}")
    stale = folder.launch(place().key)
    with Listener("127.0.0.1", b"of another launch") as listener, others(folder, place(1)) as started:
        stale.write_text(json.dumps({"host": "127.0.0.1", "port": 9, "secret": "00"}))
        time.sleep(1)
        stale.write_text(json.dumps({"host": "127.0.0.1", "port": listener.port, "secret": "00"}))
        time.sleep(1)
        assert started[0].poll() is None
        with joining(folder) as joins:
            launch(joins, folder, "pass", "pass")
        assert codes(started) == [0]
    assert not list(folder.logs.glob("launch-*")), "what launches leave that were killed is removed"


def test_a_process_without_a_launch_gives_up_with_a_reason(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_JOIN_S", 1)
    for one, what in ((place(1), str(folder.logs)), (place(1, local=1, processes=2), "first process")):
        with refused(PreflightError, "run.out") as problems:
            take_part(one, folder)
        assert "node 1 " in problems[0].message and what in problems[0].message


def test_a_node_that_never_comes_is_named(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Joins, "answer_s", 3.0)
    monkeypatch.setattr(join, "_FAREWELL_S", 0.2)
    with refused(PreflightError, folder.node_log(1)) as problems, Joins(place(), folder, LOOPBACK) as joins:
        joins.publish()
        launch(joins, folder, "pass", "pass")
    assert problems[0].message.startswith("node 1 ")


def test_a_second_process_that_claims_a_node_is_sent_away(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for another launch, as a pod does that has replaced one that is not yet known to be gone."""
    with others(folder, place(1)) as started:
        with joining(folder) as joins:
            while not joins._agents:
                joins._admit()
                time.sleep(0.05)
            with others(folder, place(1), patience=2) as twice:
                deadline = time.monotonic() + 15
                while twice[0].poll() is None and time.monotonic() < deadline:
                    joins._admit()
                    time.sleep(0.05)
                assert twice[0].wait(1) == 1  # the error, which here nobody reports
            launch(joins, folder, "pass", "pass")
        assert codes(started) == [0]


def test_a_process_of_another_version_ends_the_launch_and_itself(folder: RunFolder) -> None:
    """It would look for another launch for ten minutes."""
    with refused(PreflightError), Joins(place(), folder, LOOPBACK) as joins:
        joins.publish()
        facts = json.loads(folder.launch(place().key).read_text())
        link = connect(facts["host"], facts["port"], bytes.fromhex(facts["secret"]))
        link.send(Join(1, "beta", protocol=99))
        launch(joins, folder, "pass", "pass")
    assert link.receive() == [End(ExitCode.PREFLIGHT)]
    link.close()


def test_the_exit_code_of_an_unexpected_error_is_that_of_a_bug(tmp_path: Path) -> None:
    assert join._code_of(KeyError("x")) == ExitCode.BUG
    assert join._code_of(KeyboardInterrupt()) == 130
    assert join._code_of(OSError(28, "No space left on device")) == 74
