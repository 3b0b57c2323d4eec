"""What a GPU will be asked for is a config that loads, and a tiny one of it runs here."""

from __future__ import annotations

import pytest

from benchmarks.gpu import train
from engine.config.load import load
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world

pytestmark = pytest.mark.long


def test_every_case_is_a_config() -> None:
    for case in (case for _, cases, _ in train.SECTIONS.values() for case in cases):
        config = train.config_of(*case)
        assert (config.context, config.recompute, config.model.vocab) == (case[1], case[2], train.VOCAB)


def test_kernels_are_summed_by_class() -> None:
    names = {
        "void cudnn::fusion::cutlass_flash_bprop_sm90": "attention",
        "sm90_xmma_gemm_bf16bf16": "product",
        "nvjet_tst_128x256_64x4": "product",
        "at::native::direct_copy_kernel_cuda": "copy",
        "triton_poi_fused_mul_silu": "pointwise",
    }
    assert {name: train.class_of(name) for name in names} == names
    kernel = {"cat": "kernel", "ts": 0.0, "args": {"stream": 7}, "pid": 0, "tid": 7, "ph": "X"}
    events = [kernel | {"name": name, "ts": 10.0 * number, "dur": 10.0} for number, name in enumerate(names)]
    ms = train.summary(events, seconds=100e-6)["ms"]
    assert ms == pytest.approx({"attention": 0.01, "product": 0.02, "copy": 0.01, "pointwise": 0.01, "none": 0.05})


def tiny() -> dict[str, str | float]:
    return train.measure(load(["recipe=quickstart", "context=64", "capacity=64", "batch_tokens=64"]), alone())


@pytest.mark.world
def test_a_tiny_model_is_measured() -> None:
    (found,) = run_world(1, tiny)
    assert found["tokens_per_s"] > 0 and 0 < found["mfu"] < 1 and found["kernel"] == "fused_cpu"


def tiny_plan() -> train.Row:
    train.STEPS_S = 0.0
    return train.planned(train.config_of(*train.TINY[0]), alone())


@pytest.mark.world
def test_kernels_are_compared_on_the_same_steps_of_plans() -> None:
    """And on one at least, however long it takes."""
    (found,) = run_world(1, tiny_plan)
    rows = [found, *found["others"]]
    assert [row["kernel"] for row in rows] == ["fused_cpu", "reference"]
    for row in rows:
        assert len(row["new_s"]) == len(row["seen_s"]) == len(row["sequences"]) == 1 and row["mfu"] > 0
