"""Messages arrive as they were sent, and what another version of the program sends is refused."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from hashlib import blake2b
from typing import Any

import pytest

from engine.control import protocol
from engine.control.protocol import Beat, Message, ProtocolError, RayNode, Tree, Work, line_of, message_of
from engine.control.reduction import GATHER, MAX, Operation
from engine.errors import ExitCode, Problem
from engine.run.cause import Cause

WORK = Work("/run", [], {"A": "b"}, gpus=True, alone=False, peer="beta")
RAY = RayNode(0, "2.60.0", 1 << 32, None, [[0, 1], [2]], "1")
BEAT = Beat((3, "forward", 2), 1.5, False, None, 7, 2.5, (2, 2.5, 2.25))
CAUSE = Cause(ExitCode.DATA, Problem("gone", "data.path", "look"), time=1.5, whole=True)
# One at least of each kind.
MESSAGES = [
    protocol.Again(),
    protocol.Start(WORK, None),
    protocol.Start(replace(WORK, ray=RAY), Tree(None, 16, "00ff")),
    protocol.Start(replace(WORK, ray=replace(RAY, address="h:1")), Tree(None, 16, "00ff", "10.0.0.1:4712")),
    protocol.Stop(),
    protocol.Stacks(),
    protocol.Kill(),
    protocol.End(75),
    protocol.Alive(),
    protocol.Hello(),
    protocol.Join(1, "beta"),
    protocol.Listening("10.0.0.1", 4711),
    protocol.Listening("10.0.0.1", 4711, "10.0.0.1:4712"),
    protocol.Beats({}),
    protocol.Beats({0: BEAT, 11: Beat(None, 0.0, True, 1.25, 0, None, None)}),
    protocol.Ended(3, -9, None, 0.0, ""),
    protocol.Ended(3, 4, CAUSE, 2.5, "last words"),
    protocol.Asked(10),
    protocol.At(3, "forward", 2),
    protocol.Planned(2.5),
    protocol.Pace(1.25),
    protocol.Reduce(Operation("1", MAX, [1, 2**200, 0.1, math.inf])),
    protocol.Result(Operation("2", GATHER, {"0": {"a": None}})),
    protocol.Ask(5, "swap", ["key", "", "value"]),
    protocol.Meet("10.0.0.1", "00ff"),
    protocol.Answer(5, "value\n"),
    protocol.Failed(5, "why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    line = line_of(message)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert message_of(line) == message


def test_every_kind_is_among_them() -> None:
    assert {type(message) for message in MESSAGES} == set(Message.__subclasses__())


def test_the_version_is_raised_when_a_message_changes() -> None:
    """Other fields: raise PROTOCOL, and put the new digest here. Else hosts with other versions fail in a run."""
    kinds = [*Message.__subclasses__(), Work, RayNode, Tree]
    names = {kind.__name__: [field.name for field in fields(kind)] for kind in kinds}  # type: ignore[arg-type]
    digest = blake2b(json.dumps({**names, "Beat": Beat._fields}, sort_keys=True).encode(), digest_size=4).hexdigest()
    assert (protocol.PROTOCOL, digest) == (8, "bdf7ee67")


def test_a_program_and_a_parent_arrive() -> None:
    """JSON has lists only."""
    work = Work("/run", [(4, ["python", "-m", "engine.trainer"])], {}, gpus=False, alone=True, peer=None)
    found = message_of(line_of(protocol.Start(work, Tree(("10.0.0.1", 9), 0, None))))
    assert isinstance(found, protocol.Start) and found.tree is not None
    ((rank, program),) = found.work.ranks
    (address, port) = found.tree.parent or ("", 0)
    assert (rank, program, address, port) == (4, ["python", "-m", "engine.trainer"], "10.0.0.1", 9)


@pytest.mark.parametrize("line", [b"", b"Welcome to gpu-a!", b"[1]", b"\xff", b'"hello"', b"3"])
def test_a_line_without_a_message_is_none(line: bytes) -> None:
    assert message_of(line) is None


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"dance": {}}, "`dance`"),
        ({}, "``"),
        ({"hello": True}, "`hello`"),  # of version 1
        ({"join": {"node": 1, "host": "beta"}}, "version 1 of the messages, here"),
        ({"hello": {"protocol": protocol.PROTOCOL + 1}}, f"version {protocol.PROTOCOL + 1} of the messages, here"),
        ({"end": {}}, "`end`"),
        ({"end": {"code": 1, "more": 2}}, "`end`"),
        ({"start": {"job": {"folder": "/run"}, "tree": None}}, "`start`"),
        ({"beats": {"ranks": {"x": [None]}}}, "`beats`"),
        ({"ended": {"rank": 1, "code": 2, "age_s": 0, "said": ""}}, "`ended`"),
        ({"reduce": {"operation": 3}}, "`reduce`"),
        ({"alive": {}, "stop": {}}, "`alive`"),
        ({"x" * 10_000: {}}, "xxx"),
    ],
)
def test_what_another_version_sends_is_refused_with_what_it_is(found: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        message_of(json.dumps(found).encode())
    (problem,) = caught.value.problems
    assert caught.value.code == ExitCode.PREFLIGHT and named in problem.message and problem.hint
    assert len(problem.message) < 120
    assert caught.value.by("gpu-a").problems[0].message == f"gpu-a {problem.message}"
