from __future__ import annotations

import math
from itertools import product
from typing import Literal

import pytest

from engine.config.load import load
from engine.config.schema import Config, Model
from engine.cost.sizes import bucket_elements, parameters
from engine.cost.states import States, states
from engine.cost.table import LAYER, letters, total
from engine.models.build import build_model
from tests.cost.shapes import GPU, SMALL, SPARSE, shape

STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)


def config_of(model: Model, dtype: str, stage: int, *keys: str) -> Config:
    """A config of ranks on GPUs, unless the keys name another cluster."""
    return load([f"dtype={dtype}", f"zero.stage={stage}", GPU, *keys]).model_copy(update={"model": model})


def held(model: Model, dtype: str, ranks: int, stage: int, *keys: str) -> States:
    return states(config_of(model, dtype, stage, *keys), ranks)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("small", [SMALL, SPARSE], ids=["dense", "experts"])
def test_parameters_are_those_of_the_model(small: Model, tied: bool) -> None:
    model = shape(**vars(small) | {"tied": tied})
    assert parameters(model) == sum(p.numel() for p in build_model(config_of(model, "fp32", 1)).parameters())


def test_states_under_zero_1() -> None:
    """tests/zero/test_memory.py counts them."""
    count = parameters(SMALL)
    assert held(SMALL, "bf16", 1, 1).device == (2 + 4 + 12) * count
    assert held(SMALL, "bf16", 8, 1).device == (2 + 4) * count + 12 * math.ceil(count / 8)
    assert held(SMALL, "fp32", 2, 1).device == (4 + 4) * count + 12 * math.ceil(count / 2)


def test_a_bucket_is_no_larger_than_the_model_and_grows_with_the_ranks_in_stage_1_only() -> None:
    """Twice as large with four times as many ranks; with 12,288 it has all of a 7B model."""
    small = [config_of(SMALL, "fp32", stage) for stage in STAGES]
    assert [bucket_elements(config, 8) for config in small] == [parameters(SMALL)] * 3
    one, *others = (load(["model=llama7b", "context=1K", "capacity=1K", f"zero.stage={stage}"]) for stage in STAGES)
    assert [bucket_elements(config, ranks) for config in others for ranks in (1, 12288)] == [2**26] * 4
    assert bucket_elements(one, 512) == pytest.approx(2 * bucket_elements(one, 128))
    assert 2**26 < bucket_elements(one, 2) < bucket_elements(one, 12288) == parameters(one.model)


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_waits_on_the_host_is_not_on_the_device(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per parameter: 12 bytes of optimizer, 4 of gradients for the update; in stage 3 also 4 of accumulated gradients,
    in stages 1 and 2 2 of updated weights. tests/zero/test_memory.py counts them."""
    monkeypatch.setattr("engine.cost.table.pinned", lambda size, many=False: size)
    share = {size: size * math.ceil(parameters(SMALL) / ranks) for size in (2, 4, 12)}
    for stage in STAGES:
        here, away = (held(SMALL, "bf16", ranks, stage, f"optimizer.on_host={away}") for away in ("false", "true"))
        assert (here.optimizer, away.optimizer, here.host) == (share[12], 0, 0)
        assert away.host == share[12] + share[4] + (share[4] if stage == 3 else share[2])
        assert away.device == here.device - share[12] - (share[4] if stage == 3 else 0)
    all_away = held(SMALL, "bf16", ranks, 3, "optimizer.on_host=true", "zero.weights_on_host=true")
    assert (all_away.parameters, all_away.gradients) == (0, 0)
    assert all_away.host == share[12] + 2 * share[4] + 2 * share[2], "the weights also before they are joined"
    assert all_away.device == all_away.gather_buffers


def test_pinned_memory_comes_in_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """In stage 3 both gradients are pinned, the second as several tensors if it is large, and weights twice. Moments
    are not pinned. Stages 1 and 2 pin as much as they need."""
    share, away = math.ceil(parameters(SMALL) / 2), "optimizer.on_host=true"
    assert share == 83_936
    for dtype, stage, weight in (("bf16", 1, 2), ("fp32", 2, 4)):
        assert held(SMALL, dtype, 2, stage, away).host == (3 * 4 + 4 + weight) * share
    three = held(SMALL, "bf16", 2, 3, away)
    assert three.host == 3 * 4 * share + 2 * 2**19
    assert held(SMALL, "bf16", 2, 3, away, "zero.weights_on_host=true").host == three.host + 2**18 + 2 * 2 * share
    monkeypatch.setattr("engine.cost.sizes.SUB_GROUP", 1000)
    assert held(SMALL, "bf16", 2, 3, away).host == three.host - 2**19 + 2 * 4 * share


def test_a_head_larger_than_two_layers_is_gathered_whole() -> None:
    model = shape(**vars(SMALL) | {"vocab": 10_000})
    found = held(model, "bf16", 8, 3).gather_buffers
    assert found == 2 * 64 * 10_000 + 4 * parameters(model)


@pytest.mark.parametrize("ranks", [1, 8, 1000])
def test_each_stage_of_zero_shards_more(ranks: int) -> None:
    """bf16, per parameter: 12 bytes of optimizer, 4 of gradients, 2 of weights. Stage 3 gathers two layers. From stage
    2 on there are buckets of gradients in fp32."""
    count, two_layers = parameters(SMALL), 2 * 2 * (parameters(SMALL) - 2 * 64 * 300 - 7 * 64) // 3

    def share(size: int) -> int:
        return size * math.ceil(count / ranks)

    assert held(SMALL, "bf16", ranks, 1).device == (2 + 4) * count + share(12)
    assert held(SMALL, "bf16", ranks, 2).device == (2 + 4) * count + share(4) + share(12)
    assert held(SMALL, "bf16", ranks, 3).device == share(2) + share(4) + share(12) + two_layers + 4 * count


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_buffers_of_a_reduction(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 2 fills a bucket while the one before is reduced. Stage 3 copies its bucket: with one bucket at the end of
    the step, else while activations are held."""
    monkeypatch.setattr("engine.cost.sizes.BUCKET", 1000)
    buffers = [held(SMALL, dtype, 2, stage).gather_buffers for stage in STAGES]
    monkeypatch.setattr("engine.cost.sizes.BUCKET", 1500)
    larger = [held(SMALL, dtype, 2, stage).gather_buffers for stage in STAGES]
    assert [after - before for before, after in zip(buffers, larger, strict=True)] == [0, 2 * 4 * 500, 2 * 4 * 500]


def test_experts_with_buckets_of_their_own_have_one_more_in_stage_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of experts and of other parameters alternate, so a bucket of each grows while another is reduced."""
    monkeypatch.setattr("engine.cost.sizes.BUCKET", 1000)
    for model, ep, buckets in ((SPARSE, 2, 3), (SPARSE, 1, 2), (SMALL, 1, 2)):
        keys = ["cluster.ranks_per_node=8"]
        keys += [f"parallel.ep={ep}", "model.family=mixtral", "model.experts=8", "model.top_k=2"] if ep > 1 else []
        assert held(model, "fp32", 4, 2, *keys).gather_buffers == buckets * 4 * 1000


@pytest.mark.parametrize(("dtype", "stage"), list(product(("bf16", "fp32"), STAGES)))
def test_the_end_of_a_step(dtype: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages 1 and 2 need no more memory. Stage 3 copies a bucket, or joins gradients for the update; the embedding and
    its gradient replace the two gathered layers.

    tests/fit/test_estimate_measured.py measures it (few tokens)."""
    count, share = 4 * parameters(SMALL), 4 * math.ceil(parameters(SMALL) / 2)
    here, away = (config_of(SMALL, dtype, stage, f"optimizer.on_host={away}") for away in ("false", "true"))
    narrow, layer = 2 if dtype == "bf16" else 4, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    three = count + narrow * 2 * (64 * 300 - layer)
    assert states(here, 2).closing == states(away, 2).closing == (three if stage == 3 else 0)
    monkeypatch.setattr("engine.cost.sizes.BUCKET", 1000)
    assert (states(here, 2).closing, states(away, 2).closing) == (share if stage == 3 else 0, 0)


def test_states_are_those_of_gpus_whatever_the_cluster() -> None:
    """What differs on a CPU is one allowance (allowance.py)."""
    keys = ["optimizer.on_host=true"]
    assert states(config_of(SMALL, "fp32", 2, "cluster.name=local", *keys), 2) == states(
        config_of(SMALL, "fp32", 2, *keys), 2
    )


def test_sgd_has_no_second_moment_and_without_momentum_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cost.table.pinned", lambda size, many=False: size)
    count = parameters(SMALL)
    for keys, tensors in (([], 3), (["optimizer.name=sgd"], 2), (["optimizer.name=sgd", "optimizer.betas=[0,0]"], 1)):
        assert held(SMALL, "bf16", 2, 1, *keys).optimizer == 4 * tensors * math.ceil(count / 2)
        away = held(SMALL, "bf16", 2, 3, "optimizer.on_host=true", *keys)
        assert away.host == 4 * (tensors + 2) * math.ceil(count / 2)


@pytest.mark.parametrize("stage", STAGES)
def test_of_a_model_over_several_devices_each_holds_a_part_but_as_large_a_bucket(stage: int) -> None:
    """Buckets have 64M elements, or all of a device if these are fewer. Stage 2 has two; in stage 3 a copy of one comes
    on top while activations are held."""
    large = load(["model=llama7b", "context=1K", "capacity=1K"]).model
    for model in (SMALL, large):
        whole, half = (held(model, "fp32", 4, stage, "cluster.ranks_per_node=8", f"parallel.tp={tp}") for tp in (1, 2))
        copies = 0 if stage == 1 else 2 if model is large else 1
        norms = (2 * model.layers + 1) * model.hidden  # whole on each device
        count = (parameters(model) + norms) / 2
        bucket = copies * 4 * min(1 << 26, math.ceil(count))
        kept = 4 if stage == 3 else 1
        assert half.parameters == pytest.approx(whole.parameters / 2 + 4 * norms / 2 / kept, abs=4)
        assert half.optimizer == pytest.approx(whole.optimizer / 2 + 12 * norms / 2 / 4, abs=12)
        gathered = whole.gather_buffers - copies * 4 * min(2**26, parameters(model))
        assert half.gather_buffers == pytest.approx(bucket + gathered // 2, abs=4 * norms)


def test_fp8_rounds_in_fp32_where_nothing_is_compiled() -> None:
    """On GPUs too: 4 bytes of each element of the largest matrix, before it is rounded."""
    keys = ("linear_dtype=fp8",)
    auto, never, always = (
        total(LAYER, letters(config_of(SMALL, "bf16", 1, *keys, f"compile={wish}")))
        for wish in ("auto", "never", "always")
    )
    assert (never - auto, always) == (4 * 64 * 160, auto)
