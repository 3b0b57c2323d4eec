from __future__ import annotations

from pathlib import Path

import pytest

import hostfiles
from engine.cluster.hostfile import Node, parse
from engine.errors import ConfigError
from tests.refusals import refused

EXAMPLES = sorted(p for p in Path(hostfiles.__file__).parent.iterdir() if p.is_file() and p.suffix != ".py")


def test_hosts_come_in_order_without_comments_and_blank_lines() -> None:
    text = "# two hosts\n\nworker-1 slots=8\n  10.0.0.2   slots=4  # the small one\n\t\nme@gpu_3.site slots=1"
    assert parse(text, "hosts") == (Node("worker-1", 8), Node("10.0.0.2", 4), Node("me@gpu_3.site", 1))


def test_the_address_of_a_host_has_no_user() -> None:
    assert [node.address for node in parse("gpu-a slots=1\nme@gpu-b slots=1\nme@fe80::1 slots=1", "hosts")] == [
        *("gpu-a", "gpu-b", "fe80::1")
    ]


@pytest.mark.parametrize(
    "line",
    [
        *("worker-1", "worker-1 slots=0", "worker-1 slots=65537", "worker-1 slots=-1", "worker-1 slots=1.5"),
        *("old slots=8 speed=0%", "old slots=8 speed=101%", "old slots=8 speed=50"),
        *("old slots=8 memory=1048575", "old slots=8 memory=1025T", "old slots=8 memory=-4GiB"),
        *("old slots=8 speed=50% speed=60%", "good slots=2", "GOOD slots=2", "me@good. slots=2", "a;reboot slots=1"),
    ],
)
def test_a_malformed_line_is_reported_with_its_place(line: str) -> None:
    """tests/mistakes/hosts.yaml has what is said of each kind."""
    with refused(ConfigError, "hosts:2"):
        parse(f"good slots=2\n{line}\n", "hosts")


def test_all_malformed_lines_are_reported_together() -> None:
    with refused(ConfigError, "hosts:1", "hosts:4", "hosts:5"):
        parse("a\nb slots=2\n# fine\nc slots=0\nb slots=2 x", "hosts")


def test_a_line_may_set_speed_and_memory() -> None:
    text = "new slots=8\nold slots=4 speed=50% memory=40GiB\nodd slots=1 memory=1.5M speed=100%"
    old, odd = Node("old", 4, speed=50, memory=40 * 2**30), Node("odd", 1, speed=100, memory=1536 << 10)
    assert parse(text, "hosts") == (Node("new", 8, speed=100, memory=None), old, odd)


@pytest.mark.parametrize("text", ["", "\n \n", "# only a comment\n"])
def test_a_hostfile_without_hosts_is_refused(text: str) -> None:
    with refused(ConfigError, "hosts"):
        parse(text, "hosts")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_parse_and_are_commented(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert parse(text, path.name) and text.startswith("# ")


def test_there_are_examples() -> None:
    assert {"local", "two-nodes"} <= {path.name for path in EXAMPLES}
