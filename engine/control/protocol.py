"""The messages between the launcher, agents and ranks, and their form: a JSON object in a line, {kind: {field: value}}.

| from | to | messages |
|---|---|---|
| launcher | agent | `Again` `Start` `Stop` `Stacks` `Kill` `End` `Alive`; of the doctor, `Ask` |
| agent | launcher | `Join` `Hello` `Listening` `Beats` `Ended` `Asked`; to the doctor, `Answer` or `Failed` |
| rank | agent | `At` `Planned` `Pace` `Reduce` `Ask` |
| agent | rank | `Alive` `Stop` `Result` `Answer`; to the first of its node, `Meet` |
| agent | its parent | `Reduce` `Ask` |
| agent | its children | `Result` `Answer` |

Nothing in a message is executed, as unpickling could be; people can read it, and a line may follow the greeting of a
shell. Both ends must have the same version of ByteScale, since every node also computes the plans. Agents name the
version of the messages when they begin, and what an end does not know is a ProtocolError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.control.reduction import Operation
from engine.errors import BytescaleError, ExitCode, PreflightError
from engine.readers import parse_line
from engine.run.cause import Cause

PROTOCOL = 8  # raised whenever a message changes
_SHOWN = 40  # characters of a kind

Place = tuple[int, str, int]  # step, phase, and part of the phase: the number of the pass on this rank


class ProtocolError(BytescaleError):
    """The other end runs another version of ByteScale. The message follows the name of that end: see `by`."""

    code = ExitCode.PREFLIGHT

    def __init__(self, message: str) -> None:
        hint = "install the same version of ByteScale on all hosts, or share the folder that it is in"
        super().__init__(f"runs another version of ByteScale: {message}", hint=hint)

    def by(self, sender: str) -> PreflightError:
        """Make the error that names the process which has sent the message."""
        return PreflightError(f"{sender} {self}", hint=self.problems[0].hint)


class Message:
    """A message. Its kind is the name of its class in lower case."""

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Message:
        """Make a message of its fields. Raises KeyError, TypeError or ValueError for other fields than its own."""
        return cls(**fields)


@dataclass(frozen=True)
class RayNode:
    """What the agent of a node must know of the data plane on Ray (data.runtime=ray)."""

    number: int  # of the node
    version: str  # of Ray, that of the launcher
    memory: int  # bytes of Ray on this node
    address: str | None  # HOST:PORT of a cluster that runs already; None: the first node starts a head
    hosts: Sequence[Sequence[int]]  # the HDP ranks of each node; empty except for the first node
    start: str  # a random identifier of the start of the ranks


@dataclass(frozen=True)
class Work:
    """What the agent of a node runs."""

    folder: str  # the run folder
    ranks: Sequence[tuple[int, Sequence[str]]]  # and the program of each
    environment: Mapping[str, str]  # added to that of the agent
    gpus: bool
    alone: bool  # all agents run on the machine of the launcher, so no network can be cut
    peer: str | None  # a host whose route has the interface that other hosts reach; None if there is no other
    ray: RayNode | None = None  # None without Ray

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Work:
        """Make it of its fields in a message."""
        ray = fields.pop("ray")
        return cls(ray=None if ray is None else RayNode(**ray), **fields)


@dataclass(frozen=True)
class Tree:
    """The place of an agent among those of several nodes."""

    parent: tuple[str, int] | None  # address and port; None for the root
    children: int
    secret: str | None  # with which agents connect to each other, in hexadecimal; None if this one has it already
    ray: str | None = None  # HOST:PORT of the head of Ray that the first agent has started


class Beat(NamedTuple):
    """What an agent says of a rank each second."""

    at: Place | None
    age_s: float  # since it began that
    stopped: bool
    pace: float | None  # how many times longer its work takes than at full speed (engine/trainer/pace.py)
    entered: int  # collectives of the control plane, so far
    planned_s: float | None  # how long the plan of its step takes
    measured: tuple[int, float, float] | None  # of the last finished step: its number, seconds planned, and measured


def _beat(values: list[Any]) -> Beat:
    """Make a beat of a list of JSON, which has no tuples."""
    plain: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
    return Beat(*plain)


# From the launcher.


@dataclass(frozen=True)
class Again(Message):
    """End all ranks, and say `Hello`."""


@dataclass(frozen=True)
class Start(Message):
    """Start the ranks of a node. `tree` is None if there is only one node."""

    work: Work
    tree: Tree | None

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Start:
        tree = fields.pop("tree")
        return cls(work=Work.of_json(fields.pop("work")), tree=None if tree is None else Tree(**tree), **fields)


@dataclass(frozen=True)
class Stop(Message):
    """Save and end, to a rank; to an agent, pass that on."""


@dataclass(frozen=True)
class Stacks(Message):
    """Write what the threads of ranks are doing to their logs, and NCCL's records (engine/run/flight_recorder.py)."""


@dataclass(frozen=True)
class Kill(Message):
    """Kill all ranks."""


@dataclass(frozen=True)
class End(Message):
    """End with this exit code, to an agent that a scheduler has started."""

    code: int


@dataclass(frozen=True)
class Alive(Message):
    """The sender is there: each second from the launcher, each 5 s from an agent to its ranks."""


# To the launcher.


@dataclass(frozen=True)
class Hello(Message):
    """The agent is ready to start ranks."""

    protocol: int = PROTOCOL

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Hello:
        _check(fields)
        return cls(**fields)


@dataclass(frozen=True)
class Join(Message):
    """The first message of an agent that a scheduler has started."""

    node: int
    host: str
    protocol: int = PROTOCOL

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Join:
        _check(fields)
        return cls(**fields)


@dataclass(frozen=True)
class Listening(Message):
    """Where the child agents of the sender connect."""

    address: str
    port: int
    ray: str | None = None  # where the head of Ray listens


@dataclass(frozen=True)
class Beats(Message):
    """How each rank of the sender does."""

    ranks: Mapping[int, Beat]

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Beats:
        return cls({int(rank): _beat(values) for rank, values in fields.pop("ranks").items()}, **fields)


@dataclass(frozen=True)
class Ended(Message):
    """A rank has ended."""

    rank: int
    code: int  # -N if signal N killed it
    cause: Cause | None  # None if it wrote none
    age_s: float  # since the cause was written: the clocks of hosts differ
    said: str  # the last line of its log

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Ended:
        cause = fields.pop("cause")
        return cls(cause=None if cause is None else Cause.of_json(cause), **fields)


@dataclass(frozen=True)
class Asked(Message):
    """A scheduler has sent this signal to the agent."""

    signal: int


# From a rank, about its step.


@dataclass(frozen=True)
class At(Message):
    """The rank begins a phase of its step."""

    step: int
    phase: str
    part: int


@dataclass(frozen=True)
class Planned(Message):
    """How long the plan of this step takes on the planned hardware."""

    seconds: float


@dataclass(frozen=True)
class Pace(Message):
    """How many times longer than planned the work of the rank takes."""

    times: float


# Between ranks, through the tree of agents.


@dataclass(frozen=True)
class Reduce(Message):
    """Combine a value with those of all other ranks."""

    operation: Operation

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Reduce:
        return cls(Operation(*fields.pop("operation")), **fields)


@dataclass(frozen=True)
class Result(Message):
    """What the values of all ranks make."""

    operation: Operation

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Result:
        return cls(Operation(*fields.pop("operation")), **fields)


@dataclass(frozen=True)
class Ask(Message):
    """A question: of a rank, about the keys that all ranks share (keys.py); of the doctor, about a host."""

    ticket: int  # comes back with the answer
    question: str
    arguments: Sequence[Any]


@dataclass(frozen=True)
class Meet(Message):
    """How processes of this node may connect to those of other nodes."""

    address: str  # of this node, for the others
    secret: str  # of all of them, in hexadecimal

    def __repr__(self) -> str:
        return f"Meet({self.address})"


@dataclass(frozen=True)
class Answer(Message):
    """The answer to a question."""

    ticket: int
    value: Any


@dataclass(frozen=True)
class Failed(Message):
    """A question could not be answered."""

    ticket: int
    why: str


_KINDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in Message.__subclasses__()}


def _check(fields: Mapping[str, Any]) -> None:
    """Raise ProtocolError if the sender of these fields has another version of the messages."""
    if fields.get("protocol") != PROTOCOL:
        raise ProtocolError(f"version {fields.get('protocol', 1)} of the messages, here {PROTOCOL}")


def _plain(value: Any) -> dict[str, Any]:
    """Return the fields of an object in a message."""
    return value.to_json() if isinstance(value, Cause) else vars(value)


_ENCODER = json.JSONEncoder(default=_plain)  # made once: `json.dumps` makes one for each call with a default


def line_of(message: Message) -> bytes:
    """Encode a message as a line."""
    return _ENCODER.encode({type(message).__name__.lower(): vars(message)}).encode() + b"\n"


def message_of(line: bytes | bytearray) -> Message | None:
    """Decode the message of a line; None if the line is not a JSON object, such as the greeting of a remote shell.

    Raises ProtocolError for a message that this version does not have.
    """
    try:
        found = parse_line(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    kind, fields = next(iter(found.items()), ("", None))
    known = _KINDS.get(kind)
    if len(found) != 1 or known is None or not isinstance(fields, dict):
        raise ProtocolError(f"it sent the unknown message `{kind[:_SHOWN]}`")
    try:
        return known.of_json(fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"it sent `{kind}` with unexpected fields") from error
