"""Examines torch and DeepSpeed on this machine in a separate process: `python -m engine.doctor.libraries REQUEST`.

They take seconds to import, and may kill the process that imports them. It prints a message for each question, as soon
as it is answered, so the questions before a crash have their answers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.control.link import Link
from engine.control.protocol import Answer, Failed, message_of
from engine.readers import parse_line
from engine.safe_path import safe_path
from engine.selection import first_line

_TIMEOUT_S = 180.0  # the first import from a network file system may take a minute


@dataclass(frozen=True)
class Request:
    """What depends on the config: which attention kernel is chosen."""

    on_gpus: bool
    dtype: str
    head_dim: int


@dataclass(frozen=True)
class Libraries:
    """The answers, by question. One that could not be answered has only an `error`."""

    answers: Mapping[str, Mapping[str, Any]]
    ended: str  # what happened to the process that asked

    def __getitem__(self, question: str) -> Mapping[str, Any]:
        """Return the answer to a question."""
        return self.answers.get(question) or {"error": self.ended}


def ask(config: Config) -> Libraries:
    """Start the process, and wait for its answers."""
    request = Request(uses_gpus(config), config.dtype, config.model.head_dim)
    command = [sys.executable, "-m", "engine.doctor.libraries", json.dumps(asdict(request))]
    ended = f"no answer for {_TIMEOUT_S:.0f} s"
    try:
        done = subprocess.run(
            command,
            env=os.environ | safe_path(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
        output, said = done.stdout, done.stderr.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), "no reason given")
        ended = f"killed by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else last
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    names, answers = [*_QUESTIONS], dict[str, Mapping[str, Any]]()
    for message in map(message_of, output.splitlines()):
        match message:  # None for the last line of a process that was killed
            case Answer(number, value):
                answers[names[number]] = value
            case Failed(number, why):
                answers[names[number]] = {"error": why}
    return Libraries(answers, ended)


def _torch(request: Request) -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda}


def _gpus(request: Request) -> dict[str, Any]:
    """The names of the GPUs that torch can use; or why it can use none."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:  # built without CUDA, no GPU, or an older driver
        return {"names": [], "why": str(error).strip().split("\n")[0].partition(". ")[0]}
    return {"names": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())], "why": None}


def _nccl(request: Request) -> dict[str, Any]:
    import torch

    if not torch.distributed.is_nccl_available():
        return {"version": None}
    return {"version": list(torch.cuda.nccl.version())}  # type: ignore[no-untyped-call]


def _kernel(request: Request) -> dict[str, Any]:
    import torch

    from engine.attention.kernels.choice import choose
    from engine.dtypes import DTYPES

    gpu = torch.cuda.is_available()
    # A recipe for CPUs says nothing about GPUs: then the choice for bf16 is shown, in which GPUs train.
    dtype = request.dtype if request.on_gpus or not gpu else "bf16"
    found = choose(torch.device("cuda" if gpu else "cpu"), DTYPES[dtype], request.head_dim)
    return {"name": found.name, "reason": found.reason, "rejected": list(found.rejected), "dtype": dtype}


def _deepspeed(request: Request) -> dict[str, Any]:
    from engine.zero import engine  # the only package that imports deepspeed

    return {"imports": engine.__name__}


_QUESTIONS = {"torch": _torch, "gpus": _gpus, "nccl": _nccl, "kernel": _kernel, "deepspeed": _deepspeed}


def main() -> None:
    """Answer all questions."""
    request = Request(**parse_line(sys.argv[1]))
    answers = Link(0, os.dup(1))
    os.dup2(2, 1)  # DeepSpeed prints when it is imported
    for number, look in enumerate(_QUESTIONS.values()):
        try:
            answers.send(Answer(number, look(request)))
        except Exception as error:  # whatever a broken installation raises, it is the answer
            answers.send(Failed(number, first_line(error)))


if __name__ == "__main__":
    main()
