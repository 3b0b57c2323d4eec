"""The agent of a node: starts the ranks of this node, watches them, and tells the launcher how they do.

    python -m engine.launch.agents.agent

It reads messages of the launcher from its standard input, and writes its own to its standard output, which ssh and srun
carry to other hosts:

```
 launcher                                        agent                                       rank
    | <- hello --------------------------------- |
    | -- start: ranks, program, environment ---> | starts a process for each rank
    | <- listening: where its children connect - |
    | <- beats: where each rank is, each second  | <- at: step, phase, number of the pass --- |
    |                                            | <- planned_s: of the plan of this step --- |
    |                                            | <- reduce: a value to combine ------------ |
    |                                            | -- result: what all ranks' values make --> |
    |                                            | <- ask: about keys that all ranks share -- |
    |                                            | -- answer -------------------------------> |
    |                                            | -- meet: to the first rank of several nodes|
    |                                            | -- alive: every 5 s ---------------------> |
    | -- alive: each second -------------------> |
    | -- stop ---------------------------------> | -- stop: save and end -------------------> |
    | -- stacks, if none makes progress -------> | -- a signal: write stacks to the log ----> |
    |                                            | -- a byte to a pipe: write NCCL's record > |
    | <- ended: rank, code, cause -------------- |
    | -- kill ---------------------------------> | -- SIGKILL ------------------------------> |
    | -- ask: a question of the doctor --------> |
    | <- answer -------------------------------- |
```
When the launcher is gone or silent, the agent kills its ranks and ends; a rank whose agent is silent ends, too. If the
process that has started the agent ends, the system kills the agent, and its ranks with it, even if a signal has stopped
them. The agents of all nodes are a tree, in which they combine values of ranks and pass on the questions of ranks
(engine/control/branch.py); an agent connects to its parent over TCP. Imports no torch.

Whether a rank makes progress is decided by the launcher (patience.py). The silence here is that of a lost link.

An agent that a scheduler has started (engine/launch/schedulers/join.py) says `hello` when the launcher says `again`,
before each start. It passes on that its scheduler asks it to stop (`asked`), and ends when the launcher says `end`.
"""

from __future__ import annotations

import math
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from engine.cluster.gpus import gpus_seen
from engine.cluster.nccl import ONE_GPU, shares_gpu
from engine.cluster.numa import of_ranks
from engine.control import protocol
from engine.control.branch import Branch
from engine.control.clock import AwakeClock
from engine.control.link import BEAT_S, SILENCE_S, Link
from engine.control.processes import end_with_parent
from engine.control.protocol import Message, ProtocolError, Tree, Work
from engine.control.signals import STOP_SIGNALS
from engine.control.sockets import Listener, connect, derived
from engine.errors import ExitCode, PreflightError, Problem
from engine.launch.agents.data_plane import DataPlane, check_ray
from engine.launch.agents.rank_process import Rank, last_line, recorded, thrown, write_records, write_stacks
from engine.launch.checks.interface import interface_towards, listening_address, loopback_interface
from engine.launch.checks.ready import Need, allow_many_files, unready
from engine.run.cause import Cause
from engine.run.folder import RunFolder

_POLL_S = 0.05
_SHOW_S = 5.0  # between two messages that show ranks that the agent is there
_CONNECT_S = 10.0  # for the parent to answer
_GONE_S = 2.0  # in which the launcher notices that an agent is gone
_LOOPBACK = "127.0.0.1"
# For the system to end a killed rank: it unpins its memory first, and may wait for a lost GPU for ever.
_KILLED_S = 30.0
_NOT_STARTED = 127  # the exit code of a shell for a program that cannot be started

# Processes in which a rank compiles kernels. PyTorch starts up to 32 in each rank, with 300 MB of host memory each.
COMPILE_WORKERS = 4


class Agent:
    """The ranks of a node."""

    def __init__(self, launcher: Link, secret: bytes = b"") -> None:
        """Take the link to the launcher, and the secret of the launch if the agent has it from elsewhere."""
        self._launcher, self._secret = launcher, secret
        self._ranks = dict[int, Rank]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(launcher, selectors.EVENT_READ)
        self._folder: RunFolder | None = None
        self._branch: Branch | None = None
        self._environment: Mapping[str, str] = {}  # of the ranks
        self._pipes: str | None = None  # a folder with a pipe of each rank that uses NCCL
        self._plane: DataPlane | None = None  # with data.runtime=ray
        self._clock = AwakeClock()
        # When the launcher has last sent anything, and when the agent has last sent `beats` and, to ranks, `alive`.
        self._last_heard = self._last_beats = self._last_alive = self._clock()
        self.used = False  # whether a launcher has wanted an agent that joins
        self._asked: int | None = None
        self._told_asked = False  # in this start
        self._code: int | None = None  # with which to end
        # After which the launcher counts as gone, see `_start`. One on this machine may be stopped, by Ctrl-Z, for any
        # time; that it ends is noticed in `run`, because the link closes.
        self._silence_s = math.inf

    def run(self) -> int:
        """Do what the launcher says, until it is gone. Return the exit code that it has named, else HANG."""
        while self._clock() - self._last_heard < self._silence_s and self._code is None:
            for key, _ in self._selector.select(_POLL_S):
                if key.fileobj is self._launcher:
                    try:
                        messages = self._launcher.receive()
                    except EOFError:
                        return ExitCode.HANG
                    self._last_heard = self._clock()
                    for message in messages:
                        self._obey(message)
                    break  # a message may have closed the other links; `select` returns those that are left again
                if key.fileobj is self._branch:
                    self._branch.work()
                else:
                    self._listen(key.data)
            if self._code is None:  # else the launcher may be gone, and has named the exit code
                self._look_at_plane()
                self._report()
        return ExitCode.HANG if self._code is None else self._code

    def begin(self) -> None:
        """Kill all ranks, if there are any, and tell the launcher that others can start."""
        self.close()
        self._silence_s = math.inf  # a launcher that plans the next start says nothing for a while
        self._told_asked = False  # a request between two starts counts, too
        self._launcher.send(protocol.Hello())

    def pass_on(self, number: int) -> None:
        """Tell the launcher, with the next report, that a scheduler has sent this signal to the agent."""
        self._asked, self._told_asked = number, False

    def close(self) -> None:
        """Kill all ranks, and leave the tree of agents."""
        self._end_ranks()
        if self._pipes is not None:
            shutil.rmtree(self._pipes, ignore_errors=True)
            self._pipes = None
        if self._plane is not None:
            self._plane.close()
            self._plane = None
        if self._branch is not None:
            self._selector.unregister(self._branch)
            self._branch.close()
            self._branch = None

    def _end_ranks(self) -> None:
        """Kill all ranks, and wait for them, together up to `_KILLED_S`. The launcher gets beats meanwhile."""
        for rank in self._ranks.values():
            rank.kill()
        last = time.monotonic() + _KILLED_S
        for rank in self._ranks.values():
            while (left := last - time.monotonic()) > 0 and not rank.has_ended_within(min(left, BEAT_S)):
                with suppress(OSError):  # the launcher is gone
                    self._show_ranks()
            if not rank.has_ended_within(0.0):
                what = "does not end although it was killed: its GPU or the storage does not answer"
                print(f"rank {rank.rank} (process {rank.process.pid}) {what}", file=sys.stderr, flush=True)
            self._forget(rank)
        self._ranks.clear()

    def _obey(self, message: Message) -> None:
        match message:
            case protocol.Again():
                self.used = True
                self.begin()
            case protocol.Start(work, tree):
                self._start(work, tree)
            case protocol.Stop():
                for rank in self._ranks.values():
                    with suppress(OSError):  # it has already ended
                        rank.link.send(protocol.Stop())
            case protocol.Stacks():
                write_records(self._ranks, self._environment)
                write_stacks({rank.log: rank.process.pid for rank in self._ranks.values()})
            case protocol.Kill():
                for rank in self._ranks.values():
                    rank.kill()
            case protocol.Ask():
                # The doctor asks, and no run waits for the imports of its checks.
                from engine.doctor.host import answer

                self._launcher.send(answer(message))
            case protocol.End(code):
                self.used = True
                self._code = code

    def _start(self, work: Work, tree: Tree | None) -> None:
        """Start the ranks of this node."""
        self._folder = folder = RunFolder(Path(work.folder))
        self._last_alive = self._clock()
        # Ranks are not those of the torchrun that may have started this process.
        own = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        environment = {**own, **work.environment, "LOCAL_WORLD_SIZE": str(len(work.ranks))}
        # A launcher on another host may be cut off without a sign. Then silence ends the ranks, which would otherwise
        # train on beside those of the next start.
        if not work.alone:
            self._silence_s = SILENCE_S
        # The launcher has checked its own host, but with its own variables.
        world = int(environment.get("WORLD_SIZE") or len(work.ranks))
        problem = unready(Need(len(work.ranks), world, 1 if tree is None else 2, work.gpus), environment)
        gpus = gpus_seen(environment) if work.gpus else None
        if tree is not None:  # a test mode for one host, which the launcher refuses on several
            environment.pop(ONE_GPU, None)
        needed = 1 if shares_gpu(environment) else len(work.ranks)
        if problem is None and gpus is not None and len(gpus) < needed:
            problem = _too_few(len(gpus), len(work.ranks), environment)
        # The interface towards the other hosts. Left to themselves, gloo and NCCL may choose one that no other host
        # reaches.
        name = work.peer and interface_towards(work.peer)
        if name is None and tree is None:  # the only node: no other host needs to reach its ranks
            name = loopback_interface()
        if name:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
            environment.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without =, any name that begins so
        # Ranks share the cores of the host; by default each would start as many threads as there are cores.
        threads = max((os.cpu_count() or 1) // len(work.ranks), 1)
        allowed, bound = os.sched_getaffinity(0), list[set[int]]()
        if gpus and len(gpus) >= needed:  # near its GPU a rank launches kernels and copies faster
            places = [gpus[0 if shares_gpu(environment) else local].pci for local in range(len(work.ranks))]
            bound = of_ranks(places, allowed)
            threads = min(threads, *(max(len(one) // bound.count(one), 1) for one in bound))
        environment["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS") or str(threads)
        try:
            # First, because it may fail, and then the agent must not be in the tree.
            address = listening_address(environment, work.peer) if tree else _LOOPBACK
            if work.ray is not None and problem is None:
                check_ray(work.ray, environment)
                secret = self._secret_of(tree) if tree else b""
                head = tree.ray if tree else None
                self._plane = DataPlane(work.ray, folder, environment, address, head, secret)
                environment = self._plane.environment
            self._branch = self._join(work, tree, address)
            if problem is not None:
                self._branch.close()
                self._branch = None
                raise PreflightError(f"{problem.key}: {problem.message}", hint=problem.hint)
        except OSError as error:
            for number, _ in work.ranks:
                # If the parent is gone, the launcher detects that, too, and must report it as the first failure: the
                # negative age places this one after it.
                self._tell_not_started(number, _not_joined(error, tree.parent if tree else None), age_s=-_GONE_S)
            return
        except PreflightError as error:
            for number, _ in work.ranks:
                self._tell_not_started(number, Cause(error.code, error.problems[0], whole=True))
            return
        self._selector.register(self._branch, selectors.EVENT_READ)
        if work.gpus:
            self._pipes = tempfile.mkdtemp(prefix="bytescale-nccl-")
            environment |= recorded(environment, folder, Path(self._pipes))
        self._environment = environment
        # Each rank compiles kernels in separate processes, which share the cores, too.
        workers = environment.get("TORCHINDUCTOR_COMPILE_THREADS") or str(min(threads, COMPILE_WORKERS))
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = workers
        with ExitStack() as ours:  # only ranks may keep these open: who ends must be noticed by the others
            pairs = [[ours.enter_context(end).fileno() for end in socket.socketpair()] for _ in work.ranks[1:]]
            sockets = [[first for first, _ in pairs], *([other] for _, other in pairs)]
            for local, (number, program) in enumerate(work.ranks):
                near = bound[local] if bound and bound[local] != allowed else None
                place, log = {"RANK": str(number), "LOCAL_RANK": str(local)}, folder.log(number)
                try:
                    for path in (folder.error(number), folder.nccl_record(number)):
                        path.unlink(missing_ok=True)
                    rank = Rank(number, program, {**environment, **place}, log, self._clock(), sockets[local], near)
                except OSError as error:
                    self._tell_not_started(number, _not_started(number, error))
                    continue
                if local == 0 and tree is not None:  # it may meet the first ranks of other nodes
                    secret = derived(self._secret_of(tree), "blocks")
                    with suppress(OSError):  # it has ended
                        rank.link.send(protocol.Meet(address, secret.hex()))
                self._ranks[number] = rank
                self._selector.register(rank.link, selectors.EVENT_READ, rank)

    def _join(self, work: Work, tree: Tree | None, address: str) -> Branch:
        """Take this node's place in the tree of agents, and tell the launcher at which address its children connect.

        Raises OSError if the parent does not answer.
        """
        if tree is None:  # the only node
            return Branch(len(work.ranks))
        parent, listener, secret = None, None, self._secret_of(tree)
        with ExitStack() as unused:
            if tree.parent is not None:
                parent = connect(*tree.parent, secret, _CONNECT_S)
                unused.callback(parent.close)
            if tree.children:
                listener = Listener(address, secret)
                unused.callback(listener.close)
                head = self._plane.address if self._plane else None
                self._launcher.send(protocol.Listening(address, listener.port, head))
            unused.pop_all()
        return Branch(len(work.ranks), tree.children, parent, listener)

    def _secret_of(self, tree: Tree) -> bytes:
        """Return the secret of the launch, which all agents have."""
        return self._secret if tree.secret is None else bytes.fromhex(tree.secret)

    def _look_at_plane(self) -> None:
        """Look after the data plane; if it has failed, so have the ranks."""
        cause = self._plane.look() if self._plane and self._ranks else None
        if cause is None:
            return
        numbers, failed = list(self._ranks), self._clock()
        self._end_ranks()
        for number in numbers:
            self._launcher.send(protocol.Ended(number, int(cause.code), cause, self._clock() - failed, said=""))

    def _tell_not_started(self, rank: int, cause: Cause, age_s: float = 0.0) -> None:
        self._launcher.send(protocol.Ended(rank, _NOT_STARTED, cause, age_s, said=""))

    def _listen(self, rank: Rank) -> None:
        """Record the position of a rank, and pass its operations and questions on to the tree."""
        assert self._branch is not None
        try:
            messages = rank.link.receive()
        except EOFError:
            self._selector.unregister(rank.link)
            return
        for message in messages:
            rank.note(message, self._clock())
            self._branch.take(rank.link, message)

    def _report(self) -> None:
        """Tell the launcher which ranks have ended, and each second where the others are."""
        for rank in list(self._ranks.values()):
            code = rank.ended()
            if code is not None:
                del self._ranks[rank.rank]
                self._forget(rank)
                self._launcher.send(self._ended(rank, code))
        if self._asked is not None and not self._told_asked:
            self._launcher.send(protocol.Asked(self._asked))
            self._told_asked = True
        now = self._clock()
        if now - self._last_alive >= _SHOW_S:
            self._last_alive = now
            for rank in self._ranks.values():
                if rank.link.writable():  # one that is stopped reads nothing
                    with suppress(OSError):  # it has just ended
                        rank.link.send(protocol.Alive())
        self._show_ranks()

    def _show_ranks(self) -> None:
        """Tell the launcher each second where the ranks are, and with it that this agent is there."""
        now = self._clock()
        # A launcher that is stopped reads nothing: then ranks keep running, and the agent must not wait for it.
        if now - self._last_beats >= BEAT_S and self._launcher.writable():
            self._last_beats = now
            self._launcher.send(protocol.Beats({number: rank.beat(now) for number, rank in self._ranks.items()}))

    def _forget(self, rank: Rank) -> None:
        """Close the link of a rank that has ended."""
        if rank.link in self._selector.get_map():
            self._selector.unregister(rank.link)
        if self._branch is not None:
            self._branch.forget(rank.link)
        rank.link.close()

    def _ended(self, rank: Rank, code: int) -> protocol.Ended:
        """Return why a rank has ended: its own cause, how many seconds ago that was, and the last line of its log."""
        assert self._folder is not None
        cause = Cause.read(self._folder.error(rank.rank))
        age_s = 0.0 if cause is None or cause.time is None else max(0.0, time.time() - cause.time)
        aborted = thrown(rank.log, rank.logged) if code == -signal.SIGABRT else ""
        return protocol.Ended(rank.rank, code, cause, age_s, aborted or last_line(rank.log, rank.logged))


def _not_started(rank: int, error: OSError) -> Cause:
    """Return the cause of a rank that could not be started."""
    message = f"rank {rank} could not be started on {socket.gethostname()}: {error.filename}: {error.strerror}"
    hint = f"every host needs this folder, the run folder and {sys.executable} under the same paths"
    return Cause(ExitCode.PREFLIGHT, Problem(message, hint=hint), whole=True)


def _too_few(gpus: int, ranks: int, environment: Mapping[str, str]) -> Problem:
    """Describe a host with fewer GPUs than ranks."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    seen = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible or repr(visible)}"
    message = f"{ranks} rank{'s' * (ranks != 1)} need one GPU each, but CUDA finds {gpus} on this host{seen}"
    return Problem(
        message, socket.gethostname(), "check `nvidia-smi` there, or set the slots of this host to that number"
    )


def _not_joined(error: OSError, parent: tuple[str, int] | None) -> Cause:
    """Return the cause of ranks whose agent cannot take its place below the `parent`, given by address and port."""
    what = "listen to those of other hosts" if parent is None else f"join that of its parent at {parent[0]}:{parent[1]}"
    message = f"the agent of {socket.gethostname()} cannot {what}: {error.strerror or error}"
    hint = "hosts must reach each other over TCP, which a firewall may prevent"
    return Cause(ExitCode.PREFLIGHT, Problem(message, hint=hint), whole=True)


def main() -> None:
    """Run the agent of this node."""
    end_with_parent()  # the launcher, or the sshd of its connection, also if this process is stopped then
    # The launcher decides when ranks end; its own end is noticed. Signals that are ignored would be so in ranks, too.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    allow_many_files()  # for its ranks: ssh starts it with the usual limit
    output = os.dup(1)
    os.dup2(2, 1)  # what else is printed must not be among the messages
    os.write(output, b"\n")  # ends the line of a shell that greets
    agent = Agent(Link(0, output))
    try:
        with suppress(BrokenPipeError):
            agent.begin()
            agent.run()
    except ProtocolError as error:
        print(f"the launcher or a rank {error}; {error.problems[0].hint}", file=sys.stderr)
        sys.exit(error.code)
    finally:
        agent.close()


if __name__ == "__main__":
    main()
