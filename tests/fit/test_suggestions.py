from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import MemoryFitError
from engine.fit.check import check_fit, fit_error
from engine.fit.estimate import estimate
from engine.fit.suggestions import suggestions, table
from engine.job import Job
from tests.presets import LLAMA3_8B_2M, LLAMA3_8B_512K, LLAMA7B_2M

pytestmark = pytest.mark.long

NOT = [
    [*LLAMA3_8B_2M, "zero.stage=1", "offload.ratio=0"],
    [*LLAMA3_8B_2M, "zero.stage=1", "offload.ratio=0", "cluster.nodes=2", "context=64K"],
    ["recipe=llama70b-2m-paper", "capacity=128K", "offload.ratio=0"],
    ["recipe=llama30b-2m", "recompute=none", "cluster.nodes=8", "context=512K", "offload.ratio=0"],
    [*LLAMA7B_2M, "cluster.host_memory=1GiB", "capacity=16K"],
    ["recipe=h200-1b-256k", "recompute=none", "offload.ratio=0"],
    ["recipe=llama13b-256k", "parallel.tp=1", "offload.ratio=0"],
]


@pytest.mark.parametrize("keys", NOT, ids=map(" ".join, NOT))
def test_each_suggestion_fits_when_it_is_followed(keys: list[str]) -> None:
    config = load(keys)
    assert not estimate(Job(config)).fits
    found = suggestions(Job(config))
    assert 1 <= len(found) <= 3
    for one in found:
        followed = load([*(key for key in keys if key.split("=")[0] not in one.changes), *str(one).split()])
        check_fit(Job(followed), here=False)
    here = [one for one in found if "cluster.nodes" not in one.changes]
    assert [one.step_s for one in here] == sorted(one.step_s for one in here)
    assert found[: len(here)] == here, "suggestions that need more machines come last"
    changes = [set(one.changes.items()) for one in found]
    assert not any(one < other for one in changes for other in changes)


def test_more_nodes_are_suggested_where_they_hold_more() -> None:
    """The optimizer alone is too large for the hosts and for the devices of one node."""
    keys = ["recipe=llama30b-256k", "zero.stage=3", "recompute=layer", "offload.ratio=auto", "optimizer.on_host=true"]
    config = load([*keys, "cluster.nodes=1", "context=8K", "capacity=8K", "cluster.host_memory=1GiB"])
    (one,) = suggestions(Job(config))
    assert one.changes.keys() == {"cluster.nodes"} and one.estimate.fits


def test_the_table_has_a_row_for_all_that_goes_together() -> None:
    rows = table(Job(load(LLAMA7B_2M)))
    assert len(rows) == 3 * 2 * 3
    peak = {(row["zero.stage"], row["offload.ratio"], row["recompute"]): row["peak"] for row in rows}
    assert peak[1, 0.0, "none"] > peak[2, 0.0, "none"] > peak[3, 0.0, "none"] > peak[3, 0.0, "layer"]
    assert peak[3, 1.0, "none"] < peak[3, 0.0, "none"]
    assert {row["tokens"] for row in rows} == {8192}
    assert len(table(Job(load(["recipe=llama70b-2m-paper"])))) == 2 * 3, "stages of a pipeline know ZeRO-1 only"


def test_the_table_shows_a_ratio_that_the_host_has_no_room_for() -> None:
    rows = table(Job(load([*LLAMA7B_2M, "cluster.host_memory=1GiB"])))
    assert len(rows) == 3 * 2 * 3
    assert {row["fits"] for row in rows if row["offload.ratio"] == 1} == {False}
    assert {row["fits"] for row in rows if row["offload.ratio"] == 0} == {True}


def test_an_error_names_the_suggestions() -> None:
    config = load([*LLAMA3_8B_2M, "offload.ratio=0", "cluster.device_memory=30GiB"])
    with pytest.raises(MemoryFitError) as caught:
        check_fit(Job(config), here=False)
    (problem,) = caught.value.problems
    found = suggestions(Job(config))
    assert problem.key == "cluster.device_memory" and problem.hint == "; or ".join(map(str, found))
    assert caught.value.found == {"ways": [one.as_json() for one in found]}


def test_an_error_without_suggestions_keeps_its_hint() -> None:
    config = load(["cluster.device_memory=1M"])
    error = fit_error(Job(config))
    assert error is not None and error.found == {"ways": []}
    assert error.problems[0].hint == "use a smaller model, more devices, or devices with more memory"


def test_what_is_fixed_stays() -> None:
    config = load([*LLAMA3_8B_2M, "zero.stage=1", "offload.ratio=0", "cluster.nodes=2", "context=64K"])
    fixed = {"zero.stage", "optimizer.on_host", "cluster.nodes"}
    found = suggestions(Job(config), fixed)
    assert found and not any(fixed & one.changes.keys() for one in found)
    assert any(fixed & one.changes.keys() for one in suggestions(Job(config)))


def test_a_config_that_fits_is_not_a_suggestion() -> None:
    config = load(LLAMA3_8B_2M)
    assert all(one.changes for one in suggestions(Job(config)))


def test_each_row_of_a_mixed_cluster_is_what_the_estimate_says_at_that_ratio(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8 memory=60GiB\n")
    keys = [*LLAMA3_8B_512K, f"cluster.hostfile={tmp_path / 'hosts'}", "capacity=10K", "context=16K"]
    (row,) = [
        row
        for row in table(Job(load([*keys, "zero.stage=1"])))
        if (row["zero.stage"], row["offload.ratio"], row["recompute"]) == (3, 0.0, "none")
    ]
    config = load([*keys, "zero.stage=3", "offload.ratio=0", "recompute=none"])
    assert row["peak"] == estimate(Job(config)).peak and row["fits"]


def test_a_suggestion_holds_the_context_too() -> None:
    """A context of 2M tokens on one node fits only with a larger capacity, or more nodes."""
    config = load(["recipe=mixtral8x7b-2m", "cluster.nodes=1"])
    found = suggestions(Job(config))
    assert found and all(one.estimate.fits for one in found)
    for one in found:
        followed = load(["recipe=mixtral8x7b-2m", "cluster.nodes=1", *str(one).split()])
        check_fit(Job(followed), here=False)
