from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest

from engine.config.load import load
from engine.doctor.check import Check, failed, ok, warning
from engine.doctor.report import bug_report
from engine.job import Job


def test_a_report_names_no_user_host_or_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "secret-project-7.corp.example")
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    hostfile, out = tmp_path / "hosts", tmp_path / "my run"
    hostfile.write_text("gpu-a slots=2\ngpu-a2 slots=2\n10.1.2.3 slots=2\nci-user@gpu-d slots=2\n")
    config = load([f"run.out='{out}'", f"cluster.hostfile={hostfile}"])
    checks = [
        ok("torch", "/home/jdoe/env has 2.13.0", "2.13.0"),
        failed("run folder", f"{out}: a file cannot be renamed: Operation not permitted", ""),
        failed("host 2: ssh", "gpu-a2: ssh ended with code 255: jdoe@gpu-a2: Permission denied (publickey).", ""),
        failed("host 3: rendezvous", "10.1.2.3 cannot connect to port 4711 of gpu-a: timed out", ""),
        failed("host 1: interfaces", "gpu-a: no route to fe80::1ff:fe23:4567:890a", ""),
        failed("host 4: rendezvous", "ci-user@gpu-d cannot connect to port 4711 of gpu-d: timed out", ""),
        warning("host name", "the name of this machine, secret-project-7.corp.example, has no address", "ask secret"),
        warning("data cache", "~/x, ./y and /mnt/team-x/data are slow", ""),
    ]
    checks = [Check(**{**vars(check), "section": "hosts" if "host " in check.name else "storage"}) for check in checks]
    text = bug_report(checks, Job(config))
    names = ("secret", "corp", "jdoe", "ci-user", "gpu-a", "gpu-d", "10.1.2.3", "fe80")
    for secret in (*names, "my run", "/home", "/mnt", "team", "~", "/y"):
        assert secret not in text, secret
    assert "failed: host 2: ssh: ssh ended with code 255: USER@host 2: Permission denied (publickey)." in text
    assert "failed: host 3: rendezvous: host 3 cannot connect to port 4711 of host 1: timed out" in text
    assert "a file cannot be renamed: Operation not permitted" in text
    assert "failed: host 4: rendezvous: host 4 cannot connect to port 4711 of host 4: timed out" in text
    assert "4 nodes with 8 ranks" in text
