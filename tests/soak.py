"""`make soak` harms small runs, at exact and at random moments, and writes the tables in docs/reliability.md.

    python -m tests.soak [--moments 50] [--seed N] [--only PART]

Takes about ten minutes, and ten more for 50 moments. After each fault the same command goes on, and after all of them
losses and ledger are those of a run that nobody touched. Exits with an AssertionError where they are not.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from engine.control.chaos import Fault
from engine.launch.chaos import harm
from engine.run.folder import RunFolder
from engine.run.status import is_locked
from tests.faults import End, Launcher, command, documents, ledger, losses, processes_of, ranks_of
from tests.root import ROOT

PHASES = ("data", "forward", "backward", "reduce", "update", "save", "write", "rename", "verify")
OF_CHECKPOINTS = ("save", "write", "rename")
MESH = ["parallel.tp=2", "parallel.pp=2", "cluster.ranks_per_node=8"]  # and two HDP ranks
EVERY = 3  # steps between checkpoints, in tests/faults.py
KILLED, STOPPED = "was killed by SIGKILL", "was stopped by a signal"
PAGE = ROOT / "docs" / "reliability.md"
TITLES = {
    "phases": "At each phase of a step",
    "mesh": "On a mesh of tp 2, pp 2 and two HDP ranks",
    "others": "Signals, agents and launchers",
    "conditions": "What stays after a restart, and a slow rank",
    "disk": "A full disk",
}
BEGIN, FINISH = "<!-- written by `make soak`: {} -->\n", "<!-- end -->\n"

Row = tuple[str, str, str, str, str]  # fault, rank and phase, exit code, cause, seconds


def cause_of(said: str) -> str:
    """Return the line that says why a start ended."""
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    return re.sub(r"^error: (\S*/\S*: )?", "", lines[-1]) if lines else ""


def row(fault: str, where: str, end: End) -> Row:
    found = fault, where, str(end.code), cause_of(end.said), f"{end.after_s:.1f}"
    print(" | ".join(found), flush=True)
    return found


def at_each_phase(folder: Path, data: Path) -> list[Row]:
    """SIGKILL and SIGSTOP at each phase, and a network that fails: each start of one run gets one, in later steps."""
    out, rows = folder / "phases", list[Row]()
    faults = [(name, phase) for name in ("kill-rank", "stop-rank") for phase in PHASES] + [("cut-link", "forward")]
    steps = EVERY * (len(faults) + 2)
    for number, (name, phase) in enumerate(faults, start=1):
        rank = 0 if phase == "rename" else 1
        launcher = Launcher(command(out, data, steps), out)
        step = 0 if phase == "verify" else EVERY * number + (0 if phase in OF_CHECKPOINTS else 2)
        launcher.plant(rank, Fault(name, phase, step))
        end = launcher.end()
        shown = {"kill-rank": "SIGKILL", "stop-rank": "SIGSTOP", "cut-link": "connections cut"}[name]
        rows.append(row(shown, f"rank {rank}, {phase}", end))
        expected = {
            "kill-rank": (137, f"rank {rank} {KILLED}"),
            "stop-rank": (124, f"rank {rank} {STOPPED}"),
            "cut-link": (124, "lost its connection to another rank"),
        }[name]
        assert (end.code, expected[1] in end.said) == (expected[0], True), end.said
        assert name != "stop-rank" or end.after_s < 10, end.after_s
    goes_on(out, data, steps, folder / "phases-whole")
    return rows


def on_a_mesh(folder: Path, data: Path) -> list[Row]:
    """SIGKILL of each of the eight ranks of a mesh, at ten moments of one run."""
    out, rows, moments = folder / "mesh", list[Row](), [*PHASES[:3], "transfer", *PHASES[3:]]
    steps = EVERY * (len(moments) + 2)
    for number, phase in enumerate(moments, start=1):
        rank = 0 if phase == "rename" else number % 8
        launcher = Launcher(command(out, data, steps, *MESH), out)
        step = 0 if phase == "verify" else EVERY * (number - 1) + (0 if phase in OF_CHECKPOINTS else 2)
        launcher.plant(rank, Fault("kill-rank", phase, step))
        end = launcher.end()
        rows.append(row("SIGKILL", f"rank {rank}, {phase}", end))
        assert (end.code, end.said.count("error: "), f"rank {rank} {KILLED}" in end.said) == (137, 1, True), end.said
    goes_on(out, data, steps, folder / "mesh-whole", *MESH)
    return rows


def goes_on(out: Path, data: Path, steps: int, whole: Path, *more: str) -> None:
    """Let a harmed run finish, and compare it with one that nobody touches."""
    for one in (out, whole):
        arguments = [*command(one, data, steps, *more), *(["run.chaos=true"] if one == out else [])]
        done = subprocess.run(arguments, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert losses(out) == losses(whole) and len(losses(whole)) == steps
    assert ledger(out) == ledger(whole)


def to_others(folder: Path, data: Path) -> list[Row]:
    """Signals and a notice, and SIGKILL and SIGSTOP of the agent and of the launcher, all in one run."""
    out, steps, notice = folder / "others", 400, folder / "notice"
    rows = list[Row]()

    def agent(launcher: Launcher) -> int:
        children = psutil.Process(launcher.process.pid).children()
        return next(child.pid for child in children if "engine.launch.agents.agent" in child.cmdline())

    cases: list[tuple[str, str, int, Callable[[Launcher], object]]] = [
        ("SIGTERM", "launcher", 75, lambda one: one.process.terminate()),
        ("SIGUSR1", "launcher", 75, lambda one: one.process.send_signal(signal.SIGUSR1)),
        ("notice file", "a host", 75, lambda one: notice.touch()),
        ("SIGKILL", "agent", 137, lambda one: os.kill(agent(one), signal.SIGKILL)),
        ("SIGSTOP", "agent", 124, lambda one: os.kill(agent(one), signal.SIGSTOP)),
        ("SIGKILL", "launcher", -9, lambda one: one.process.kill()),
    ]
    for fault, whom, code, happen in cases:
        launcher = Launcher(command(out, data, steps, f"run.notice_file={notice}"), out)
        launcher.wait_for_steps(2)
        harmed = time.time()
        happen(launcher)
        end = launcher.end(harmed)
        notice.unlink(missing_ok=True)
        rows.append(row(fault, whom, end))
        assert end.code == code, end.said
    launcher = Launcher(command(out, data, steps), out)
    launcher.wait_for_steps(1)
    harmed, second = time.time(), out.with_name("second")
    done = subprocess.run([*command(out, data, steps), "run.chaos=true"], capture_output=True, text=True)
    rows.append(row("second launcher", "same folder", End(done.returncode, done.stderr, time.time() - harmed)))
    assert done.returncode == 73 and "another run is using this folder" in done.stderr, done.stderr
    assert launcher.process.poll() is None and not second.exists(), "the first goes on"
    launcher.process.terminate()
    assert launcher.end(time.time()).code == 75
    goes_on(out, data, steps, folder / "others-whole", f"run.notice_file={notice}")
    return rows


def that_stay(folder: Path, data: Path) -> list[Row]:
    """A crash loop, a loss that is not finite, a damaged checkpoint, and a slow rank."""
    rows, out = list[Row](), folder / "loop"
    launcher = Launcher(command(out, data, 12, "run.restarts=9"), out)
    launcher.plant(1, Fault("kill-rank", "forward", 5, times=9))
    end = launcher.end()
    rows.append(row("SIGKILL, again and again", "rank 1, forward", end))
    assert end.code == 93 and "step 5 failed 3 times, the last time because rank 1" in end.said, end.said
    for left in (RunFolder(out).chaos / "rank-1").iterdir():
        left.unlink()
    goes_on(out, data, 12, folder / "loop-whole")

    said = harm(out, Fault("corrupt-checkpoint"), 0)
    launcher = Launcher(command(out, data, 15), out)
    harmed = time.time()
    end = launcher.end(harmed)
    damaged = re.search(r"step-\d+", said)
    assert end.code == 0 and damaged and f"{damaged[0]} is damaged" in end.said, end.said
    rows.append(("bit of a checkpoint flipped", "before a start", "0", "an older checkpoint is used", "-"))

    rates, diverges = ["optimizer.lr=1e20", "optimizer.warmup_steps=0"], folder / "nan"
    launcher = Launcher(command(diverges, data, 20, *rates), diverges)
    end = launcher.end()
    rows.append(row("NaN", "any rank", end))
    assert end.code == 2 and "training diverged at step" in end.said and "documents data:" in end.said, end.said

    slow = folder / "slow"
    launcher = Launcher(command(slow, data, 60, "capacity=512", "planner=balanced"), slow)
    launcher.plant(1, Fault("slow-rank", factor=4.0))
    end = launcher.end(time.time())
    (warned,) = [line for line in end.said.splitlines() if "times as long as others" in line]
    assert end.code == 0 and warned.startswith("warning: rank 1 on localhost takes "), warned
    rows.append(("passes take 4 times as long", "rank 1", "0", warned, "-"))
    return rows


def full_disk(folder: Path, data: Path) -> list[Row]:
    """A disk without a free byte, in the middle of a run. Needs root, to mount a small one."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(disk)], capture_output=True).returncode:
        print("no full disk: mounting a small one is not allowed here")
        return []
    try:
        out, steps = disk / "run", 60
        launcher = Launcher(command(out, data, steps), out)
        launcher.wait_for_steps(4)
        harmed = time.time()
        harm(out, Fault("fill-disk"), 0)
        end = launcher.end(harmed)
        assert end.code == 74, end.said
        found = [row("disk full", "run folder", end)]
        (RunFolder(out).chaos / "ballast").unlink()
        goes_on(out, data, steps, folder / "disk-whole")
        return found
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def at_random_moments(folder: Path, data: Path, moments: int, seed: int) -> None:
    """SIGKILL or SIGSTOP of a rank, the agent or the launcher, at random moments of a run."""
    drawn, out, whole, steps = random.Random(seed), folder / "random", folder / "random-whole", 8 * moments + 100
    print(f"{moments} random moments, seed {seed}")
    for number in range(moments):
        if number and max(losses(out)) > steps - 100:
            print("the run is nearly done: no more moments")
            break
        launcher = Launcher(command(out, data, steps), out)
        launcher.wait_for_steps(1)
        time.sleep(drawn.uniform(0, 1.5))
        ranks = ranks_of(launcher.process)
        victim = drawn.choice([*ranks, psutil.Process(ranks[0].ppid()), psutil.Process(launcher.process.pid)])
        kills = drawn.random() < 0.7 or victim.pid == launcher.process.pid
        name = "launcher" if victim.pid == launcher.process.pid else "rank" if victim in ranks else "agent"
        harmed = time.time()
        victim.send_signal(signal.SIGKILL if kills else signal.SIGSTOP)
        end = launcher.end(harmed)
        expected = -9 if name == "launcher" else 137 if kills else 124
        shown = f"moment {number + 1}: {'SIGKILL' if kills else 'SIGSTOP'} of {name}, code {end.code}"
        print(f"{shown}, {end.after_s:.1f} s, step {len(losses(out))}: {cause_of(end.said)}", flush=True)
        assert end.code == expected, end.said
        assert not processes_of(out) and not is_locked(out / ".lock")
        if name == "rank":
            assert f"rank {ranks.index(victim)} was" in end.said, end.said
    done = max(losses(out))
    goes_on(out, data, steps, whole)
    print(f"all losses equal; faults in the first {done} of {steps} steps")


def write(part: str, rows: list[Row]) -> None:
    """Write the table of a part into the page."""
    lines = [
        "",
        f"{TITLES[part]}:",
        "",
        "| fault | at | exit code | message | s until the end |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in one)} |" for one in rows]
    begin = BEGIN.format(part)
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    assert found, f"{PAGE} has no place for {part}"
    after = rest.partition(FINISH)[2]
    PAGE.write_text(f"{before}{begin}{chr(10).join(lines)}\n\n{FINISH}{after}", encoding="utf-8")


def main() -> None:
    """Run all of it, or a part."""
    harming = (at_each_phase, on_a_mesh, to_others, that_stay, full_disk)
    parts = dict(zip(TITLES, harming, strict=True))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50, help="random moments")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random moments")
    parser.add_argument("--only", choices=[*parts, "moments"], help="a part")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        data = documents(folder / "data")
        for part, harms in parts.items():
            if options.only in (None, part) and (rows := harms(folder, data)):
                write(part, rows)
        if options.only in (None, "moments"):
            at_random_moments(folder, data, options.moments, options.seed)


if __name__ == "__main__":
    main()
