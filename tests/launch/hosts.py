"""Two hosts on one machine: network namespaces that a pair of virtual cards joins, each with its own sshd."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ADDRESSES = ("10.213.0.1", "10.213.0.2")
_SSHD = "/usr/sbin/sshd"


def why_not() -> str | None:
    """Return why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "ssh", "ssh-keygen", _SSHD) if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    probe = ["ip", "netns", "add", f"probe-{os.getpid()}"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return "network namespaces are not permitted here"
    _run("ip", "netns", "del", probe[-1])
    return None


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Hosts:
    """The hosts, until they are closed. Both see the same files, as hosts with a shared file system do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"bs{os.getpid()}{letter}" for letter in "ab"]
        self.cards = [f"v{os.getpid()}{letter}" for letter in "ab"]
        self.hostfile = folder / "hosts"
        self.hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder = self.folder
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("key", "hostkey"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", self.cards[0], "type", "veth", "peer", "name", self.cards[1])
        for name, card, address in zip(self.names, self.cards, ADDRESSES, strict=True):
            _run("ip", "link", "set", card, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", card)
            _run("ip", "-n", name, "link", "set", card, "up")
        settings = [f"AuthorizedKeysFile={folder / 'key.pub'}", "StrictModes=no", "UsePAM=no", "LogLevel=ERROR"]
        options = [word for setting in settings for word in ("-o", setting)]
        for name in self.names:
            sshd = [_SSHD, "-f", "/dev/null", "-h", str(folder / "hostkey"), *options]
            _run("ip", "netns", "exec", name, *sshd, "-o", f"PidFile={folder / name}.pid")
        (folder / "config").write_text(
            f"Host *\n  IdentityFile {folder / 'key'}\n  StrictHostKeyChecking no\n"
            "  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "config"} "$@"\n')
        ssh.chmod(0o755)
        self._wait_for_sshd()

    def _wait_for_sshd(self) -> None:
        last = time.monotonic() + 20
        while any(self.start(["ssh", address, "true"]).wait() for address in ADDRESSES):
            assert time.monotonic() < last, "sshd does not answer"
            time.sleep(0.1)

    def start(self, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Start a command on the first host."""
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        return subprocess.Popen(["ip", "netns", "exec", self.names[0], *command], env=environment, text=True, **more)

    def link(self, state: str) -> None:
        """Set the link between the hosts `up` or `down`."""
        _run("ip", "-n", self.names[0], "link", "set", self.cards[0], state)

    def processes(self) -> list[psutil.Process]:
        """List the processes of both hosts, without those of sshd."""
        listed = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout.split()
            for name in self.names
        ]
        found = list[psutil.Process]()
        for pid in (int(word) for words in listed for word in words):
            if psutil.pid_exists(pid):
                process = psutil.Process(pid)
                if not process.name().startswith("sshd") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        """End all processes of the hosts, and remove them."""
        for name in self.names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in pids.split():
                if psutil.pid_exists(int(pid)):
                    psutil.Process(int(pid)).kill()
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
