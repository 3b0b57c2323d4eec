"""Kinds of linear layers with rates of their own: times and shares against sums over all matrices of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.cost import flops
from engine.cost.calibration import LINEAR_TERMS, Calibration, alike
from engine.cost.datasheets import nominal
from engine.cost.linear import ffn_share, token_seconds
from engine.cost.model import Costs
from engine.cost.stages import stages
from engine.family.families import parameters_of
from engine.job import Job

EXPERTS = ["model.family=mixtral", "model.experts=8", "model.top_k=2"]
MODELS = pytest.mark.parametrize("more", [[], EXPERTS], ids=["dense", "experts"])
MIXED = dict(zip(LINEAR_TERMS, (7e10, 9e10, 5e10, 3e10), strict=True))


def config(*more: str) -> Config:
    sizes = ["model.layers=5", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=96"]
    return load([*sizes, "model.vocab=301", *more])


def rates(**changes: Any) -> Calibration:
    return replace(nominal("local"), **changes)


def costs_of(of: Config, known: Calibration) -> Costs:
    return Costs.of(of, Job(of).cluster, known)


def seconds(of: Config, known: Calibration, name: str) -> float:
    """The forward time of a token in a parameter of the model, told apart by its name alone."""
    one = parameters_of(of.model)[name]
    if not one.is_matrix or name == "embedding.weight":
        return 0.0
    if name == "head.weight" or name.endswith("router.weight"):
        return 2 * one.elements / known.head_flops_per_s
    if ".attention." in name:
        return 2 * one.elements / known.projection_flops_per_s
    if of.model.experts > 1:
        return 2 * one.elements * of.model.top_k / of.model.experts / known.expert_flops_per_s
    return 2 * one.elements / known.ffn_flops_per_s


@MODELS
def test_the_time_of_a_token_is_the_sum_over_its_matrices(more: list[str]) -> None:
    of, known = config(*more), rates(**MIXED, half_tokens=0.0)
    expected = sum(seconds(of, known, name) for name in parameters_of(of.model))
    found = costs_of(of, known).rates
    assert found.token_f == pytest.approx(1e9 * expected, rel=1e-12)
    assert found.token_b == pytest.approx(known.linear_backward * found.token_f)
    read = costs_of(of, replace(known, half_tokens=10.0)).rates.micro - found.micro
    assert read == pytest.approx(10 * (found.token_f + found.token_b)), "weights are read at the rates of their kinds"


@MODELS
@pytest.mark.parametrize("tp", [1, 3])
def test_with_one_rate_times_are_those_of_all_flops_to_the_bit(more: list[str], tp: int) -> None:
    """Or plans would change with the digits that a sum over kinds loses."""
    model = config(*more).model
    weights, linear = flops.products(model), flops.linear_flops(model)
    for rate in np.geomspace(1e9, 1e15, 40).tolist():
        assert token_seconds(model, tp, rates(**alike(rate))) == linear / tp / rate
        assert ffn_share(model, rates(**alike(rate))) == (weights["ffn"] + weights["expert"]) / sum(weights.values())


@MODELS
def test_fp8_is_faster_where_it_multiplies(more: list[str]) -> None:
    """Not the head, routers and experts; MFU stays relative to the peak of bf16. Reading the weights takes as long."""
    keys, known = [*more, "model.ffn=128", "dtype=bf16"], rates(**MIXED, fp8_speedup=1.6)
    same, fast = config(*keys), config(*keys, "linear_dtype=fp8")
    multiplied = replace(known, projection_flops_per_s=1.6 * 7e10, ffn_flops_per_s=1.6 * 9e10)
    found, expected = costs_of(fast, known), costs_of(same, replace(multiplied, half_tokens=1.6 * known.half_tokens))
    assert found.rates == expected.rates and found.work_shares == expected.work_shares
    assert found.rates.token_f < costs_of(same, known).rates.token_f
    assert found.rates.micro >= costs_of(same, known).rates.micro
    assert found.peak_flops_per_s == known.peak_flops_per_s and "1.6" in found.source
    assert costs_of(fast, known).token_bytes == costs_of(same, known).token_bytes, "x is saved, which others save too"


@MODELS
def test_tiles_compute_swiglu_or_the_experts_again(more: list[str]) -> None:
    of, known = config(*more), rates(**MIXED)
    times = {name: seconds(of, known, name) for name in parameters_of(of.model)}
    again = sum(time for name, time in times.items() if ".ffn." in name and "router" not in name)
    assert ffn_share(of.model, known) == pytest.approx(again / sum(times.values()))


@MODELS
def test_a_stage_with_the_slow_head_does_more_of_the_work(more: list[str]) -> None:
    of = config(*more, "parallel.pp=2", "parallel.stages=[3,2]", "cluster.ranks_per_node=2")
    known = rates(**MIXED)
    first = stages(of)[0]
    times = {name: seconds(of, known, name) for name in parameters_of(of.model)}
    in_first = sum(time for name, time in times.items() if name.startswith(tuple(f"layers.{n}." for n in first)))
    costs = costs_of(of, known)
    assert costs.shares == pytest.approx([in_first / sum(times.values()), 1 - in_first / sum(times.values())])
    even = costs_of(of, rates()).shares
    assert costs.shares[1] > even[1] and costs.among(of, 7).work_shares == costs.work_shares
