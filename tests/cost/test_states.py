from __future__ import annotations

import math
from itertools import product
from typing import Literal

import pytest

from engine.config.load import load
from engine.config.schema import Config, Model
from engine.cost.states import (
    Held,
    bucket_elements,
    closing_bytes,
    filling_bytes,
    parameters,
    passing_bytes,
    states,
)
from engine.models.build import build_model
from tests.cost.shapes import GPU, SMALL, SPARSE, shape

STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)


CPU = "cluster.name=local"


def config_of(model: Model, dtype: str, stage: int, *keys: str) -> Config:
    """Return that of ranks on GPUs, unless the keys say another cluster."""
    return load([f"dtype={dtype}", f"zero.stage={stage}", GPU, *keys]).model_copy(update={"model": model})


def held(model: Model, dtype: str, ranks: int, stage: int, *keys: str) -> Held:
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
    assert [passing_bytes(config_of(SMALL, dtype, 1)) for dtype in ("bf16", "fp32")] == [2 * count, 0]


def test_a_bucket_is_no_larger_than_the_model_and_than_256_mib() -> None:
    assert bucket_elements(SMALL) == parameters(SMALL)
    assert 4 * bucket_elements(load(["model=llama7b", "context=1K", "capacity=1K"]).model) == 256 << 20


@pytest.mark.parametrize("ranks", [1, 8])
def test_what_waits_on_the_host_is_not_on_the_device(ranks: int) -> None:
    """Of a parameter 12 bytes and a copy of the gradients' 4, with the sum of the gradients in stage 3, and before it
    with the 2 of updated weights; never BF16_Optimizer, so gradients go through a bucket in stage 1 too, on a CPU at
    the end of the step. The head, the largest parameter, has a buffer on either side in stages 1 and 2.
    tests/zero/test_memory.py counts DeepSpeed's."""
    count, head = parameters(SMALL), 2 * 64 * 300
    share = {size: size * math.ceil(count / ranks) for size in (2, 4, 12)}
    for stage in STAGES:
        here, away = (held(SMALL, "bf16", ranks, stage, CPU, f"optimizer.on_host={away}") for away in ("false", "true"))
        assert (here.optimizer, away.optimizer, here.host) == (share[12], 0, 0)
        assert away.host == share[12] + share[4] + (share[4] if stage == 3 else share[2] + head)
        buffers = {1: head, 2: head, 3: -share[4]}[stage]
        assert away.device == here.device - share[12] + buffers
    all_away = held(SMALL, "bf16", ranks, 3, CPU, "optimizer.on_host=true", "zero.weights_on_host=true")
    assert (all_away.parameters, all_away.gradients) == (0, 0)
    assert all_away.host == share[12] + 2 * share[4] + share[2]
    assert all_away.device == all_away.gather_buffers


def test_pinned_memory_comes_in_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: masters, gradients and updated weights of stages 1 and 2, and both of stage 3's gradients, of which the
    second are several tensors if they are many; weights once more than they are. Moments are not pinned."""
    share, head, away = math.ceil(parameters(SMALL) / 2), 2 * 64 * 300, "optimizer.on_host=true"
    assert (share, head) == (83_936, 38_400)
    one = held(SMALL, "bf16", 2, 1, away)
    assert one.host == 2 * 4 * share + 2 * 2**19 + 2**18 + 2**16
    assert held(SMALL, "fp32", 2, 2, away).host == 2 * 4 * share + 3 * 2**19 + 2**17 + 2 * 4 * share
    three = held(SMALL, "bf16", 2, 3, away)
    assert three.host == 3 * 4 * share + 2 * 2**19
    assert held(SMALL, "bf16", 2, 3, away, "zero.weights_on_host=true").host == three.host + 2**18 + 2 * 2 * share
    monkeypatch.setattr("engine.cost.states._SUB_GROUP", 1000)
    assert held(SMALL, "bf16", 2, 3, away).host == three.host - 2**19 + 2 * 4 * share


def test_a_head_larger_than_two_layers_is_gathered_whole() -> None:
    model = shape(**vars(SMALL) | {"vocab": 10_000})
    found = held(model, "bf16", 8, 3).gather_buffers
    assert found == 2 * 64 * 10_000 + 4 * bucket_elements(model)


@pytest.mark.parametrize("ranks", [1, 8, 1000])
def test_each_stage_of_zero_shards_more(ranks: int) -> None:
    """bf16: 12 bytes of optimizer a parameter, 4 of gradients, 2 of weights; in stage 3 two layers are whole. From
    stage 2 on gradients go through a bucket, in bf16 first and in stage 3 in fp32."""
    count, two_layers = parameters(SMALL), 2 * 2 * (parameters(SMALL) - 2 * 64 * 300 - 7 * 64) // 3

    def share(size: int) -> int:
        return size * math.ceil(count / ranks)

    assert held(SMALL, "bf16", ranks, 1).device == (2 + 4) * count + share(12)
    assert held(SMALL, "bf16", ranks, 2).device == (2 + 2) * count + share(4) + share(12)
    assert held(SMALL, "bf16", ranks, 3).device == share(2) + share(4) + share(12) + two_layers + 4 * count
    assert [passing_bytes(config_of(SMALL, "bf16", stage)) for stage in STAGES] == [2 * count, 0, 0]


@pytest.mark.parametrize(("dtype", "stage", "shares"), [("bf16", 2, 0), ("fp32", 2, 1), ("bf16", 3, 0), ("fp32", 3, 0)])
def test_a_reduction_copies_its_bucket(dtype: str, stage: int, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the backward pass ends, if the model is one bucket; else while activations are there too, and in stage 2 a
    second share of the gradients, which the first one is not narrower than, unless they are added up on the host."""
    count, away = (2 if (dtype, stage) == ("bf16", 2) else 4) * parameters(SMALL), "optimizer.on_host=true"
    one = [held(SMALL, dtype, 2, stage, *keys).gather_buffers for keys in ([], [away])]
    monkeypatch.setattr("engine.cost.states._BUCKET", 1000)
    many = [held(SMALL, dtype, 2, stage, *keys).gather_buffers for keys in ([], [away])]
    assert many[0] - one[0] == 4 * 2 * 1000 - count + shares * 4 * math.ceil(parameters(SMALL) / 2)
    assert many[1] - one[1] == 4 * 2 * 1000 - count


@pytest.mark.parametrize(("dtype", "stage"), list(product(("bf16", "fp32"), STAGES)))
def test_the_end_of_a_step(dtype: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of what is reduced at once, in bf16 of stage 2 narrow and wide, or a rank's gradients joined. Of stage 3's
    two gathered layers there are the embedding and its gradient.

    tests/planner/test_estimate_measured.py measures it (few tokens)."""
    count, share = 4 * parameters(SMALL), 4 * math.ceil(parameters(SMALL) / 2)
    here, away = (config_of(SMALL, dtype, stage, f"optimizer.on_host={away}") for away in ("false", "true"))
    both = count + (count // 2 if dtype == "bf16" else 0)
    narrow, layer = 2 if dtype == "bf16" else 4, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    three = count + narrow * 2 * (64 * 300 - layer)
    assert closing_bytes(away, 2) == {1: share, 2: both, 3: three}[stage]
    assert closing_bytes(here, 2) == (count if (dtype, stage) == ("bf16", 1) else closing_bytes(away, 2))
    assert passing_bytes(away) == 0, "no bf16 gradient waits for the others"
    monkeypatch.setattr("engine.cost.states._BUCKET", 1000)
    monkeypatch.setattr("engine.cost.states._REDUCED", 2000)
    assert closing_bytes(here, 2) == (0 if (dtype, stage) == ("bf16", 1) else share)
    assert closing_bytes(away, 2) == (share if stage == 1 else 0)
    assert closing_bytes(away, 64) == (4 * 64 * 300 if stage == 1 else 0), "the head, larger than the bucket"


@pytest.mark.parametrize(("dtype", "stage"), list(product(("bf16", "fp32"), STAGES)))
def test_gradients_that_the_first_micro_batch_of_a_step_fills(dtype: str, stage: int) -> None:
    """BF16_Optimizer and stage 3 keep theirs, and stage 2 from its first bucket on. In stage 1 the head's and the last
    layer's are there already. Away they fill no device."""
    count, layer = 4 * parameters(SMALL), 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    filling = count - 4 * 64 * 300 - layer
    filled = {1: 0 if dtype == "bf16" else filling, 2: count // 2, 3: 0}
    assert filling_bytes(config_of(SMALL, dtype, stage), 2) == filled[stage]
    away = {1: filling, 2: count // 2 if dtype == "bf16" else 0, 3: 0}
    assert filling_bytes(config_of(SMALL, dtype, stage, "optimizer.on_host=true"), 2) == away[stage]
    large = load(["model=llama7b", "context=1K", "capacity=1K"]).model
    assert (filling_bytes(config_of(large, "fp32", stage), 2) > 0) == (stage == 1)


def test_a_cluster_of_any_name_is_one_of_gpus() -> None:
    """Only this machine's is not: memory that is not needed hurts less than memory that is not there."""
    mine = config_of(SMALL, "fp32", 2, "cluster.name=mine", "optimizer.on_host=true")
    assert states(mine, 2) == states(config_of(SMALL, "fp32", 2, "optimizer.on_host=true"), 2)


@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 1), ("bf16", 2), ("fp32", 2)])
def test_on_a_cpu_a_bucket_counts_once_it_is_written(dtype: str, stage: int) -> None:
    """In stage 1 when the step ends, in stage 2 through each backward pass. tests/launch/test_resident.py measures."""
    bucket = (2 if dtype == "bf16" else 4) * parameters(SMALL)
    gpu, cpu = (config_of(SMALL, dtype, stage, cluster) for cluster in (GPU, CPU))
    assert states(gpu, 2).gather_buffers == bucket
    assert states(cpu, 2).gather_buffers == 0
    assert passing_bytes(cpu) - passing_bytes(gpu) == (bucket if stage == 2 else 0)
    assert closing_bytes(cpu, 2) - closing_bytes(gpu, 2) == bucket


def test_a_cpu_has_all_of_several_buckets_and_none_of_bf16_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(config_of(SMALL, "bf16", 1, CPU), 2) == states(config_of(SMALL, "bf16", 1), 2)
    monkeypatch.setattr("engine.cost.states._BUCKET", 1000)
    assert states(config_of(SMALL, "fp32", 2, CPU), 2) == states(config_of(SMALL, "fp32", 2), 2)


def test_on_a_cpu_what_zero_3_reduces_or_gathers_at_once_is_copied_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By gloo: a bucket of fp32, when the step ends or, if there are several, always; and a layer, or the head."""
    gpu, cpu = (config_of(SMALL, "bf16", 3, cluster) for cluster in (GPU, CPU))
    gathered = 2 * max((parameters(SMALL) - 2 * 64 * 300 - 7 * 64) // 3, 64 * 300)
    assert states(cpu, 2).gather_buffers - states(gpu, 2).gather_buffers == gathered
    assert closing_bytes(cpu, 2) - closing_bytes(gpu, 2) == 4 * parameters(SMALL) - gathered
    monkeypatch.setattr("engine.cost.states._BUCKET", 1000)
    assert states(cpu, 2).gather_buffers - states(gpu, 2).gather_buffers == gathered + 4 * 1000
    assert closing_bytes(cpu, 2) == closing_bytes(gpu, 2)


def test_sgd_has_no_second_moment_and_without_momentum_none() -> None:
    count = parameters(SMALL)
    for keys, tensors in (([], 3), (["optimizer.name=sgd"], 2), (["optimizer.name=sgd", "optimizer.betas=[0,0]"], 1)):
        assert held(SMALL, "bf16", 2, 1, *keys).optimizer == 4 * tensors * math.ceil(count / 2)
        away = held(SMALL, "bf16", 2, 3, CPU, "optimizer.on_host=true", *keys)
        assert away.host == 4 * (tensors + 2) * math.ceil(count / 2)


@pytest.mark.parametrize("stage", STAGES)
def test_of_a_model_over_several_devices_each_holds_a_part_but_as_large_a_bucket(stage: int) -> None:
    """The bucket is DeepSpeed's: 64M elements, or all that a device has where that is less; beside activations there is
    a copy of it."""
    large = load(["model=llama7b", "context=1K", "capacity=1K"]).model
    for model in (SMALL, large):
        whole, half = (held(model, "fp32", 4, stage, "cluster.ranks_per_node=8", f"parallel.tp={tp}") for tp in (1, 2))
        copies = 2 if stage > 1 and model is large else 1
        bucket = copies * 4 * min(1 << 26, math.ceil(parameters(model) / 2))
        assert half.parameters == pytest.approx(whole.parameters / 2, abs=4)
        assert half.optimizer == pytest.approx(whole.optimizer / 2, abs=12)
        gathered = whole.gather_buffers - copies * 4 * bucket_elements(model)
        assert half.gather_buffers == bucket + gathered // 2
