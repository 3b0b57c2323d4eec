"""The catalogue of mistakes: the YAML files of this folder, one for each area. README.md says how to add one."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
_WIDTH = 110  # characters of an answer on one line
Answer = dict[str, str]  # key, message and hint of a mistake, as far as it has them


@dataclass(frozen=True)
class Mistake:
    area: str  # the name of its file
    name: str
    run: str  # the command, split as a shell does; {tmp} is the working directory
    code: int  # the exit code
    answers: tuple[Answer, ...] = ()
    files: dict[str, str | bytes] = field(default_factory=dict)  # in the working directory; `name/` is a folder
    stage: str = ""  # what files alone cannot make: see `prepared` in test_mistakes.py
    environment: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # words that show where the mistake is; `a|b` asks for one of two
    hint: tuple[str, ...] = ()  # words with which the user can go on; none of them is in the command
    starts: bool = False  # processes are started: the mistake shows only there


@cache
def mistakes() -> tuple[Mistake, ...]:
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        for entry in yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader) or []:
            found.append(Mistake(path.stem, **{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}))
    return tuple(found)


def accept(mistake: Mistake, answers: list[Answer]) -> None:
    """Replace the answers of a mistake, which are at the end of its entry, and leave the rest of its file."""
    with (FOLDER / f"{mistake.area}.yaml").open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes of pytest-xdist may rewrite others
        lines = file.read().splitlines()
        begin = lines.index(f"- name: {mistake.name}")
        inside = [number for number, line in enumerate(lines[begin + 1 :], begin + 1) if line and line[0] != " "]
        end = min(inside, default=len(lines))
        while not lines[end - 1]:
            end -= 1
        entry = lines[begin:end]
        if "  answers:" in entry:
            entry = entry[: entry.index("  answers:")]
        entry += ["  answers:", *map(_flow, answers)]
        file.seek(0)
        file.write("\n".join([*lines[:begin], *entry, *lines[end:], ""]))
        file.truncate()


def _flow(answer: Answer) -> str:
    """Format an answer as YAML, in a line if it fits."""
    parts = [f"{name}: {json.dumps(text, ensure_ascii=False)}" for name, text in answer.items()]
    between = ", " if sum(map(len, parts)) <= _WIDTH else ",\n     "
    return f"  - {{{between.join(parts)}}}"
