"""Two hosts with a cache each, in one process: how they find each other, and what their ranks read."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.config.schema import Config
from engine.control.control import Control
from engine.control.keys import Keys
from engine.control.protocol import Meet
from engine.data.blocks.peers import Hosts
from engine.data.cache import IDENTITY, identity_of
from engine.data.corpus import Reader
from engine.data.inputs import rank_inputs
from engine.data.overview import Corpora
from engine.data.runtime.hosts import Meeting
from engine.data.runtime.local import LocalRuntime
from engine.data.runtime.runtime import PlannedSequences
from engine.data.steps import Cursor
from engine.folders import drafting, opened
from engine.job import Job
from engine.launch.prepare import write_facts
from engine.run.folder import RunFolder
from tests import world
from tests.data.runtime.mixed import mixed_config

pytestmark = pytest.mark.long


class Agents:
    """The keys that the agents of all nodes keep, and whether the identities are the same."""

    def __init__(self, nodes: int) -> None:
        self.keys, self.answers = Keys[int](), dict[int, Any]()
        self.digests, self.met, self.changed = list[str](), threading.Barrier(nodes), threading.Condition()

    def ask(self, rank: int, question: str, *arguments: Any) -> Any:
        with self.changed:
            self.answers.pop(rank, None)
            for member, _, answer in self.keys.ask(rank, 0, question, *arguments):
                self.answers[member] = answer
            self.changed.notify_all()
            self.changed.wait_for(lambda: rank in self.answers, 20)
            return self.answers.pop(rank)


class HostControl(Control):
    """The link of the first rank of a node to its agent."""

    def __init__(self, rank: int, agents: Agents) -> None:
        super().__init__(rank)
        self._agents = agents

    def is_same(self, digest: str) -> bool:
        self._agents.digests.append(digest)
        self._agents.met.wait(20)
        return len({*self._agents.digests}) == 1

    def meeting(self) -> Meet:
        return Meet("127.0.0.1", "00ff")

    def ask(self, question: str, *arguments: Any) -> Any:
        return self._agents.ask(self.rank, question, *arguments)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Two nodes of two ranks."""
    monkeypatch.setattr("engine.data.runtime.process._CONTEXT", world._CONTEXT)
    return mixed_config(tmp_path, monkeypatch, "cluster=local", "cluster.nodes=2", "cluster.ranks_per_node=2")


def with_cache(config: Config, cache: Path) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"cache": str(cache)})})


def prepared(config: Config, root: Path) -> RunFolder:
    """The run folder, as a launcher on the first host prepares it, which has packed nothing."""
    folder = RunFolder(root)
    root.mkdir()
    corpora = Corpora(config)
    corpora.are_few = False
    write_facts(folder, config, corpora, 0)
    return folder


def open_hosts(pool: ThreadPoolExecutor, folder: RunFolder, configs: Sequence[Config]) -> list[LocalRuntime]:
    """Open the runtimes of the first ranks of nodes, at the same time. Planning processes end with their thread."""
    agents = Agents(len(configs))
    found = [
        pool.submit(LocalRuntime, folder, Job(config), HostControl(2 * node, agents))
        for node, config in enumerate(configs)
    ]
    return [one.result() for one in found]


def test_ranks_of_hosts_with_a_cache_each_read_what_those_of_one_cache_read(tmp_path: Path, config: Config) -> None:
    caches = [tmp_path / "cache-0", tmp_path / "cache-1"]
    configs = [with_cache(config, cache) for cache in caches]
    folder, reader = prepared(configs[0], tmp_path / "run"), Reader(Corpora(config).sources, config.model.vocab)
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        hosts = [stack.enter_context(closing(one)) for one in open_hosts(pool, folder, configs)]

        def check(planned: list[PlannedSequences]) -> int:
            """Compare what the first rank of each host reads."""
            micros = 0
            for rank, (runtime, one) in enumerate(zip(hosts, planned, strict=True)):
                assert one.plan.digest == planned[0].plan.digest and one.files is not None
                read = runtime.input_reader(one)
                for micro in one.plan.of_rank(2 * rank):
                    found, expected = read(micro), rank_inputs(reader, one.table, micro)
                    assert found.tokens.tolist() == expected.tokens.tolist()
                    assert found.labels.tolist() == expected.labels.tolist()
                    micros += 1
            return micros

        sets = [*pool.map(lambda one: one.validation(Cursor().order), hosts)]
        assert sets[0].keys() == sets[1].keys() == {"texts", "rows", "packed"}
        assert sum(check([one[name] for one in sets]) for name in sets[0]) > 3
        cursor, micros = Cursor(), 0
        for _ in range(5):
            for runtime in hosts:
                runtime.request(cursor)
            planned = [runtime.take() for runtime in hosts]
            micros += check([*planned])
            cursor = planned[0].after
        assert micros > 10
        kept = [sorted(path.name for path in cache.rglob("step-*")) for cache in caches]
        assert kept == [[f"step-{step}.{rank}" for step in (4, 5) for rank in ranks] for ranks in ((0, 1), (2, 3))]
    packed = [{path.stem for path in cache.rglob("*.idx")} for cache in caches]
    assert packed[0] and packed[1] and not packed[0] & packed[1], "each block is packed once"
    assert all([*cache.glob(".*")] == [cache / IDENTITY] for cache in caches)


def test_hosts_that_share_a_cache_do_not_meet(tmp_path: Path, config: Config) -> None:
    """Nothing listens, and ranks read the cache."""
    agents = Agents(2)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(Meeting, Job(config), HostControl(2 * node, agents), True) for node in range(2)]
        found = [one.result() for one in made]
    assert not any(one.separate or one.others for one in found) and not agents.keys._values
    assert len({*agents.digests}) == 1 and (tmp_path / "cache" / IDENTITY).exists()


def test_each_host_learns_the_addresses_of_the_others(tmp_path: Path, config: Config) -> None:
    """Of hosts that share a cache, one is asked."""
    caches = [tmp_path / "a", tmp_path / "b"]
    agents = Agents(2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [Job(with_cache(config, cache)) for cache in caches]
        made = [pool.submit(Meeting, job, HostControl(2 * node, agents), True) for node, job in enumerate(jobs)]
        first, second = (one.result() for one in made)
    assert first.others is not None and second.others is not None
    one, other = first.others.hosts, second.others.hosts
    assert isinstance(one, Hosts) and (one.identity, other.identity) == (identity_of(caches[0]), identity_of(caches[1]))
    assert one.others == {other.identity: ("127.0.0.1", other.port)} and other.others[one.identity][1] == one.port
    assert [*first.others.ranks] == [0, 1] and [*second.others.ranks] == [2, 3]
    left = first.others.files
    assert left.is_dir()
    first.close()
    second.close()
    assert not left.exists()


def test_rank_files_of_a_run_that_was_killed_are_removed_by_the_next(tmp_path: Path, config: Config) -> None:
    """But not those of a run that goes on."""
    cache = tmp_path / "cache"
    dead, alive = (cache / f".writing-ranks.{digit * 16}" for digit in "ab")
    (dead / "ranks").mkdir(parents=True, mode=0o700)
    dead.chmod(0o700)
    (dead / ".draft").touch(mode=0o600)
    (dead / "ranks" / "step-1.0").touch()
    with opened(cache) as folder, drafting(cache / "ranks", folder, cleans=False) as draft:
        draft.path.exists()
        one = config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": 1})})
        Meeting(Job(one), Control(0), True)
        assert not dead.exists() and draft.place.exists()
        alive = draft.place
    assert not alive.exists()


@contextmanager
def readable() -> Iterator[Path]:
    """A cache of another user. Folders of pytest are not for others."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        cache, user = Path(folder) / "cache", os.geteuid()
        cache.mkdir()
        cache.chmod(0o555)
        try:
            if user == 0:
                os.seteuid(65534)
            yield cache
        finally:
            os.seteuid(user)


def test_hosts_that_can_only_read_a_cache_do_not_meet(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """In such a cache all must be packed, and rank files could not be written."""
    names = iter(range(100))
    monkeypatch.setattr(socket, "gethostname", lambda: f"host-{next(names)}")
    agents = Agents(2)
    with readable() as cache, ThreadPoolExecutor(2) as pool:
        job = Job(with_cache(config, cache))
        made = [pool.submit(Meeting, job, HostControl(2 * node, agents), True) for node in range(2)]
        found = [one.result() for one in made]
    assert not any(one.separate or one.others for one in found) and len({*agents.digests}) == 1


def no_links(*_: object) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_an_identity_is_written_once_and_a_damaged_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are no hard links."""
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr("engine.data.cache._PAUSE_S", 0.001)
    with ThreadPoolExecutor(8) as pool:
        (first,) = {*pool.map(lambda _: identity_of(tmp_path / "cache"), range(40))}
    assert identity_of(tmp_path / "cache") == first != identity_of(tmp_path / "other")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [IDENTITY]
    (tmp_path / "cache" / IDENTITY).write_text("")
    assert len(identity_of(tmp_path / "cache")) == 32 and identity_of(tmp_path / "cache") != first
