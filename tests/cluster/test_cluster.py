from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster, nodes_of
from engine.cluster.hostfile import Node
from engine.config import schema
from engine.errors import ConfigError
from tests.refusals import refused

UNEVEN = Cluster((Node("a", 2), Node("b", 1), Node("c", 3)), device_memory=100)


def config(hostfile: Path | None = None, nodes: int = 1) -> schema.Cluster:
    path = None if hostfile is None else str(hostfile)
    sizes = {"ranks_per_node": 4, "device_memory": 2**30, "host_memory": 2**20, "headroom": 0.0}
    return schema.Cluster(name="local", nodes=nodes, hostfile=path, calibration=None, speeds="hostfile", **sizes)


def cluster_of(config: schema.Cluster, parallel: schema.Parallel | None = None) -> Cluster:
    """The cluster of a config; of its HDP ranks with `parallel`."""
    found = Cluster.of(config, nodes_of(config))
    return found if parallel is None else found.hdp(parallel)


def test_ranks_are_numbered_node_by_node() -> None:
    assert UNEVEN.ranks == 6
    assert [UNEVEN.place(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert UNEVEN.node_of.tolist() == [0, 0, 1, 2, 2, 2]


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(IndexError):
        UNEVEN.place(rank)


def test_without_a_hostfile_nodes_are_equal() -> None:
    assert cluster_of(config()) == Cluster((Node("localhost", 4),), 2**30)
    assert cluster_of(config(nodes=3)).ranks == 12


def test_a_hostfile_overrides_nodes_and_ranks_per_node(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=5\n")
    assert cluster_of(config(hosts, nodes=9)).nodes == (Node("a", 2), Node("b", 5))


def test_a_byte_order_mark_is_not_part_of_the_first_host(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfa slots=2\n")
    assert cluster_of(config(file)).nodes == (Node("a", 2),)


def test_malformed_lines_are_reported_by_file_and_line(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb\n")
    with refused(ConfigError, f"{hosts}:2"):
        cluster_of(config(hosts))


def test_a_missing_hostfile_is_an_error_without_fallback(tmp_path: Path) -> None:
    with refused(ConfigError, "cluster.hostfile"):
        cluster_of(config(tmp_path / "nope"))


def test_a_folder_or_a_binary_file_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, binary):
        with refused(ConfigError, "cluster.hostfile"):
            cluster_of(config(path))


def test_ranks_have_the_speed_and_memory_of_their_node() -> None:
    mixed = Cluster((Node("new", 2), Node("old", 1, speed=50, memory=10)), device_memory=100)
    assert mixed.node_of.tolist() == [0, 0, 1]
    assert mixed.speed.tolist() == [100, 100, 50]
    assert mixed.memory.tolist() == [100, 100, 10]


def test_with_memory_replaces_each_ranks_memory() -> None:
    mixed = Cluster((Node("new", 2), Node("old", 1, speed=50, memory=10)), device_memory=100)
    less = mixed.with_memory(lambda memory: memory - 3)
    assert mixed.largest_node == 2
    assert (less.memory.tolist(), less.speed.tolist(), less.device_memory) == ([97, 97, 7], [100, 100, 50], 97)


@pytest.mark.parametrize(
    ("tp", "pp", "devices"), [(1, 1, [4, 4, 4]), (2, 1, [2, 2, 2]), (4, 1, [1, 1, 1]), (2, 3, [2]), (12, 1, [1])]
)
def test_devices_of_an_hdp_rank_are_neighbours_and_stages_span_nodes(tp: int, pp: int, devices: list[int]) -> None:
    cluster = cluster_of(config(nodes=3), schema.Parallel(tp=tp, pp=pp, stages="auto", ep=1))
    assert [node.devices for node in cluster.nodes] == devices
    assert cluster.node_of.tolist() == [node for node, count in enumerate(devices) for _ in range(count)]
    assert cluster.ranks == 12 // (tp * pp)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 100), st.integers(1, 50).map(lambda size: size << 20)),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_an_hdp_rank_is_as_slow_and_as_small_as_its_worst_device(
    found: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Device by device: stage p of rank r is devices (p R + r) tp + i; all ranks of a node are equal."""
    hosts = tuple(Node(f"host-{i}", *node) for i, node in enumerate(found))
    world = Cluster(hosts, device_memory=100)
    tp = data.draw(st.sampled_from([n for n in range(1, world.ranks + 1) if world.ranks % n == 0]))
    pp = data.draw(st.sampled_from([n for n in range(1, world.ranks // tp + 1) if world.ranks // tp % n == 0]))
    ranks = world.ranks // (tp * pp)
    own = [[world.place((p * ranks + r) * tp + i)[0] for p in range(pp) for i in range(tp)] for r in range(ranks)]
    if any(splits_nodes(set(nodes[p * tp : (p + 1) * tp]), world, tp) for nodes in own for p in range(pp)):
        with refused(ConfigError, "parallel.tp"):
            hdp(hosts, tp, pp)
        return
    cluster = hdp(hosts, tp, pp)
    assert cluster.ranks == ranks
    for home in {nodes[0] for nodes in own}:
        together = [r for r in range(ranks) if own[r][0] == home]
        held = [found[node] for r in together for node in own[r]]
        assert len({int(cluster.node_of[r]) for r in together}) == 1
        for r in together:
            assert cluster.speed[r] == min(speed for _, speed, _ in held)
            assert cluster.memory[r] == min(memory for _, _, memory in held)
    places = [own[r][0] for r in range(ranks)]
    assert [int(cluster.node_of[r]) for r in range(ranks)] == [sorted(set(places)).index(home) for home in places]


def splits_nodes(nodes: set[int], world: Cluster, tp: int) -> bool:
    """True if tp devices in these nodes are neither in one node nor all devices of several."""
    return len(nodes) > 1 and sum(world.nodes[node].devices for node in nodes) != tp


def hdp(hosts: tuple[Node, ...], tp: int, pp: int) -> Cluster:
    """Make the cluster of HDP ranks from a hostfile with these nodes."""
    lines = [f"{node.host} slots={node.devices} speed={node.speed}% memory={node.memory}" for node in hosts]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hosts").write_text("\n".join(lines))
        return cluster_of(config(Path(folder) / "hosts"), schema.Parallel(tp=tp, pp=pp, stages="auto", ep=1))


def test_one_slow_stage_slows_its_ranks() -> None:
    hosts = (Node("new", 4, 100, 80 << 30), Node("old", 4, 50, 40 << 30))
    cluster = hdp(hosts, tp=2, pp=2)
    assert (cluster.speed.tolist(), cluster.memory.tolist()) == ([50, 50], [40 << 30, 40 << 30])
    assert hdp(hosts, tp=2, pp=1).speed.tolist() == [100, 100, 50, 50]


def test_a_rank_larger_than_a_node_counts_as_a_node() -> None:
    cluster = cluster_of(config(nodes=4), schema.Parallel(tp=8, pp=1, stages="auto", ep=1))
    assert cluster.node_of.tolist() == [0, 1]
    assert [node.host for node in cluster.nodes] == ["node-0", "node-2"]


def test_without_degrees_ranks_are_devices() -> None:
    assert cluster_of(config(nodes=3), schema.Parallel(tp=1, pp=1, stages="auto", ep=1)) == cluster_of(config(nodes=3))


@pytest.mark.parametrize(("slots", "tp"), [((6, 6), 4), ((4, 4, 4), 6), ((2, 4, 2), 4), ((3, 5), 2)])
def test_a_rank_with_parts_of_two_nodes_is_refused(slots: tuple[int, ...], tp: int) -> None:
    """Its sums over tp devices would cross the network but be priced at links inside a node."""
    with refused(ConfigError, "parallel.tp"):
        hdp(tuple(Node(f"host-{i}", count, 100, 10 << 20) for i, count in enumerate(slots)), tp, pp=1)


def test_a_rank_of_several_whole_nodes_is_accepted() -> None:
    nodes = tuple(Node(f"host-{i}", count, 100, 10 << 20) for i, count in enumerate((8, 4, 4, 8)))
    assert hdp(nodes, tp=8, pp=1).node_of.tolist() == [0, 1, 2]


def test_the_node_that_differs_is_named_where_degrees_do_not_divide_the_devices() -> None:
    """In a hostfile of a thousand lines it is the way out."""
    nodes = tuple(Node(f"gpu-{n}", 7 if n == 3 else 8) for n in range(10))
    with pytest.raises(ConfigError) as caught:
        Cluster(nodes, 1).hdp(schema.Parallel(tp=8, pp=1, stages="auto", ep=1))
    assert (caught.value.problems[0].hint or "").endswith("; gpu-3 has 7 devices, most nodes have 8")
    for others, tp in ((nodes[2:4], 8), (nodes, 3)):  # no majority; not the cause
        with pytest.raises(ConfigError) as caught:
            Cluster(others, 1).hdp(schema.Parallel(tp=tp, pp=1, stages="auto", ep=1))
        assert "most nodes" not in (caught.value.problems[0].hint or "")


def test_degrees_that_do_not_divide_the_devices_are_refused() -> None:
    with refused(ConfigError, "parallel.tp"):
        cluster_of(config(nodes=3), schema.Parallel(tp=5, pp=1, stages="auto", ep=1))


@pytest.mark.parametrize(
    ("degrees", "smaller"),
    [((8, 2), (8, 1)), ((4, 4), (4, 3)), ((8, 5), (8, 3)), ((5, 1), (1, 1)), ((5, 4), (1, 4)), ((12, 4), (4, 3))],
)
def test_the_hint_names_a_smaller_mesh_that_works(degrees: tuple[int, int], smaller: tuple[int, int]) -> None:
    tp, pp = degrees
    nodes = tuple(Node(f"gpu-{n}", 8) for n in range(3))
    with pytest.raises(ConfigError) as caught:
        Cluster(nodes, 1).hdp(schema.Parallel(tp=tp, pp=pp, stages="auto", ep=1))
    assert "parallel.tp={} parallel.pp={}".format(*smaller) in (caught.value.problems[0].hint or "")
    Cluster(nodes, 1).hdp(schema.Parallel(tp=smaller[0], pp=smaller[1], stages="auto", ep=1))  # is not refused


@pytest.mark.parametrize(("tp", "named"), [(3, "parallel.tp=1 parallel.pp=5"), (2, None)])
def test_the_hint_keeps_the_number_of_given_stages(tp: int, named: str | None) -> None:
    nodes = (Node("a", 5),) * 2 if named else (Node("a", 8),) * 3
    with pytest.raises(ConfigError) as caught:
        Cluster(nodes, 1).hdp(schema.Parallel(tp=tp, pp=5, stages=(4,) * 5, ep=1))
    hint = caught.value.problems[0].hint or ""
    assert named in hint if named else "such as" not in hint


def test_many_nodes_with_several_devices_a_rank() -> None:
    pair = schema.Parallel(tp=2, pp=1, stages="auto", ep=1)
    cluster = cluster_of(schema.Cluster(**config(nodes=16384).model_dump() | {"ranks_per_node": 8}), pair)
    assert (cluster.ranks, len(cluster.nodes), cluster.nodes[-1].host) == (65536, 16384, "node-16383")
