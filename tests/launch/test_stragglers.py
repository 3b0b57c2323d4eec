"""Slow ranks are named once, and the speeds of hosts are what the next start plans with."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.cluster.mesh import Mesh
from engine.config.load import load
from engine.config.schema import Config
from engine.errors import ConfigError
from engine.job import Job
from engine.launch.schedulers.join import Joins
from engine.launch.schedulers.joined import Joined
from engine.launch.stragglers import Stragglers, with_speeds
from engine.run.folder import RunFolder
from tests.refusals import refused

NODES = Cluster((Node("a", 2), Node("b", 2, speed=50), Node("c", 1)), device_memory=100)


def noted(paces: list[float], cluster: Cluster = NODES, pp: int = 1) -> tuple[Stragglers, list[str]]:
    said = list[str]()
    found = Stragglers(cluster, Mesh(cluster.ranks // pp, pp=pp), said.append)
    for _ in range(2):
        for rank, pace in enumerate(paces):
            found.note(rank, pace)
    return found, said


def test_a_slow_rank_is_named_once_with_its_host_and_factor() -> None:
    found, said = noted([1.0, 1.1, 2.0, 4.8, 1.2])
    hint = "at the next start, cluster.speeds=measured gives this host less to do"
    assert said == [f"warning: rank 3 on b takes 2.2 times as long as others; {hint}"]
    assert found.speeds() == {"a": 100, "b": 25, "c": 90}, "in percent of the fastest: 1/1.1, 1/4.8, 1/1.2"


def test_of_two_ranks_the_slower_is_named() -> None:
    two = Cluster((Node("localhost", 2),), device_memory=100)
    found, said = noted([30.0, 10.0], two)
    assert said == ["warning: rank 0 on localhost takes 3.0 times as long as others"]
    assert found.speeds() == {"localhost": 100}, "the others wait for it anyway"


def test_a_rank_is_compared_with_those_of_its_stage() -> None:
    """Planned times of a stage with the head may be as wrong as these; the ranks are not slow for that."""
    two = Cluster((Node("a", 2), Node("b", 2)), device_memory=100)
    found, said = noted([3.0, 3.1, 1.0, 1.1], two, pp=2)
    assert said == [] and found.speeds() == {"a": 100, "b": 95}
    found, said = noted([3.0, 3.1, 1.0, 2.0], two, pp=2)
    assert [line.split(";")[0] for line in said] == ["warning: rank 3 on b takes 2.0 times as long as others"]
    assert found.speeds() == {"a": 100, "b": 50}
    assert noted([3.0, 1.0], Cluster((Node("a", 2),), device_memory=100), pp=2)[1] == [], "a rank a stage"


def test_in_a_pipeline_a_host_that_is_as_slow_as_planned_slows_no_other_down() -> None:
    """Plans give an HDP rank the speed of its slowest device, here d; the stage before it is as fast as ever."""
    hosts = [Node("a", 1), Node("b", 1), Node("c", 1)]
    found, said = noted([1.0, 1.0, 1.0, 2.0], Cluster((*hosts, Node("d", 1)), device_memory=100), pp=2)
    assert [line.split(" on ")[0] for line in said] == ["warning: rank 3"]
    assert found.speeds() == {"a": 100, "b": 100, "c": 100, "d": 50}
    found, said = noted([1.0, 1.0, 1.0, 2.0], Cluster((*hosts, Node("d", 1, speed=50)), device_memory=100), pp=2)
    assert said == [] and found.speeds() == {"a": 100, "b": 100, "c": 100, "d": 50}, "the same at each start"
    two = Cluster((Node("a", 2), Node("b", 2, speed=50)), device_memory=100)
    assert noted([1.0, 1.0, 1.0, 2.0], two, pp=2)[0].speeds() == {"a": 100, "b": 50}


def test_devices_of_a_tp_group_wait_for_the_slowest() -> None:
    said = list[str]()
    hosts = (Node("a", 1), Node("b", 1, speed=50), Node("c", 1), Node("d", 1))
    four = Cluster(hosts, device_memory=100)
    found = Stragglers(four, Mesh(2, tp=2), said.append)
    for rank, pace in enumerate([2.0, 2.0, 1.0, 1.0]):
        found.note(rank, pace)
    assert said == [], "rank 0 is as slow as planned, with rank 1"


def test_nothing_is_said_before_all_ranks_have_told_their_pace(tmp_path: Path) -> None:
    found, said = noted([1.0, 9.0, 1.0, 1.0])
    assert said == [] and found.speeds() == {}
    found.write(RunFolder(tmp_path))
    assert not RunFolder(tmp_path).speeds.exists()


@given(st.lists(st.floats(1.0, 1.2), min_size=5, max_size=5))
def test_ranks_that_differ_a_little_are_not_named(paces: list[float]) -> None:
    found, said = noted(paces)
    assert said == []
    assert all(5 <= speed <= 100 and speed % 5 == 0 for speed in found.speeds().values())


def config(tmp_path: Path, *more: str) -> Config:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2 speed=50%\nc slots=1\n")
    return load(["recipe=quickstart", f"run.out={tmp_path}", f"cluster.hostfile={hosts}", *more])


def test_the_next_start_plans_with_measured_speeds(tmp_path: Path) -> None:
    said, measured = list[str](), Job(config(tmp_path, "cluster.speeds=measured"))
    assert with_speeds(measured, said.append) is measured
    assert "there is no" in said.pop()
    noted([1.0, 1.1, 2.0, 4.8, 1.2])[0].write(RunFolder(tmp_path))
    frozen = with_speeds(measured, said.append)
    assert frozen.config.cluster.speeds == (100, 25, 90) and said == ["cluster.speeds=measured: b 25%, c 90%"]
    assert frozen.settings.cluster.speed.tolist() == [100, 100, 25, 25, 90]
    assert with_speeds(frozen, said.append) is frozen, "a restart plans with the same ones"
    given_ = Job(config(tmp_path))
    assert with_speeds(given_, said.append) is given_
    assert given_.cluster.speed.tolist() == [100, 100, 50, 50, 100], "those of the hostfile"


def test_a_joined_launch_plans_with_measured_speeds_and_keeps_them(tmp_path: Path) -> None:
    """A host that is as slow as planned keeps its speed, and is not called slow again."""
    said, folder = list[str](), RunFolder(tmp_path)
    joins = Joins(Joined("srun", "job", 0, 2, 0, 1, False, False), folder, {"GLOO_SOCKET_IFNAME": "lo"})
    shape = ["cluster.nodes=2", "cluster.ranks_per_node=1", "cluster.speeds=measured"]
    measured = joins.job(Job(load(["recipe=quickstart", f"run.out={tmp_path}", *shape])))
    for warnings in (1, 0):
        cluster = with_speeds(measured, said.append).cluster
        assert [node.host for node in cluster.nodes] == ["localhost", "node-1"]
        found, warned = noted([1.0, 2.0], cluster)
        assert len(warned) == warnings
        found.write(folder)
    assert said[1:] == ["cluster.speeds=measured: node-1 50%"]
    assert with_speeds(measured, said.append).config.cluster.speeds == (100, 50)


def test_damaged_speeds_and_too_few_are_refused(tmp_path: Path) -> None:
    measured = Job(config(tmp_path, "cluster.speeds=measured"))
    for content in ("{", "[1]", '{"a": "fast"}'):
        RunFolder(tmp_path).speeds.write_text(content)
        with refused(ConfigError, "cluster.speeds=measured"):
            with_speeds(measured, print)
    with refused(ConfigError, "cluster.speeds"):
        assert Job(config(tmp_path, "cluster.speeds=[100,80]")).cluster
