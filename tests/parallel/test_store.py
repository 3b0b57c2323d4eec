"""PyTorch finds the members of process groups over the agents; no port listens afterwards, and none for anyone else."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from engine.config.load import load
from engine.control.control import Control
from engine.control.keys import Keys
from engine.parallel.groups import close_listeners, join_groups
from engine.parallel.store import AgentStore, store_of
from tests.launch.ports import connected, listening
from tests.world import control, run_world


class Alone:
    """The control plane of a single rank, without agents."""

    def __init__(self) -> None:
        self._keys = Keys[str]()

    def ask(self, question: str, *arguments: Any) -> Any:
        ((_, _, answer),) = self._keys.ask("rank", 1, question, *arguments)
        return answer


def test_the_store_of_agents_answers_as_those_of_pytorch() -> None:
    """In all that process groups may ask of it, through C++ as they do."""

    def answers(store: dist.Store) -> list[Any]:
        prefixed = dist.PrefixStore("group", store).clone()
        prefixed.set("bytes", bytes(range(256)))  # type: ignore[arg-type]
        prefixed.set("text", "text")
        prefixed.wait(["bytes", "text"], timedelta(seconds=1))
        found = [prefixed.get("bytes"), prefixed.get("text"), prefixed.check(["bytes", "text"]), prefixed.check(["no"])]
        found += [prefixed.add("sum", 3), prefixed.add("sum", -1), prefixed.get("sum")]
        swaps = (("x", "1"), ("", "2"), ("2", "3"), ("x", "4"))
        found += [prefixed.compare_set("swapped", expected, value) for expected, value in swaps]
        return [*found, prefixed.delete_key("text"), prefixed.delete_key("text"), prefixed.check(["text"])]

    here: Any = Alone()
    assert answers(AgentStore(here)) == answers(dist.HashStore())


def ports() -> list[set[str]]:
    """Where a rank listens after it has joined its groups, and after it has closed what is left; its connections."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    groups, this = join_groups(load(["recipe=quickstart"]), control()), [psutil.Process()]
    before = listening(this)
    groups.control.largest(0)
    close_listeners()
    used = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - used
    assert used < 0.25, "gloo's thread must not spin over a listener that is gone"
    assert groups.sum(torch.ones(1)).item() == 2
    found = [before, listening(this), connected(this)]
    dist.destroy_process_group()
    # Under another prefix: the agents still have the addresses of the group that is gone.
    store = dist.PrefixStore("again", store_of(control()))
    dist.init_process_group("gloo", store=store, rank=groups.rank, world_size=2)
    return found


@pytest.mark.world
def test_ranks_of_one_host_listen_on_loopback_only_until_all_have_connected() -> None:
    assert run_world(2, ports) == [[{"127.0.0.1"}, set(), {"127.0.0.1"}]] * 2


def test_a_key_that_is_asked_for_each_second_is_seldom_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the thread of NCCL, on each of thousands of ranks. What is set of any other key is known at once."""
    asked, answers, now = list[Any](), iter([False, False, True]), [100.0]
    fake: Any = SimpleNamespace(ask=lambda *question: asked.append(question) or next(answers))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store, found = AgentStore(fake), []
    for _ in range(61):
        found.append(store.check(["group/exception_dump"]))
        now[0] += 1
    assert asked == [("check", ["group/exception_dump"])] * 3 and found == [False] * 60 + [True]
    answers = iter([False, True])
    assert [store.check(["mine", "remote_error"]) for _ in range(2)] == [False, True]


def test_a_rank_without_an_agent_has_a_store_of_its_own() -> None:
    store = store_of(Control(0))
    store.set("a", "b")
    assert store.get("a") == b"b" and isinstance(store, dist.HashStore)
