"""What is checked before a run uses Ray."""

from __future__ import annotations

import socket

from engine.remote.checks import address_problem


def test_an_address_whose_name_is_unknown_is_told_from_one_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert address_problem(f"127.0.0.1:{port}") is None
    closed = address_problem(f"127.0.0.1:{port}")
    unknown = address_problem(f"nowhere.invalid:{port}")
    assert closed is not None and "no Ray answers" in closed.message
    assert unknown is not None and "does not know the name nowhere.invalid" in unknown.message
    assert unknown.key == f"data.ray.address=nowhere.invalid:{port}"
