"""Results of the doctor, in all states and of two hosts, with texts that are too long for a line."""

from __future__ import annotations

from dataclasses import replace

from engine.doctor.check import Check, failed, ok, skipped, warning

LONG = "a process may open 256 files, but 1,024 ranks need about 3,584 each, which is more than the hard limit of 1,024"
WAY_OUT = "let an administrator raise nofile to 3,584 in /etc/security/limits.conf, or in the limits of the job"


def all_states(fails: bool = False) -> list[Check]:
    """Make results, with a failed one if `fails`."""
    sections = {
        "software": [ok("python", "3.11.7", "3.11.7"), ok("torch", "2.13.0, built for CPUs", "2.13.0")],
        "devices": [skipped("GPUs", "no GPUs; cluster=local trains on CPUs")],
        "storage": [ok("run folder", "/data has 55.8 GiB free; 1.0 MiB written and renamed in 0.005 s")],
        "system": [(failed if fails else warning)("open files", LONG, WAY_OUT, "256 files")],
        "hosts": [
            ok("host 1: ssh", "gpu-a answers after 0.4 s", "0.4 s"),
            ok("host 1: clock", "the clock of gpu-a differs by +0.00 s (+- 0.001 s)", "+0.00 s"),
            ok("host 2: ssh", "gpu-b answers after 0.5 s", "0.5 s"),
            warning("host 2: clock", "the clock of gpu-b differs by +3.00 s (+- 0.001 s)", "use NTP", "+3.00 s"),
        ],
    }
    return [replace(check, section=section) for section, checks in sections.items() for check in checks]
