"""The mesh is the only rank arithmetic of a run: a mistake in it would send gradients to another rank's parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.mesh import Mesh, Place
from engine.config.schema import Parallel

SIZE = st.integers(1, 5)
MESHES = st.builds(lambda blocks, tp, pp, ep: Mesh(blocks * ep, tp, pp, ep), SIZE, SIZE, SIZE, st.integers(1, 3))
COORDINATES = {
    "hdp": ("hdp",),
    "tp": ("tp",),
    "pp": ("pp",),
    "ep": ("hdp",),
    "experts": ("hdp",),
    "model": ("tp", "pp"),
}
GROUPS = tuple(COORDINATES)


@given(MESHES)
def test_ranks_and_places_are_a_bijection(mesh: Mesh) -> None:
    places = [mesh.place(rank) for rank in range(mesh.ranks)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.ranks))
    assert len(set(places)) == mesh.ranks == mesh.hdp * mesh.tp * mesh.pp
    devices = mesh.devices()
    assert all(devices[place.pp, place.hdp, place.tp] == rank for rank, place in enumerate(places))


@given(MESHES, st.sampled_from(GROUPS))
def test_groups_of_a_name_partition_the_ranks(mesh: Mesh, group: str) -> None:
    """Each rank is in exactly one, all its members list the same, and only the group's coordinates differ."""
    size = {"hdp": mesh.hdp, "tp": mesh.tp, "pp": mesh.pp, "ep": mesh.ep, "model": mesh.tp * mesh.pp}
    size["experts"] = mesh.hdp // mesh.ep
    for rank in range(mesh.ranks):
        members = mesh.members(rank, group)  # type: ignore[arg-type]
        assert rank in members and len(set(members)) == size[group] and members == sorted(members)
        for member in members:
            assert mesh.members(member, group) == members  # type: ignore[arg-type]
            here, there = vars(mesh.place(rank)), vars(mesh.place(member))
            assert {axis for axis in here if here[axis] != there[axis]} <= set(COORDINATES[group])


@given(MESHES)
def test_the_position_in_an_hdp_group_is_the_hdp_rank(mesh: Mesh) -> None:
    """Rings address their peers by it."""
    for rank in range(mesh.ranks):
        assert mesh.members(rank, "hdp").index(rank) == mesh.place(rank).hdp


def test_the_ranks_of_one_layer_are_neighbours_and_stages_lie_apart() -> None:
    """The picture of the module's docstring."""
    mesh = Mesh(hdp=3, tp=2, pp=2)
    assert mesh.devices().tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    assert mesh.place(9) == Place(hdp=1, tp=1, pp=1)
    assert mesh.members(9, "hdp") == [7, 9, 11]
    assert mesh.members(9, "model") == [2, 3, 8, 9]
    assert Mesh(hdp=4, ep=2).members(3, "ep") == [2, 3]


def test_what_is_no_mesh_is_refused() -> None:
    for sizes in ((0, 1, 1, 1), (2, 0, 1, 1), (2, 1, -1, 1), (3, 1, 1, 2)):
        with pytest.raises(ValueError, match="not a mesh"):
            Mesh(*sizes)
    parallel = Parallel(tp=2, pp=3, stages="auto", ep=1)
    assert Mesh.of(12, parallel) == Mesh(2, 2, 3)
    with pytest.raises(ValueError, match="8 ranks do not divide into tp=2 x pp=3"):
        Mesh.of(8, parallel)
    for rank in (-1, 12):
        with pytest.raises(IndexError, match=f"rank {rank} is outside"):
            Mesh.of(12, parallel).place(rank)
