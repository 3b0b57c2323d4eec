"""A real Slurm of two nodes on this machine: its controller, two daemons for nodes, and a MUNGE of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.tiers import begins_world

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scontrol", "squeue", "sinfo")


def why_not() -> str | None:
    """Return why there can be no Slurm here; None if there can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    os.environ["PATH"] += ":/usr/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"there is no {', '.join(missing)}" if missing else None


class Slurm:
    """The nodes n1 and n2, until they are closed. Jobs that are requeued start again after seconds, not minutes."""

    def __init__(self, folder: Path) -> None:
        begins_world()
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = dict[str, subprocess.Popen[bytes]]()
        ports = [self._free_port() for _ in range(3)]
        for name in ("state", "spool/n1", "spool/n2"):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host = socket.gethostname()
        nodes = "".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN\n"
            for name, port in zip(("n1", "n2"), ports[1:], strict=True)
        )
        (folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={ports[0]}\nSlurmUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.sock,cred_expire=5\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n\n"
            f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/d-%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n"
            "SelectTypeParameters=CR_Core\nReturnToService=2\nMpiDefault=none\nSlurmdTimeout=6\nKillWait=15\n"
            "SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2\n"
            f"{nodes}PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP\n"
        )
        try:
            munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file", "seed-file")]
            self._start(
                "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock", *munge
            )
            self._wait(lambda: (folder / "munge.sock").exists(), "munged")
            self._start("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
            for name in ("n1", "n2"):
                self.up(name)
            self._wait(lambda: self.run("sinfo", "-h", "-o", "%T %D") == "idle 2", "sinfo")
        except BaseException:
            self.close()
            raise

    def _free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def _start(self, *command: str, name: str = "") -> None:
        with (self.folder / f"{name or command[0]}.log").open("ab") as log:
            self._daemons[name or command[0]] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait(self, due: Any, what: str, seconds: float = 30) -> None:
        last = time.monotonic() + seconds
        while not due():
            assert time.monotonic() < last, f"{what}: {self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines that the daemons have written."""
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in self.folder.glob("*.log"))

    def run(self, *command: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip()

    def start(self, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Start a command that may use Slurm."""
        return subprocess.Popen(command, env=self.environment, text=True, **more)

    def up(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start("slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"), name=node)

    def down(self, node: str) -> None:
        """Let a node fail: kill all that runs on it."""
        self._daemons[node].kill()
        self._kill(self.processes(node))
        self._daemons[node].wait()

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """List the processes of jobs, of one node or of both."""
        found = list[psutil.Process]()
        for process in psutil.process_iter():
            try:
                variables = process.environ()
            except psutil.Error:
                continue
            here = variables.get("SLURM_CONF") == self.environment["SLURM_CONF"] and "SLURM_JOB_ID" in variables
            if here and node in (None, variables.get("SLURMD_NODENAME")):
                found.append(process)
        return found

    def _kill(self, processes: list[psutil.Process]) -> None:
        """Kill processes of jobs, and first the daemons of their steps."""
        parents = {parent for process in processes if (parent := process.parent()) is not None}
        daemons = [parent for parent in parents if parent.name() == "slurmstepd"]
        for process in (*daemons, *processes):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job, by name."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, seconds: float = 180) -> dict[str, str]:
        """Wait until a job has one of these states, and return what Slurm says of it."""
        last = time.monotonic() + seconds
        while (found := self.state(job)).get("JobState") not in states:
            assert time.monotonic() < last, f"{found}\n{self.logs()}"
            time.sleep(0.3)
        return found

    def close(self) -> None:
        """End all jobs, then the daemons."""
        if "n1" in self._daemons:
            subprocess.run(["scancel", "--full", "--signal=KILL", "-u", "root"], env=self.environment, check=False)
            time.sleep(0.5)
        self._kill(self.processes())
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
