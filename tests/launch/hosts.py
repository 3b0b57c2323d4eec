"""Hosts on one machine: network namespaces, each with its own sshd, which virtual cards join to a switch.

```
 host 1 (starts commands)   host 2       host 3
        card                 card         card      10.213.0.1, 10.213.0.2, 10.213.0.3
         |                    |            |        pairs of virtual cards: the links that `link` cuts
        card                 card         card
         +------- bridge -----+------------+        a network namespace of its own
```
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.tiers import begins_world

_SSHD = "/usr/sbin/sshd"


def why_not() -> str | None:
    """Return why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "ssh", "ssh-keygen", _SSHD) if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    name = f"probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces are not permitted here"
    bridge = ["ip", "-n", name, "link", "add", "bridge", "type", "bridge"]
    has_bridges = not subprocess.run(bridge, capture_output=True, check=False).returncode
    _run("ip", "netns", "del", name)
    return None if has_bridges else "the kernel has no network bridges"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Hosts:
    """The hosts, until they are closed. All see the same files, as hosts with a shared file system do.

    Only what is in the folder `own` is another on each host: that in `of_host`.
    """

    def __init__(self, folder: Path, count: int, own: Path | None = None) -> None:
        begins_world()
        self.folder, self._own = folder, own
        letters = "abcdefgh"[:count]
        self.names = [f"bs{os.getpid()}{letter}" for letter in letters]
        self.cards = [f"v{os.getpid()}{letter}" for letter in letters]
        self.addresses = [f"10.213.0.{number}" for number in range(1, count + 1)]
        self._switch = f"bs{os.getpid()}"
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
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            far_end = ("peer", "name", card, "netns", self._switch)
            _run("ip", "-n", name, "link", "add", card, "type", "veth", *far_end)
            _run("ip", "-n", self._switch, "link", "set", card, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", card)
            _run("ip", "-n", name, "link", "set", card, "up")
        settings = [f"AuthorizedKeysFile={folder / 'key.pub'}", "StrictModes=no", "UsePAM=no", "LogLevel=ERROR"]
        options = [word for setting in settings for word in ("-o", setting)]
        for name in self.names:
            sshd = [_SSHD, "-f", "/dev/null", "-h", str(folder / "hostkey"), *options]
            _run(*self._on(name), *sshd, "-o", f"PidFile={folder / name}.pid")
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
        while any(self.start(["ssh", address, "true"]).wait() for address in self.addresses):
            assert time.monotonic() < last, "sshd does not answer"
            time.sleep(0.1)

    def start(self, command: Sequence[str], **more: Any) -> subprocess.Popen[str]:
        """Start a command on the first host."""
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        return subprocess.Popen([*self._on(self.names[0]), *command], env=environment, text=True, **more)

    def of_host(self, host: int) -> Path:
        """The folder that a host has in place of `own`."""
        return self.folder / f"own-{host}"

    def _on(self, name: str) -> list[str]:
        """Return the words that run a command on a host. `ip netns exec` also gives it mounts that no other sees."""
        if self._own is None:
            return ["ip", "netns", "exec", name]
        here = self.of_host(self.names.index(name))
        for folder in (here, self._own):
            folder.mkdir(exist_ok=True)
        return ["ip", "netns", "exec", name, "sh", "-c", f'mount --bind {here} {self._own} && exec "$@"', "sh"]

    def hostfile(self, count: int, user: str = "") -> Path:
        """Write a hostfile with the first hosts, one rank each, and return its path. `user` may be `NAME@`."""
        path = self.folder / f"hosts{count}"
        path.write_text("".join(f"{user}{address} slots=1\n" for address in self.addresses[:count]))
        return path

    def link(self, host: int, state: str) -> None:
        """Set the link of a host `up` or `down`: the end at the switch, so it is as if its cable were pulled."""
        _run("ip", "-n", self._switch, "link", "set", self.cards[host], state)

    def processes(self, clients: bool = True) -> list[psutil.Process]:
        """List the processes of all hosts, without those of sshd, and with those of ssh if `clients`."""
        listed = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout.split()
            for name in self.names
        ]
        found = list[psutil.Process]()
        for pid in (int(word) for words in listed for word in words):
            with suppress(psutil.NoSuchProcess):  # it has ended since
                process = psutil.Process(pid)
                other = not process.name().startswith("sshd" if clients else "ssh")
                if other and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def host_of(self, process: psutil.Process) -> int:
        """Return the number of the host on which a process runs. Raises NoSuchProcess if it has ended."""
        try:
            own = str(Path(f"/proc/{process.pid}/ns/net").readlink())
        except FileNotFoundError:
            raise psutil.NoSuchProcess(process.pid) from None
        inodes = [f"net:[{Path('/run/netns', name).stat().st_ino}]" for name in self.names]
        return inodes.index(own)

    def close(self) -> None:
        """End all processes of the hosts, and remove them."""
        for name in (*self.names, self._switch):
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
            for pid in pids.split():
                if psutil.pid_exists(int(pid)):
                    psutil.Process(int(pid)).kill()
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
