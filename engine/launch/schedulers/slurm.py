"""Slurm: the script that sbatch gets, and srun inside an allocation. Both start `bytescale train` once on each node.

The processes then join each other (engine/launch/schedulers/join.py). Slurm signals them when the time is nearly over;
they save a checkpoint and end with 75, and the script has the job queued again. When a node has failed, Slurm does that
itself: srun waits for the tasks of that node until Slurm has noticed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from engine.config import keys
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.control.signals import handled
from engine.errors import ConfigError, ExitCode, PreflightError
from engine.run.folder import RunFolder
from engine.safe_path import safe_path

# One task of a node has all of its cores. When one task has ended, the others do so within seconds, with the same code;
# with --kill-on-bad-exit srun would kill them at once, and end with the code of the kill. A task that does not end is
# killed after a time in which Slurm has noticed that its node has failed (SlurmdTimeout, 300 s by default).
_SRUN = ("--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=600")
_SIZES = ("--exclusive", "--cpus-per-task", "--mem", "-c")  # with one of them in slurm.extra, whole nodes are not asked
_PLAIN = re.compile(r"[\w./:@%+,=-]+")


def train_words(words: Sequence[str]) -> list[str]:
    """Return the command that trains on one node: this Python, with the words of the command line."""
    variables = [f"{name}={value}" for name, value in safe_path().items()]
    return [*(["env", *variables] if variables else []), sys.executable, "-m", "bytescale_cli", *words]


def script(config: Config, folder: RunFolder, words: Sequence[str]) -> str:
    """Return the script for sbatch that trains with these words of the command line. Raises ConfigError."""
    slurm, cluster = config.slurm, config.cluster
    log = str(folder.logs.absolute()).replace("%", "%%") + "/slurm-%j.log"
    asked: list[tuple[str, object]] = [
        ("job-name", f"bytescale-{Path(config.recipe).stem}"),
        ("nodes", cluster.nodes),
        ("ntasks-per-node", 1),
        *([("gres", f"gpu:{cluster.ranks_per_node}")] if uses_gpus(config) else []),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("time", slurm.time),
        ("signal", f"USR1@{slurm.grace}"),
        ("open-mode", "append"),
        ("output", log),
        ("chdir", str(Path.cwd())),
    ]
    options = [f"--{name}={_quoted(str(value))}" for name, value in asked if value is not None]
    options.append("--requeue")
    for option in slurm.extra:
        if not option.startswith("-") or not option.isprintable():
            hint = f"for example {keys.example('slurm.extra')}"
            raise ConfigError(f"{option!r} is not an option of sbatch", key="slurm.extra", hint=hint)
    # Unless the user requests a part of a node, the job gets whole nodes with all their memory.
    if not any(option.split("=")[0].split()[0] in _SIZES for option in slurm.extra):
        options += ["--exclusive", "--mem=0"]
    options += slurm.extra
    command = shlex.join(["srun", f"--nodes={cluster.nodes}", f"--ntasks={cluster.nodes}", *_SRUN, *train_words(words)])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "",
            "trap : TERM USR1  # the tasks get these signals, too; this script waits for them",
            command,
            "code=$?",
            'case "$code:$(scontrol --oneliner show job "$SLURM_JOB_ID")" in',
            f"{int(ExitCode.PREEMPTED)}:*JobState=RUNNING*)  # saved a checkpoint, and the job was not cancelled",
            '    scontrol requeue "$SLURM_JOB_ID" ;;',
            "esac",
            'exit "$code"',
            "",
        ]
    )


def _quoted(value: str) -> str:
    """Quote a value of a line `#SBATCH`, which knows double quotes only. Raises ConfigError if that is not possible."""
    if _PLAIN.fullmatch(value):
        return value
    if '"' in value or "\\" in value or not value.isprintable():
        raise ConfigError(f"{value!r} cannot be written in a line #SBATCH", key="--launcher slurm", hint="rename it")
    return f'"{value}"'


def submit(text: str, path: Path) -> str:
    """Submit a script and return the number of the job. Raises PreflightError with the message of sbatch.

    sbatch reads the text itself: its copy at `path`, in the run folder, may be one that other users can replace.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    except FileNotFoundError as error:
        raise _missing("sbatch") from error
    if done.returncode:
        # The last line is the outcome, or advice; without a controller, the lines before it describe what sbatch tried.
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("Try ")]
        said = re.sub(r"^(sbatch: )?((error|fatal): )?", "", lines[-1]) if lines else f"exit code {done.returncode}"
        hint = f"`sbatch {shlex.quote(str(path))}` shows all of it; check slurm.*, and that `sinfo` answers"
        raise PreflightError(said, key="sbatch", hint=hint)
    return done.stdout.strip().split(";")[0]


def srun_command(nodes: int, words: Sequence[str]) -> list[str]:
    """Return the command that trains on nodes of this allocation.

    With --overlap it also starts where a step has the resources already: the shell in which the user types.
    """
    return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--overlap", *_SRUN, *train_words(words)]


def allocated_nodes(environment: Mapping[str, str]) -> int | None:
    """Return the number of nodes of the allocation in which this process runs; None outside."""
    found = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES")
    return int(found) if environment.get("SLURM_JOB_ID") and found and found.isdecimal() else None


def run_srun(command: Sequence[str]) -> int:
    """Run srun and return its exit code. A request to stop is passed on to all nodes. Raises PreflightError."""
    try:
        # In a separate session: srun treats Ctrl-C as a question, and a second one as an order to kill.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except FileNotFoundError as error:
        raise _missing("srun") from error

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGUSR1)

    before = {number: signal.signal(number, pass_on) for number in handled()}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _missing(program: str) -> PreflightError:
    host = os.uname().nodename
    return PreflightError(
        f"{program} is not installed on {host}", key="--launcher slurm", hint="use a login node of Slurm"
    )
