"""What others need to know of a planner is in its entry.

Ranks meet the peers of their planner before step 1. If the tests of peers fail, a step waits until NCCL has connected
them, or they wait for each other.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.cost.allowance import PEERS, Allowance
from engine.errors import ConfigError, PlanError
from engine.job import Job
from engine.planner.checks import check_planner
from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS, Planner, peers_of
from engine.planner.settings import PlanSettings
from engine.units import Ints
from tests.covering import in_turn
from tests.planner.samples import ints


def hops_of(plan: StepPlan) -> set[tuple[int, int]]:
    return set(zip(plan.ring_ranks.tolist(), plan.ring_ranks[plan.next_shard].tolist(), strict=True))


@in_turn("planner, ranks", [*PLANNERS], [1, 2, 3, 4, 5, 8, 12, 16])
def test_no_plan_has_a_ring_with_anybody_else(planner: str, ranks: int) -> None:
    longest = 512 * min(ranks, 8)
    world = [f"planner={planner}", f"cluster.ranks_per_node={ranks}", f"context={longest}", "capacity=512"]
    settings = Job(load(["recipe=quickstart", *world])).settings
    known = [peers_of(rank, settings) for rank in range(ranks)]
    assert all(rank in known[peer] for rank in range(ranks) for peer in known[rank]), "both sides must name each other"
    assert max(map(len, known)) <= PEERS, "the memory estimate counts so many"
    random, hops = np.random.default_rng(ranks), set()
    for _ in range(5):
        plan = plan_step(random.integers(1, longest + 1, 40), settings)
        hops |= hops_of(plan)
        few = random.integers(longest // 2, longest + 1, 3)  # for which `adaptive` compares `static`
        hops |= hops_of(plan_step(few, settings))
    met = {(one, other) for one, other in hops if one != other}
    assert all(other in known[one] for one, other in met)
    assert met or ranks == 1


def opposite(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Every sequence on two ranks, which are half of the world apart."""
    half = settings.ranks // 2
    groups = [[(one, (one % half, one % half + half))] for one in range(len(lengths))]
    return emit("opposite", "free", settings.ranks, settings.capacity, lengths, groups)


def across(settings: PlanSettings) -> Ints:
    return (np.arange(settings.ranks)[:, None] + settings.ranks // 2) % settings.ranks


OPPOSITE = Planner(plan=opposite, modes=("free",), peers=across, most_peers=1)
WORLD = ["recipe=quickstart", "cluster.ranks_per_node=8", "context=4K", "capacity=2K", "batch_tokens=64K"]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "opposite", OPPOSITE)


@pytest.mark.parametrize("mode", [[], ["zero.stage=2"], ["parallel.pp=2", "cluster.ranks_per_node=16"]])
def test_an_added_planner_plans_in_every_mode(mode: list[str], added: None) -> None:
    settings = Job(load([*WORLD, "planner.name=opposite", "planner.max_peers=1", *mode])).settings
    plan = plan_step(ints(*range(1000, 4000, 97)), settings)
    assert (plan.mode, plan.ranks, set(plan.degrees.tolist())) == (settings.mode, 8, {2})
    assert [peers_of(rank, settings) for rank in range(8)] == [[(rank + 4) % 8] for rank in range(8)]
    with pytest.raises(ConfigError) as caught:
        check_planner(replace(settings, max_peers=0))
    assert caught.value.problems[0].key == "planner.max_peers"


def test_a_plan_with_peers_that_its_planner_does_not_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL, these would connect in the middle of a step. One of two ranks that names the other is enough."""
    step, settings = ints(*range(1000, 4000, 97)), Job(load([*WORLD, "planner=naive"])).settings
    monkeypatch.setitem(PLANNERS, "naive", replace(PLANNERS["naive"], plan=opposite))
    with pytest.raises(PlanError) as caught:
        plan_step(step, settings)
    assert caught.value.rule == 7
    half = replace(OPPOSITE, peers=lambda settings: np.minimum(across(settings), np.arange(settings.ranks)[:, None]))
    monkeypatch.setitem(PLANNERS, "naive", half)
    plan_step(step, settings)
    assert [peers_of(rank, settings) for rank in range(8)] == [[(rank + 4) % 8] for rank in range(8)]
    monkeypatch.setitem(PLANNERS, "naive", replace(OPPOSITE, peers=lambda settings: across(settings)[1:]))
    with pytest.raises(PlanError) as caught:
        plan_step(step, settings)
    assert caught.value.rule == 7


def test_an_added_planner_is_simulated_listed_and_completed(added: None, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--no-tuned", *WORLD, "lengths=byted", "lengths.max=4K"]
    assert run(["simulate", *asked, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [one["label"] for one in runs] == [*PLANNERS] == ["static", "naive", "balanced", "adaptive", "opposite"]
    assert run(["config", "help", "planner.name", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["help"]["keys"][0]["allowed"] == [*PLANNERS]
    assert all(
        run(["candidates", "--line", f"bytescale {line}"]) == 0
        for line in ("plan planner.name=o", "simulate --planners o")
    )
    assert capsys.readouterr().out.split() == ["planner.name=opposite", "opposite"]
    assert run(["plan", *asked[1:], "planner.name=opposit", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["key"] == "planner.name" and "did you mean opposite?" in error["hint"]


def test_the_memory_of_many_peers_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's buffers for them are not left to chance. A world has no more than all others."""
    monkeypatch.setitem(PLANNERS, "opposite", replace(OPPOSITE, most_peers=9))
    for devices, more in ((4, 0), (8, 3), (64, 5)):
        jobs = (Job(load(["cluster=h200x8", f"planner.name={name}"])) for name in ("naive", "opposite"))
        few, many = (Allowance.of(job.config, job.cluster, devices) for job in jobs)
        assert many.context - few.context == more * 96 << 20


def test_a_planner_without_its_traits_is_refused() -> None:
    with pytest.raises(TypeError, match="the entry 'wide' is opposite, not a Planner with plan, modes, peers"):
        PLANNERS["wide"] = opposite  # type: ignore[assignment]
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'peers' and 'most_peers'"):
        Planner(opposite, ("free",))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="needs the mode free"):
        replace(OPPOSITE, modes=("lockstep",))
    assert "wide" not in PLANNERS
