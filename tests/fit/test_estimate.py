"""The estimate is the planner's own count by item, plus the allowances: if one is right, so is the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.data.lengths import step_lengths
from engine.fit.estimate import (
    Load,
    copy_bytes,
    estimate,
    estimate_fullest,
    estimate_plans,
    fullest,
    most_on_host,
)
from engine.fit.suggestions import table
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan.loads import micro_loads
from engine.units import PPM
from tests.presets import LLAMA7B_2M

MODELS = {name: load([f"model={name}", "cluster=h100x8"]) for name in ("llama7b", "llama3-8b", "mixtral8x7b", "tiny")}
CONFIGS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["bf16", "fp32"]),
        "recompute": st.sampled_from(["none", "layer", "layer_keep_attention"]),
        "stage": st.sampled_from([1, 2, 3]),
        "on_host": st.booleans(),
        "mlp_tile": st.sampled_from([0, 512]),
        "tp": st.sampled_from([1, 2]),
        "nodes": st.sampled_from([1, 5]),
    }
)


def changed(config: Config, keys: dict[str, Any]) -> Config:
    """The config with the keys that hypothesis chose: composing each from YAML would take a second."""
    return config.model_copy(
        update={
            **{key: keys[key] for key in ("dtype", "recompute", "mlp_tile")},
            "zero": config.zero.model_copy(update={"stage": keys["stage"]}),
            "optimizer": config.optimizer.model_copy(update={"on_host": keys["on_host"]}),
            "parallel": config.parallel.model_copy(update={"tp": keys["tp"]}),
            "cluster": config.cluster.model_copy(update={"nodes": keys["nodes"]}),
        }
    )


@given(st.sampled_from(sorted(MODELS)), CONFIGS, st.integers(0, 10**6), st.integers(0, PPM))
def test_the_items_add_up_to_what_verify_counts_and_the_allowances(
    name: str, keys: dict[str, Any], tokens: int, offload: int
) -> None:
    config = changed(MODELS[name], keys)
    settings = Job(config).settings
    found = estimate(Job(config), Load(tokens, tokens // 2, offload))
    counted = int(settings.costs.peak_bytes(np.int64(tokens), np.int64(tokens // 2), offload))
    assert all(item >= 0 for item in found.items.values())
    allowance = Allowance.of(config, Job(config).cluster)
    assert sum(found.items.values()) == found.peak == counted + allowance.context + allowance.fragmentation(counted)
    assert found.items["other"] == found.context + found.fragmentation
    fits = found.peak + found.headroom <= found.device_total
    assert fits == (counted <= settings.device_memory), "the planner's own bound"
    waits = int(settings.costs.host_bytes(np.int64(tokens), offload))
    assert (found.host + found.host_headroom <= found.host_total) == (waits <= settings.host_memory)


@given(st.sampled_from(sorted(MODELS)), CONFIGS, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, PPM))
def test_more_tokens_never_need_less(name: str, keys: dict[str, Any], tokens: int, more: int, offload: int) -> None:
    config = changed(MODELS[name], keys)
    less, full = (estimate(Job(config), Load(n, n, offload)) for n in (tokens, tokens + more))
    assert less.peak <= full.peak
    assert less.host - less.checkpoint <= full.host - full.checkpoint
    assert less.checkpoint >= full.checkpoint, "a copy of the states needs what activations leave"


def test_the_host_has_a_copy_of_the_states_only_where_it_fits() -> None:
    """Else a config would be refused for a copy without which training only waits for checkpoints."""
    config = load([*LLAMA7B_2M, "offload.ratio=0", "cluster.host_memory=64GiB"])
    found = most_on_host(Job(config))
    parameters, ranks = Job(config).costs.parameters, Job(config).settings.ranks
    assert found.checkpoint == copy_bytes(Job(config)) == found.host
    assert found.checkpoint == 12 * -(-parameters // ranks) + (2 * parameters if config.zero.stage < 3 else 0)
    small = load([*LLAMA7B_2M, "offload.ratio=0", f"cluster.host_memory={found.host - 1}"])
    found = most_on_host(Job(small))
    assert found.checkpoint == found.host == 0 and found.fits


def test_the_fullest_micro_batch_is_the_capacity_or_with_offload_more_of_one_sequence() -> None:
    plain = load([*LLAMA7B_2M, "offload.ratio=0"])
    assert fullest(Job(plain)) == Load(8192, 8192, 0)
    more = load(LLAMA7B_2M)
    found = fullest(Job(more))
    assert found.tokens > 5 * 8192 and 0 < found.offload <= PPM
    assert estimate_fullest(Job(more)).load == found
    assert estimate_fullest(Job(more)).fits
    assert estimate(Job(more)).load == Load(8192, 8192, 0), "the capacity of the config comes first"


def test_no_more_is_offloaded_than_a_capacity_needs_and_no_sequence_is_longer_than_the_context() -> None:
    """A capacity of the whole context on one rank is the fullest micro-batch, and needs some offload."""
    keys = ["cluster=h100x8", "model=llama3-8b", "dtype=bf16", "cluster.ranks_per_node=1", "memory=zero3_recompute"]
    sizes = ["optimizer.on_host=true", "context=150K", "capacity=150K", "cluster.host_memory=1T"]
    config = load([*keys, *sizes])
    load_ = fullest(Job(config))
    assert load_.tokens == 150 * 1024
    assert 0 < load_.offload < PPM
    assert estimate(Job(config)).fits
    less = Load(load_.tokens, load_.buffers, load_.offload - 1000)
    assert not estimate(Job(config), less).fits


def test_a_tile_larger_than_the_micro_batch_is_as_large_as_that() -> None:
    found = []
    for tile in ("8K", "2G", "2K"):
        config = load([*LLAMA7B_2M, "offload.ratio=0", f"mlp_tile={tile}"])
        settings = Job(config).settings
        found.append(estimate(Job(config)).peak)
        most = settings.costs.most_tokens(settings.device_memory)
        assert settings.costs.peak_bytes(np.int64(most), np.int64(most)) <= settings.device_memory
        assert settings.costs.peak_bytes(np.int64(most + 1), np.int64(most + 1)) > settings.device_memory
    assert found[0] == found[1] > found[2]


def test_the_worst_of_planned_steps() -> None:
    sizes = ["context=8K", "capacity=2K", "batch_tokens=32K", "lengths.max=8K", "cluster.ranks_per_node=4"]
    config = load(["lengths=github", *sizes])
    settings = Job(config).settings
    plans = [plan_step(lengths, settings) for lengths in step_lengths(config, 3)]
    found, peaks = estimate_plans(Job(config), plans), []
    for plan in plans:
        tokens, buffers = micro_loads(plan)
        peaks += settings.costs.peak_bytes(tokens, buffers, plan.offload).tolist()
    assert found.peak - found.items["other"] == max(peaks)
    assert found.as_json()["tokens"] == found.load.tokens <= 2048


@pytest.mark.parametrize(("cluster", "context", "percent"), [("local", 520 << 20, 8), ("h100x8", 2784 << 20, 5)])
def test_allowances_are_those_of_the_kind_of_device(cluster: str, context: int, percent: int) -> None:
    config = load([f"cluster={cluster}"])
    found = estimate(Job(config))
    assert found.context == context
    assert found.fragmentation == pytest.approx((found.peak - found.items["other"]) * percent / 100, abs=1)


def test_of_a_mixed_cluster_it_is_the_smallest_rank(tmp_path: Any) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1 memory=484M\n")
    config = load([f"cluster.hostfile={tmp_path / 'hosts'}", "context=100", "offload.ratio=0"])
    found = estimate(Job(config))
    assert (found.device_total, found.node) == (484 * 2**20, "b")
    assert found.load.tokens < config.capacity


UNEQUAL = "lengths=github lengths.max=64K context=64K capacity=64K batch_tokens=256K cluster.device_memory=1280M"


def unequal(tmp_path: Path, *more: str) -> Config:
    (tmp_path / "hosts").write_text("large slots=2\nsmall slots=2 memory=700M\n")
    return load([*UNEQUAL.split(), f"cluster.hostfile={tmp_path / 'hosts'}", *more])


def test_the_fullest_micro_batch_of_large_ranks_is_not_held_against_the_memory_of_small_ones(tmp_path: Path) -> None:
    config = unequal(tmp_path, "model.kv_heads=1")
    settings = Job(config).settings
    plans = [plan_step(lengths, settings) for lengths in step_lengths(config, 2)]
    found = estimate_plans(Job(config), plans)
    worst = max(int(settings.costs.peak_bytes(*micro_loads(plan), plan.offload).max()) for plan in plans)
    allowed = found.context + Allowance.of(config, Job(config).cluster).fragmentation(worst)
    assert worst + allowed > 700 * 2**20, "it would have been refused"
    assert found.fits and (found.node, found.device_total) == ("small", 700 * 2**20)


def test_large_ranks_are_shown_where_they_are_nearest_to_their_limit(tmp_path: Path) -> None:
    """Small ranks never exceed their memory: their capacity follows from it."""
    config = unequal(tmp_path, "cluster.device_memory=800M")
    found = estimate(Job(config))
    assert not found.fits
    assert (found.node, found.device_total, found.load.tokens) == ("large", 800 * 2**20, config.capacity)


def test_the_table_holds_each_kind_of_rank_against_its_own_memory_too(tmp_path: Path) -> None:
    config = unequal(tmp_path, "cluster.device_memory=800M", "offload.ratio=0")
    found = estimate(Job(config))
    keys = "zero.stage", "offload.ratio", "recompute"
    (row,) = (row for row in table(Job(config)) if tuple(row[key] for key in keys) == (1, 0, "none"))
    assert (
        (row["fits"], row["node"], row["peak"]) == (found.fits, found.node, found.peak) == (False, "large", found.peak)
    )
