"""Decides whether a host name means this machine."""

from __future__ import annotations

import socket

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_local(host: str) -> bool:
    """True for a loopback name and for this machine's own host name."""
    return is_loopback(host) or host == socket.gethostname()


def is_loopback(host: str) -> bool:
    """True for names that every machine resolves to itself, so other hosts cannot connect to this one by them."""
    return host in _LOOPBACK
