"""Runs `bytescale doctor --json` in a process of its own, on a machine in which something is broken."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.root import ROOT

_OF_TESTS = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")

# Torch, DeepSpeed and the two ranks take ten seconds, and have their own tests. `{broken}` may replace more.
QUICK = """
import sys
from engine.doctor import libraries, ranks
from engine.doctor.check import ok

ANSWERS = {{
    "torch": {{"version": "2.13.0+cpu", "cuda": None}},
    "gpus": {{"names": [], "why": "Torch not compiled with CUDA enabled"}},
    "nccl": {{"version": None}},
    "kernel": {{"name": "fused_cpu", "reason": "PyTorch's fused kernel for CPU", "rejected": [], "dtype": "fp32"}},
    "deepspeed": {{"imports": "engine.zero.engine"}},
}}
libraries.ask = lambda config: libraries.Libraries(ANSWERS, "ended")
ranks.two_ranks = lambda place: [ok(part, "a stand-in", "gloo, 1 ms") for part in ranks.PARTS]
{broken}
from bytescale_cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def quick(*words: str, broken: str = "") -> list[str]:
    """The command that runs the doctor without torch; `broken` are lines of Python that break something."""
    return [sys.executable, "-c", QUICK.format(broken=broken), "doctor", "--json", *words]


def environment(path: Path | None = None, **variables: str) -> dict[str, str]:
    """The variables of a doctor, without those of the test run; `path` is a folder whose programs come first."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")
    }
    first = {} if path is None else {"PATH": f"{path}:{os.environ['PATH']}"}
    return {**inherited, **first, **variables}


def examined(command: Sequence[str], variables: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a doctor; return its JSON, whose state must agree with the exit code."""
    done = subprocess.run(
        command, cwd=ROOT, env=variables or environment(), capture_output=True, text=True, timeout=120
    )
    return read(done.stdout, done.stderr, done.returncode)


def read(output: str, said: str, code: int) -> dict[str, Any]:
    """Read the JSON of a doctor that has ended with an exit code."""
    assert code in (0, 3), said + output
    answer = json.loads(output)
    doctor: dict[str, Any] = answer["doctor"]
    wrong = wrong_ones(doctor, "failed")
    assert (answer["ok"], doctor["ok"], code) == ((True, True, 0) if not wrong else (False, False, 3))
    assert all(name in answer["error"]["message"] for name in wrong)
    return doctor


def wrong_ones(doctor: dict[str, Any], *states: str) -> set[str]:
    """Return the names of checks in one of these states, by default failed or warning."""
    return {check["name"] for check in doctor["checks"] if check["state"] in (states or ("failed", "warning"))}


def named(doctor: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the check of a name, of which there must be one."""
    (check,) = (check for check in doctor["checks"] if check["name"] == name)
    return check


def installed(folder: Path, package: str, version: str) -> Path:
    """Make a folder in which a package seems to be installed in a version; return it, for PYTHONPATH."""
    facts = folder / f"{package}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return folder


def ssh(folder: Path, lines: str) -> Path:
    """Make an ssh that runs commands on this machine after these lines of shell, in which $command is the command.

    Returns the folder for PATH.
    """
    program = folder / "bin" / "ssh"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nfor command; do :; done\n{lines}\nexec sh -c "$command"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program.parent


def can_mount() -> bool:
    """Whether this process may mount a file system in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def mounted(folder: Path, size: str, command: Sequence[str]) -> list[str]:
    """The command, in a namespace in which a folder is a file system of its own with this size."""
    script = f'mount -t tmpfs -o size={size} none {folder} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *command]
