from __future__ import annotations

from pathlib import Path

import pytest

import hostfiles
from engine.cluster.hostfile import Node, parse
from engine.errors import ConfigError

EXAMPLES = sorted(p for p in Path(hostfiles.__file__).parent.iterdir() if p.is_file() and p.suffix != ".py")


def test_hosts_come_in_order_without_comments_and_blank_lines() -> None:
    text = "# two hosts\n\nworker-1 slots=8\n  10.0.0.2   slots=4  # the small one\n\t\nme@gpu_3.site slots=1"
    assert parse(text, "hosts") == (Node("worker-1", 8), Node("10.0.0.2", 4), Node("me@gpu_3.site", 1))


def test_the_address_of_a_host_has_no_user() -> None:
    assert [node.address for node in parse("gpu-a slots=1\nme@gpu-b slots=1\nme@fe80::1 slots=1", "hosts")] == [
        *("gpu-a", "gpu-b", "fe80::1")
    ]


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("worker-1", "host worker-1 has no slots", "HOST slots=N"),
        ("worker-1 slots=0", "host worker-1 has 0 slots", "HOST slots=N"),
        ("worker-1 slots=100000000", "host worker-1 has 100,000,000 slots; at most 65,536 ranks", "HOST slots=N"),
        ("worker-1 slots=x", "'slots=x' is not slots=N", "HOST slots=N"),
        ("worker-1 slots=-1", "'slots=-1' is not slots=N", "HOST slots=N"),
        ("worker-1 slots=", "'slots=' is not slots=N", "HOST slots=N"),
        ("worker-1 slots=1.5", "'slots=1.5' is not slots=N", "HOST slots=N"),
        ("worker-1 8", "'8' is not slots=N", "HOST slots=N"),
        ("worker-1 slots = 8", "'slots' is not slots=N", "HOST slots=N"),
        ("worker-1 slots=8 slots=4", "'slots=4' is not speed=N% or memory=SIZE", "speed=50% memory=40GiB"),
        ("old slots=8 speed=0%", "'speed=0%' is not a speed from 1% to 100%", "for example speed=50%"),
        ("old slots=8 speed=101%", "'speed=101%' is not a speed", "for example speed=50%"),
        ("old slots=8 speed=50", "'speed=50' is not a speed", "write speed=N%, for example speed=50%"),
        ("old slots=8 speed=half", "'speed=half' is not a speed", "for example speed=50%"),
        ("old slots=8 memory=0", "'memory=0' is not a memory size from 1M to 1024T", "for example memory=40GiB"),
        ("old slots=8 memory=40", "'memory=40' is not a memory size from 1M to 1024T", "for example memory=40GiB"),
        ("old slots=8 memory=40GiBs", "'memory=40GiBs' is not a memory size", "for example memory=40GiB"),
        ("old slots=8 memory=-4GiB", "'memory=-4GiB' is not a memory size", "for example memory=40GiB"),
        (
            "old slots=8 memory=1025T",
            "'memory=1025T' is not a memory size from 1M to 1024T",
            "for example memory=40GiB",
        ),
        ("old slots=8 memory=9999999999T", "is not a memory size from 1M to 1024T", "for example memory=40GiB"),
        ("old slots=8 memory=", "'memory=' is not a memory", "write memory=SIZE, for example memory=40GiB"),
        ("old slots=8 memory", "'memory' is not a memory", "for example memory=40GiB"),
        ("old slots=8 speed=50% speed=60%", "host old: speed= is given twice", "remove one of them"),
        ("old slots=8 memory=1G speed=5% memory=2G", "host old: memory= is given twice", "remove one of them"),
        ("old speed=50% slots=8", "'speed=50%' is not slots=N", "HOST slots=N"),
        ("old slots=8 rack=3", "'rack=3' is not speed=N% or memory=SIZE", "for example speed=50% memory=40GiB"),
        ("good slots=2", "host good appears twice", "list each host once, with all of its slots"),
        ("GOOD slots=2", "host GOOD is also listed, as good", "list each host once, with all of its slots"),
        ("me@good. slots=2", "host me@good. is also listed, as good", "list each host once"),
        ("-oProxyCommand=x slots=1", "'-oProxyCommand=x' is not a host name", "HOST slots=N"),
        ("me@-oProxyCommand slots=1", "'me@-oProxyCommand' is not a host name", "HOST slots=N"),
        ("a;reboot slots=1", "'a;reboot' is not a host name", "HOST slots=N"),
        ("$(reboot) slots=1", "'$(reboot)' is not a host name", "HOST slots=N"),
        ("slots=8", "'slots=8' is not a host name", "HOST slots=N"),
    ],
)
def test_a_malformed_line_is_reported_with_its_place(line: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"good slots=2\n{line}\n", "hosts")
    (problem,) = caught.value.problems
    assert message in problem.message
    assert problem.key == "hosts:2"
    assert hint in str(problem.hint)


def test_an_address_in_another_form_is_the_same_host() -> None:
    with pytest.raises(ConfigError, match="host fe80:0::1 is also listed, as FE80::1"):
        parse("FE80::1 slots=1\nfe80:0::1 slots=1", "hosts")


def test_all_malformed_lines_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("a\nb slots=2\n# fine\nc slots=0\nb slots=2 x", "hosts")
    assert [problem.key for problem in caught.value.problems] == ["hosts:1", "hosts:4", "hosts:5"]


def test_a_line_may_set_speed_and_memory() -> None:
    text = "new slots=8\nold slots=4 speed=50% memory=40GiB\nodd slots=1 memory=1.5M speed=100%"
    old, odd = Node("old", 4, speed=50, memory=40 * 2**30), Node("odd", 1, speed=100, memory=1536 << 10)
    assert parse(text, "hosts") == (Node("new", 8, speed=100, memory=None), old, odd)


@pytest.mark.parametrize("text", ["", "\n \n", "# only a comment\n"])
def test_a_hostfile_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lists no host"):
        parse(text, "hosts")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_parse_and_are_commented(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert parse(text, path.name) and text.startswith("# ")


def test_there_are_examples() -> None:
    assert {"local", "two-nodes"} <= {path.name for path in EXAMPLES}
