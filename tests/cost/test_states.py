from __future__ import annotations

import math
from itertools import product
from typing import Literal

import pytest

from engine.config.load import load
from engine.config.schema import Config, Model
from engine.cost.sizes import bucket_elements, parameters
from engine.cost.states import States, states
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


def test_states_under_zero_1_by_optimizer_class() -> None:
    """tests/zero/test_memory.py counts DeepSpeed's."""
    count = parameters(SMALL)
    assert held(SMALL, "bf16", 1, 1).device == (2 + 4 + 12) * count
    assert held(SMALL, "bf16", 8, 1).device == (2 + 4) * count + 12 * math.ceil(count / 8)
    assert held(SMALL, "fp32", 2, 1).device == (4 + 4 + 4) * count + 12 * math.ceil(count / 2)
    assert [states(config_of(SMALL, dtype, 1), 2).passing for dtype in ("bf16", "fp32")] == [2 * count, 0]


def test_a_bucket_is_no_larger_than_the_model_and_than_256_mib() -> None:
    assert bucket_elements(SMALL) == parameters(SMALL)
    assert 4 * bucket_elements(load(["model=llama7b", "context=1K", "capacity=1K"]).model) == 256 << 20


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_waits_on_the_host_is_not_on_the_device(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per parameter: 12 bytes of optimizer, 4 of gradients for the update; in stage 3 also 4 of accumulated gradients,
    in stages 1 and 2 2 of updated weights. With the optimizer on the host DeepSpeed never runs BF16_Optimizer, so stage
    1 has a bucket too. Stages 1 and 2 have a buffer of the head, the largest parameter, on both sides.
    tests/zero/test_memory.py counts DeepSpeed's."""
    monkeypatch.setattr("engine.cost.table.pinned", lambda size, many=False: size)
    count, head = parameters(SMALL), 2 * 64 * 300
    share = {size: size * math.ceil(count / ranks) for size in (2, 4, 12)}
    for stage in STAGES:
        here, away = (held(SMALL, "bf16", ranks, stage, f"optimizer.on_host={away}") for away in ("false", "true"))
        assert (here.optimizer, away.optimizer, here.host) == (share[12], 0, 0)
        assert away.host == share[12] + share[4] + (share[4] if stage == 3 else share[2] + head)
        buffers = {1: head + 4 * count, 2: head, 3: -share[4]}[stage]
        assert away.device == here.device - share[12] + buffers
    all_away = held(SMALL, "bf16", ranks, 3, "optimizer.on_host=true", "zero.weights_on_host=true")
    assert (all_away.parameters, all_away.gradients) == (0, 0)
    assert all_away.host == share[12] + 2 * share[4] + 2 * share[2], "the weights also before they are joined"
    assert all_away.device == all_away.gather_buffers


def test_pinned_memory_comes_in_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned are master weights, gradients and updated weights in stages 1 and 2, and both gradients in stage 3, the
    second as several tensors if it is large; weights are pinned twice. Moments are not pinned."""
    share, head, away = math.ceil(parameters(SMALL) / 2), 2 * 64 * 300, "optimizer.on_host=true"
    assert (share, head) == (83_936, 38_400)
    one = held(SMALL, "bf16", 2, 1, away)
    assert one.host == 2 * 4 * share + 2 * 2**19 + 2**18 + 2**16
    assert held(SMALL, "fp32", 2, 2, away).host == 2 * 4 * share + 3 * 2**19 + 2**17 + 2 * 4 * share
    three = held(SMALL, "bf16", 2, 3, away)
    assert three.host == 3 * 4 * share + 2 * 2**19
    assert held(SMALL, "bf16", 2, 3, away, "zero.weights_on_host=true").host == three.host + 2**18 + 2 * 2 * share
    monkeypatch.setattr("engine.cost.sizes.SUB_GROUP", 1000)
    assert held(SMALL, "bf16", 2, 3, away).host == three.host - 2**19 + 2 * 4 * share


def test_a_head_larger_than_two_layers_is_gathered_whole() -> None:
    model = shape(**vars(SMALL) | {"vocab": 10_000})
    found = held(model, "bf16", 8, 3).gather_buffers
    assert found == 2 * 64 * 10_000 + 4 * bucket_elements(model)


@pytest.mark.parametrize("ranks", [1, 8, 1000])
def test_each_stage_of_zero_shards_more(ranks: int) -> None:
    """bf16, per parameter: 12 bytes of optimizer, 4 of gradients, 2 of weights. Stage 3 gathers two layers. From stage
    2 on there is a bucket: bf16 in stage 2, fp32 in stage 3."""
    count, two_layers = parameters(SMALL), 2 * 2 * (parameters(SMALL) - 2 * 64 * 300 - 7 * 64) // 3

    def share(size: int) -> int:
        return size * math.ceil(count / ranks)

    assert held(SMALL, "bf16", ranks, 1).device == (2 + 4) * count + share(12)
    assert held(SMALL, "bf16", ranks, 2).device == (2 + 2) * count + share(4) + share(12)
    assert held(SMALL, "bf16", ranks, 3).device == share(2) + share(4) + share(12) + two_layers + 4 * count
    assert [states(config_of(SMALL, "bf16", stage), 2).passing for stage in STAGES] == [2 * count, 0, 0]


@pytest.mark.parametrize(("dtype", "stage", "shares"), [("bf16", 2, 0), ("fp32", 2, 1), ("bf16", 3, 0), ("fp32", 3, 0)])
def test_a_reduction_copies_its_bucket(dtype: str, stage: int, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one bucket the copies are made at the end of the step, else while activations are held. Stage 2 then also
    holds the new gradients in addition to the accumulated ones, unless these are wider or on the host."""
    count, away = (2 if (dtype, stage) == ("bf16", 2) else 4) * parameters(SMALL), "optimizer.on_host=true"
    one = [held(SMALL, dtype, 2, stage, *keys).gather_buffers for keys in ([], [away])]
    monkeypatch.setattr("engine.cost.sizes.BUCKET", 1000)
    many = [held(SMALL, dtype, 2, stage, *keys).gather_buffers for keys in ([], [away])]
    assert many[0] - one[0] == 4 * 2 * 1000 - count + shares * 4 * math.ceil(parameters(SMALL) / 2)
    assert many[1] - one[1] == 4 * 2 * 1000 - count


@pytest.mark.parametrize(("dtype", "stage"), list(product(("bf16", "fp32"), STAGES)))
def test_the_end_of_a_step(dtype: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a bucket (in stage 2 and bf16 in both dtypes), or gradients joined for the update. In stage 3 the
    embedding and its gradient replace the two gathered layers.

    tests/fit/test_estimate_measured.py measures it (few tokens)."""
    count, share = 4 * parameters(SMALL), 4 * math.ceil(parameters(SMALL) / 2)
    here, away = (config_of(SMALL, dtype, stage, f"optimizer.on_host={away}") for away in ("false", "true"))
    both = count + (count // 2 if dtype == "bf16" else 0)
    narrow, layer = 2 if dtype == "bf16" else 4, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    three = count + narrow * 2 * (64 * 300 - layer)
    assert states(away, 2).closing == {1: share, 2: both, 3: three}[stage]
    assert states(here, 2).closing == (count if (dtype, stage) == ("bf16", 1) else states(away, 2).closing)
    assert states(away, 2).passing == 0, "no bf16 gradient waits for the others"
    monkeypatch.setattr("engine.cost.sizes.BUCKET", 1000)
    monkeypatch.setattr("engine.cost.sizes.REDUCED", 2000)
    assert states(here, 2).closing == (0 if (dtype, stage) == ("bf16", 1) else share)
    assert states(away, 2).closing == (share if stage == 1 else 0)
    assert states(away, 64).closing == (4 * 64 * 300 if stage == 1 else 0), "the head, larger than the bucket"


@pytest.mark.parametrize(("dtype", "stage"), list(product(("bf16", "fp32"), STAGES)))
def test_gradients_that_the_first_micro_batch_of_a_step_fills(dtype: str, stage: int) -> None:
    """BF16_Optimizer and stage 3 keep their gradients, and so does stage 2 with several buckets. In stage 1 those of
    the head and the last layer are there already. Gradients on the host fill no device."""
    count, layer = 4 * parameters(SMALL), 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    filling = count - 4 * 64 * 300 - layer
    filled = {1: 0 if dtype == "bf16" else filling, 2: count // 2, 3: 0}
    assert states(config_of(SMALL, dtype, stage), 2).filling == filled[stage]
    away = {1: filling, 2: count // 2 if dtype == "bf16" else 0, 3: 0}
    assert states(config_of(SMALL, dtype, stage, "optimizer.on_host=true"), 2).filling == away[stage]
    large = load(["model=llama7b", "context=1K", "capacity=1K"]).model
    assert (states(config_of(large, "fp32", stage), 2).filling > 0) == (stage == 1)


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
    """The bucket has 64M elements, or all of a device if these are fewer; its copies come on top while activations are
    held."""
    large = load(["model=llama7b", "context=1K", "capacity=1K"]).model
    for model in (SMALL, large):
        whole, half = (held(model, "fp32", 4, stage, "cluster.ranks_per_node=8", f"parallel.tp={tp}") for tp in (1, 2))
        copies = 2 if stage > 1 and model is large else 1
        norms = (2 * model.layers + 1) * model.hidden  # whole on each device
        count = (parameters(model) + norms) / 2
        bucket = copies * 4 * min(1 << 26, math.ceil(count))
        kept = 4 if stage == 3 else 1
        assert half.parameters == pytest.approx(whole.parameters / 2 + 4 * norms / 2 / kept, abs=4)
        assert half.optimizer == pytest.approx(whole.optimizer / 2 + 12 * norms / 2 / 4, abs=12)
        gathered = whole.gather_buffers - copies * 4 * bucket_elements(model)
        assert half.gather_buffers == pytest.approx(bucket + gathered // 2, abs=4 * norms)
