"""Models whose layers differ: sums over layer kinds against counts layer by layer, query by query, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.cost import activations, flops
from engine.cost.collectives import collectives, expert_collectives
from engine.cost.sizes import device_parameters, expert_parameters, parameters
from engine.cost.stages import stages
from engine.cost.times import unsplit
from engine.family import families
from engine.family.families import FAMILIES, family_of, parameters_of
from engine.family.layers import LayerKind
from engine.family.parameters import Parameter
from engine.job import Job

WINDOW = 7
# Every second layer has a window; the last three of the six layers have experts.
MIXED = (
    LayerKind(1, None, experts=False),
    LayerKind(1, WINDOW, experts=False),
    LayerKind(1, None, experts=False),
    LayerKind(1, WINDOW, experts=True),
    LayerKind(1, None, experts=True),
    LayerKind(1, WINDOW, experts=True),
)
SHAPE = ["model.layers=6", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.vocab=301"]
EXPERTS = ["model.family=mixtral", "model.experts=8", "model.top_k=2"]
LENGTHS = [1, 5, 6, 7, 8, 30]


def windowed(*more: str) -> Config:
    """A dense model with a window in every second layer."""
    return load([*SHAPE, f"model.window={WINDOW}", "model.windowed=[false,true]", *more])


def mixed(monkeypatch: pytest.MonkeyPatch, *more: str) -> Config:
    """A model of the kinds of MIXED, which no family has."""
    family = replace(FAMILIES["mixtral"], name="mixed", layers=lambda model: MIXED)
    monkeypatch.setitem(families.FAMILIES, "mixed", family)
    config = load([*SHAPE, *EXPERTS, *more])
    return config.model_copy(update={"model": config.model.model_copy(update={"family": "mixed"})})


def keys(length: int, window: int | None) -> int:
    """The (query, key) pairs of a sequence in one layer, query by query."""
    return sum(len(range(0 if window is None else max(0, at + 1 - window), at + 1)) for at in range(length))


def of_layer(config: Config, number: int) -> list[Parameter]:
    return [one for name, one in parameters_of(config.model).items() if name.startswith(f"layers.{number}.")]


@pytest.mark.parametrize(("more", "experts"), [([], False), (EXPERTS, True)])
def test_windows_repeat_with_the_depth(more: list[str], experts: bool) -> None:
    model = windowed("model.layers=5", "model.windowed=[false,true,true]", *more).model
    kinds = ((1, None), (2, WINDOW), (1, None), (1, WINDOW))
    assert family_of(model).layers(model) == tuple(LayerKind(count, window, experts) for count, window in kinds)
    every = windowed("model.windowed=[true]", *more).model
    assert family_of(every).layers(every) == (LayerKind(6, WINDOW, experts),)
    none = load([*SHAPE, "model.windowed=[false,true]", *more]).model
    assert family_of(none).layers(none) == (LayerKind(6, None, experts),)


def test_flops_of_attention_are_counted_layer_by_layer() -> None:
    config = windowed()
    pair = 4 * config.model.heads * config.model.head_dim
    attention = sum(pair * keys(length, window) for length in LENGTHS for window in (None, WINDOW) * 3)
    linear = flops.linear_flops(config.model) * sum(LENGTHS)
    assert Job(config).costs.flops(np.array(LENGTHS)) == flops.PASSES * (linear + attention)
    full = Job(load(SHAPE)).costs
    assert Job(windowed("model.window=30")).costs.flops(np.array(LENGTHS)) == full.flops(np.array(LENGTHS))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_the_time_of_a_sequence_is_the_sum_over_layers(recompute: str, length: int) -> None:
    """Of single layers with and without the window, each at the rates of a model without windows."""
    plain, rates = (
        Job(config).costs.rates
        for config in (load([*SHAPE, f"recompute={recompute}"]), windowed(f"recompute={recompute}"))
    )
    layers = (None, WINDOW) * 3
    pair = (1 + plain.recompute_factor) * plain.pair_f + plain.pair_b
    attention = sum(pair / len(layers) * keys(length, window) for window in layers)
    expected = (plain.token_f + plain.token_b) * length + attention + plain.sequence
    assert unsplit(rates, float(length)) == pytest.approx(expected, rel=1e-12)
    assert rates._replace(window=plain.window, windowed=0.0) == plain, "links, copies and linear layers stay the same"


def test_a_window_changes_no_bytes() -> None:
    costs, plain = Job(windowed("parallel.pp=2")).costs, Job(load([*SHAPE, "parallel.pp=2"])).costs
    assert replace(costs, rates=plain.rates, attention=plain.attention, later_stages=()) == replace(
        plain, later_stages=()
    )
    assert [one.token_bytes for one in costs.stages] == [one.token_bytes for one in plain.stages]


def test_windows_of_several_sizes_are_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (LayerKind(3, 8, experts=False), LayerKind(3, 16, experts=False))
    monkeypatch.setitem(families.FAMILIES, "llama", replace(FAMILIES["llama"], layers=lambda model: kinds))
    with pytest.raises(ValueError, match="one size"):
        assert Job(load(SHAPE)).costs


def test_parameters_and_flops_of_mixed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = mixed(monkeypatch)
    model, every = config.model, parameters_of(config.model)
    assert parameters(model) == sum(one.elements for one in every.values())
    assert expert_parameters(model) == sum(one.elements for one in every.values() if one.stacked)
    met = [(one.elements * 2 // 8 if one.stacked else one.elements) for one in every.values() if one.is_matrix]
    assert flops.linear_flops(model) == 2 * (sum(met) - model.vocab * model.hidden), "all but the embedding"
    experts = sum(sum(one.elements * 2 // 8 for one in of_layer(config, number) if one.stacked) for number in (3, 4, 5))
    swiglu = 3 * sum(one.elements for one in of_layer(config, 0) if one.name.startswith("ffn.") and one.is_matrix)
    weights = flops.products(model)
    assert (weights["expert"], weights["ffn"]) == (experts, swiglu)
    routers = sum(one.elements for name, one in every.items() if name.endswith("router.weight"))
    assert weights["head"] == routers + model.vocab * model.hidden and routers
    assert weights["projection"] == sum(one.elements for name, one in every.items() if ".attention." in name)


def test_stages_have_the_bytes_and_the_work_of_their_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = mixed(monkeypatch, "parallel.pp=2", "parallel.stages=[3,3]", "cluster.ranks_per_node=2")
    model, dense, sparse = config.model, load(SHAPE), load([*SHAPE, *EXPERTS])
    saved = [activations.layers_bytes(one.model, flops.kinds(one.model), config.dtype) // 2 for one in (dense, sparse)]
    costs = Job(config).costs
    assert [stage.token_bytes for stage in costs.stages] == [2 * saved[0], saved[1]], "1F1B: two in flight, and one"
    assert activations.layers_bytes(model, MIXED, config.dtype) == sum(saved)
    assert costs.stages[1].instants[0].token > costs.stages[0].instants[0].token, "experts need more in a layer"
    assert activations.counts_bytes(model, 2) == 8 * (3 * 8 + 2)

    work = [
        sum(one.elements * 2 // 8 if one.stacked else one.elements for one in of_layer(config, number) if one.is_matrix)
        for number in range(6)
    ]
    work[-1] += model.hidden * model.vocab
    assert costs.shares == pytest.approx([sum(work[:3]) / sum(work), sum(work[3:]) / sum(work)])
    for stage, numbers in enumerate(stages(config)):
        ends = (model.vocab + (stage == 1)) * model.hidden
        assert device_parameters(config, stage) == ends + sum(
            one.elements for n in numbers for one in of_layer(config, n)
        )


def test_expert_parallelism_shares_the_experts_of_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["parallel.ep=2", "zero.stage=2", "cluster.ranks_per_node=4"]
    config, sparse = mixed(monkeypatch, *more), load([*SHAPE, *EXPERTS, *more])
    assert expert_collectives(config) == tuple(sent / 2 for sent in expert_collectives(sparse))
    whole, away = parameters(config.model), expert_parameters(config.model)
    reduced = 3 / 4 * (whole - away) + 2 / 4 * away / 2
    assert collectives(config, 4).reduction == pytest.approx(4 * reduced)
    device = sum((one.elements // 2 if one.stacked else one.elements) for one in parameters_of(config.model).values())
    assert device_parameters(config, 0) == device


def test_mixed_layers_have_the_rates_of_their_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Job(config).costs.rates for config in (mixed(monkeypatch), windowed())]
    assert [(rates.windowed, rates.window, rates.pair_f) for rates in both] == [(0.5, WINDOW, both[1].pair_f)] * 2
