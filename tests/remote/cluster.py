"""A Ray of two hosts on this machine. Each host has a cache folder of its own, FOLDER/host-N."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.remote.node import NodeRay, token_of
from engine.remote.plane import START
from tests.remote.rays import said

_MEMORY = 400 << 20


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Start it; how to connect is in the environment."""
    nodes, token = list[NodeRay](), token_of(b"a secret")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder / "host-0"))
            nodes.append(head := NodeRay.start_head("127.0.0.1", 0, _MEMORY, token, folder / "ray-0.log"))
            patch.setenv("XDG_CACHE_HOME", str(folder / "host-1"))
            nodes.append(NodeRay.join(head.address, "127.0.0.1", 1, _MEMORY, token, folder / "ray-1.log"))
        assert [said(node) for node in nodes] == [["up"], ["up"]]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in head.environment.items():
                patch.setenv(name, value)
            patch.setenv(START, "1")
            yield
    finally:
        for node in reversed(nodes):
            node.end()
