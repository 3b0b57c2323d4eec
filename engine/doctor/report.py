"""The text for reports of bugs: versions, the machine, and what checks have found, without names of users or places."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from engine.cluster.available_memory import total_bytes
from engine.cluster.hosts import is_loopback
from engine.config.units import counted, format_bytes
from engine.doctor.check import Check
from engine.job import Job

# A path begins at the start of a word. Any that the config does not name is cut at its first space.
_PATH = re.compile(r"(?<![\w.~/-])(?:~|\.{1,2})?/[^\s'\"`,;:()]+")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){3,}\b", re.IGNORECASE)


def bug_report(checks: Sequence[Check], job: Job) -> str:
    """Describe this machine in lines that can be pasted in public."""
    config, cluster, memory = job.config, job.cluster, total_bytes()
    has = f"{counted(os.cpu_count() or 1, 'core')}, {format_bytes(memory) if memory else 'unknown'} of memory"
    nodes = f"{counted(len(cluster.nodes), 'node')} with {counted(cluster.ranks, 'rank')}"
    lines = [
        f"system: {platform.system()} {platform.release()} {platform.machine()}, {has}",
        f"config: recipe {_public(config.recipe)}, cluster={_public(config.cluster.name)}, {nodes}, "
        f"zero.stage={config.zero.stage}, dtype={config.dtype}",
    ]
    for section in dict.fromkeys(check.section for check in checks if check.section != "hosts"):
        values = [f"{one.name} {one.value}" for one in checks if one.section == section and one.value]
        lines += [f"{section}: {'; '.join(values)}"] if values else []
    hide = _Hidden(job)
    for state in ("failed", "warning"):
        for check in (one for one in checks if one.state == state):
            host = check.name.partition(": ")[0]  # messages about hosts begin with the host, too
            lines.append(f"{state}: {check.name}: {hide(check.message).removeprefix(f'{host}: ')}")
    return "\n".join(lines)


def _public(name: str) -> str:
    """Return the name of a recipe or cluster; one of the user's own is a path."""
    return "of the user" if "/" in name or name.endswith((".yaml", ".yml")) else name


class _Hidden:
    """Replaces names of users, hosts and places in a text."""

    def __init__(self, job: Job) -> None:
        config, cluster = job.config, job.cluster
        roles = {
            name: f"host {n}"
            for n, node in enumerate(cluster.nodes, start=1)
            for name in (node.host, node.address)
            if not is_loopback(node.address)
        }
        own = socket.gethostname()
        roles |= {name: "this machine" for name in (own, own.partition(".")[0]) if name not in roles}
        users = {node.host.partition("@")[0] for node in cluster.nodes if "@" in node.host}
        with suppress(KeyError, OSError):  # a container may have no name for its user
            users.add(getpass.getuser())
        roles |= dict.fromkeys(users, "USER")
        places = (config.run.out, config.data.cache, config.cluster.hostfile, os.curdir, Path.home())
        paths = {os.path.realpath(place) for place in places if place is not None} - {"/"}
        self._roles, self._paths = roles, sorted(paths, key=len, reverse=True)
        names = "|".join(map(re.escape, sorted(roles, key=len, reverse=True)))
        self._names = re.compile(rf"(?<![\w-])(?:{names})(?![\w-])")

    def __call__(self, text: str) -> str:
        for path in self._paths:
            text = text.replace(path, "/PATH")
        text = _PATH.sub("PATH", text)
        text = self._names.sub(lambda found: self._roles[found[0]], text)
        return _ADDRESS.sub("ADDRESS", text)
