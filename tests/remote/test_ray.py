"""The data plane on Ray gives the ranks of two hosts what the local runtime gives them, whatever dies meanwhile.

All tests share a Ray of two hosts, a supervisor, and the planning processes of both hosts. Nothing here imports ray.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from engine.control.processes import is_stopped
from engine.data.blocks.texts import Texts
from engine.data.order import ORDER
from engine.data.runtime.events import SCALED
from engine.data.runtime.process import PlanningProcess
from engine.data.runtime.runtime import PlannedSequences
from tests.data.blocks.conformance import Documents, Given, TestBlocks, given_texts  # noqa: F401
from tests.data.conftest import make_data  # noqa: F401
from tests.remote.conforming import PACKS, BlocksOfHosts, OverRay
from tests.remote.harm import HARMED, ROLES, Rig, a_run, limit_s
from tests.remote.rays import until

pytest.importorskip("ray")
pytestmark = [pytest.mark.world, pytest.mark.long]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A run, whose agents run the Ray of all tests."""
    with a_run(tmp_path_factory.mktemp("ray")) as made:
        yield made


@pytest.fixture(scope="module")
def over_ray(rig: Rig) -> Iterator[PlanningProcess]:
    with closing(PlanningProcess(OverRay)) as process:
        yield process


@pytest.fixture
def given_blocks(over_ray: PlanningProcess, given_texts: tuple[Mapping[str, Texts], Documents]) -> Iterator[Given]:  # noqa: F811
    """The blocks of two hosts, as a planner sees them, for the tests of all implementations of Blocks."""
    blocks = BlocksOfHosts(over_ray, given_texts[0])
    yield Given(blocks, given_texts[1])
    parts = [{part.name for part in cache.rglob("*.idx")} for cache in blocks.caches]
    assert not parts[0] & parts[1] and len(parts[0] | parts[1]) <= 5, "each block is packed once"
    blocks.close()


def test_a_block_is_read_while_a_host_packs_as_many_as_it_has_loaders(over_ray: PlanningProcess) -> None:
    """A step needs what is read now."""
    over_ray.ask(OverRay.crowded)
    assert over_ray.answer() == (True, PACKS)


def test_a_late_answer_is_refused(over_ray: PlanningProcess) -> None:
    """Of an actor that was stopped, could not be killed, and goes on when another one has its role."""
    over_ray.ask(OverRay.late)
    done, found = over_ray.answer()
    assert done, found
    old, new, refused = found
    assert new > old and refused == 1


def test_a_later_start_ends_the_actors_of_an_earlier_one(over_ray: PlanningProcess) -> None:
    """In a cluster that stays they may be left; they have the settings and the hosts of their own start."""
    over_ray.ask(OverRay.later)
    done, found = over_ray.answer()
    assert done, found
    assert found == (False, False)


def test_validation_sets_are_those_of_the_local_runtime(rig: Rig) -> None:
    found = rig.trio.validation(ORDER)
    assert found[0].keys() == {"texts", "rows"}
    assert differing_sets(rig, found) == 0


def test_fifty_steps_are_those_of_the_local_runtime(rig: Rig) -> None:
    """With rings of 1, 2, 4 and 8 ranks. No token passes the planner, and each rank's are read once."""
    before, used = sum(rig.state(role)["read"] for role in ROLES[1:]), rig.reference.tokens
    rig.reference.rings.clear()
    assert rig.take(50) == 0
    assert rig.reference.rings >= {1, 2, 4, 8}
    read = sum(rig.state(role)["read"] for role in ROLES[1:]) - before
    assert 1 <= read / (rig.reference.tokens - used) <= 1.01
    assert rig.state("planner")["tokens"] == 0


def test_the_planner_notes_its_queue(rig: Rig) -> None:
    """In the run folder, for `bytescale data watch`; about once a second, and only changes."""
    assert rig.until(lambda: len(rig.queues()) > 1) == 0
    found = rig.queues()
    assert any(waiting or packing for _, waiting, packing in found)
    assert all(later[0] - one[0] > 0.9 and later[1:] != one[1:] for one, later in pairwise(found))


def test_the_number_of_loaders_follows_what_is_needed(rig: Rig) -> None:
    """Steps are those of the local runtime, which has none: the tests before and after this one compare them."""
    changes = [event for event in rig.events() if event["what"] == SCALED]
    assert changes[0]["before"] == 4 and min(event["after"] for event in changes) == 2
    assert all(event["host"] is None for event in changes)
    assert rig.state("planner")["loaders"] == sum(rig.state(host)["loaders"] for host in ROLES[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        ["planner=balanced"],
        ["planner=naive"],
        ["planner=static"],
        ["planner=adaptive", "parallel.tp=2", "parallel.pp=2", "model.layers=4", "capacity=2048"],
        ["planner=adaptive", "zero.stage=3"],
    ],
)
def test_steps_of_all_planners_and_of_a_mesh(mesh: list[str], rig: Rig) -> None:
    """All tp and pp ranks of an HDP rank map one file, so none reads twice."""
    with a_run(rig.folder.root.parent, *mesh, ray=rig.agents.planes[0].address) as other:
        assert other.take(50) == 0
        read = sum(other.state(role)["read"] for role in ROLES[1:])
        assert 1 <= read / other.reference.tokens <= 1.01


def test_each_block_is_packed_on_one_host(rig: Rig) -> None:
    """Each host has a cache of its own; documents tokenized / documents is 1."""
    parts = [{part.name for part in Path(rig.folder.root.parent / f"host-{host}").rglob("*.idx")} for host in (0, 1)]
    assert parts[0] and parts[1] and not parts[0] & parts[1]
    reference = {part.name for part in (rig.folder.root.parent / "reference").rglob("*.idx")}
    assert parts[0] | parts[1] >= reference


@pytest.mark.parametrize("role", ["loader", "planner", "host-0", "supervisor", "head"])
def test_deaths_change_nothing(rig: Rig, role: str) -> None:
    """Nor the validation sets that ranks had before, which they read again and again."""
    sets = rig.trio.validation(ORDER)
    check(rig, role, signal.SIGKILL, moments=4)
    assert differing_sets(rig, sets) == 0


@pytest.mark.parametrize("role", ["loader", "planner", "host-0", "supervisor", "head", "node-1"])
def test_a_stop_changes_nothing(rig: Rig, role: str) -> None:
    sets = rig.trio.validation(ORDER)
    check(rig, role, signal.SIGSTOP, moments=1)
    assert differing_sets(rig, sets) == 0


def test_the_death_of_all_of_ray_on_the_first_host_changes_nothing(rig: Rig) -> None:
    sets = rig.trio.validation(ORDER)
    check(rig, "node-0", signal.SIGKILL, moments=1)
    assert differing_sets(rig, sets) == 0


def test_rank_files_that_are_not_open_yet_outlive_the_ray_of_their_host(rig: Rig) -> None:
    """A rank may have its plan, but not yet have opened its file, when all of Ray on its host dies."""
    assert rig.warm() == 0
    rig.trio.request(rig.cursor)
    found = rig.trio.take()
    victims = rig.victims("node-1")
    for victim in victims:
        victim.kill()
    gone = {victim.pid for victim in victims}
    assert until(lambda: (raylet := rig.agents.named("raylet", 1)) is not None and raylet.pid not in gone)
    table, plan, after = rig.reference.next(rig.cursor)
    assert rig.reference.differing(rig.trio, found, table, plan) == 0
    rig.cursor = after
    assert rig.take(2) == 0


def test_a_planner_goes_on_between_two_checkpoints(rig: Rig) -> None:
    """Its state is the cursor that hosts ask for: it plans no step again that they have, and needs no checkpoint."""
    found = rig.take_over(5)
    assert found.differ == 0 and found.again == 0 and found.cursor < 1024


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("role", HARMED)
def test_twenty_deaths_change_nothing(rig: Rig, role: str, how: signal.Signals) -> None:
    check(rig, role, how, moments=20)


def differing_sets(rig: Rig, found: list[dict[str, PlannedSequences]]) -> int:
    """Return how many arrays of the validation sets of all ranks differ."""
    expected, bad = rig.reference.steps.validation(ORDER), 0
    assert found[0].keys() == expected.keys()
    for name, table in expected.items():
        sets = [of_rank[name] for of_rank in found]
        assert len({one.plan.digest for one in sets}) == 1
        bad += rig.reference.differing(rig.trio, sets, table, sets[0].plan)
    return bad


def check(rig: Rig, role: str, how: signal.Signals, moments: int) -> None:
    for struck in rig.harm(role, how, moments):
        assert struck.differ == 0 and not struck.left, "not even stopped"
        if role != "loader":
            assert 0 < struck.seen_s < limit_s(role, how) + 1, "1 s: a busy machine"
    assert not [pid for pid in rig.trio.actors().values() if is_stopped(pid)]
