"""A machine with a known calibration, and its measurements."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from engine.config.load import load
from engine.config.schema import Config
from engine.cost.calibration import alike
from engine.cost.datasheets import nominal
from engine.hardware.fit import predict, sharded_s
from engine.hardware.measured import Case, Copies, Measured, Network, Timing, cases
from engine.hardware.prepare import measuring

TRUE = replace(
    nominal("local"),
    device="made up",
    source="measured",
    peak_flops_per_s=6e10,
    **alike(2.1e10),
    fp8_speedup=0.2,
    linear_backward=1.7,
    attention_flops_per_s=4.5e10,
    attention_backward=2.8,
    half_tokens=12.0,
    micro_batch_s=1.1e-3,
    layer_s=5.4e-4,
    gather_s=9e-3,
    sequence_s=3.5e-5,
    round_s=7e-4,
    ring_s=8e-5,
    merge_bytes_per_s=2.2e9,
    latency_s=1.5e-4,
    node_bytes_per_s=2e9,
    overlap=0.4,
    copy_bytes_per_s=1.1e10,
    reduce_bytes_per_s=3e8,
    memory_bytes_per_s=6e9,
    step_s=1.2e-2,
    plan_build_s=0.0,
)


@cache
def config(ranks: int = 2) -> Config:
    """The config with which the quickstart's model is measured."""
    return measuring(load([]), ranks, Path("measuring"))


def measured(ranks: int = 2) -> Measured:
    """The measurements of the machine, without noise."""
    ours = config(ranks)
    todo = cases(ours.model.layers, 1, ranks, longest=8192)
    sizes = (4096, 1 << 19)
    parameters = (40_000, 4_000_000)
    update = 48 / ranks / TRUE.memory_bytes_per_s
    hop = 2 * (ranks - 1) * TRUE.latency_s  # of the reduction and of the gather
    travel = (ranks - 1) / ranks * 8 / TRUE.reduce_bytes_per_s
    return Measured(
        device=TRUE.device,
        ranks=ranks,
        layers=ours.model.layers,
        half_tokens=TRUE.half_tokens,
        product_flops_per_s=TRUE.peak_flops_per_s,
        micro_batches=tuple((case, _timing(case, ours)) for case in todo),
        transfers=tuple((size, TRUE.latency_s + size / TRUE.node_bytes_per_s) for size in sizes if ranks > 1),
        sharded=_sharded(ours) if ranks > 1 else None,
        overlap=TRUE.overlap if ranks > 1 else 0.0,
        updates=tuple((count, 2e-3 + hop + count * (update + travel)) for count in parameters),
        copies=Copies(to_host=TRUE.copy_bytes_per_s, to_device=1.1 * TRUE.copy_bytes_per_s, at_once=8e9),
        memory_bytes_per_s=TRUE.memory_bytes_per_s,
        kernel="fused_cpu",
        shape_build_s=(0.44, 0.55),
        fixed_s=TRUE.step_s + hop + parameters[0] * (update + travel),
    )


def network(pairs: int, cards: int, latency_s: float = 2e-5, card: float = 4e10) -> Network:
    """Messages between two nodes of `pairs` ranks, which share `cards` network cards of `card` bytes/s each way."""
    sizes, each = (4096, 1 << 20, 1 << 27), min(cards, pairs) * card / pairs
    return Network(
        pairs,
        tuple((size, latency_s + size / card) for size in sizes),
        tuple((size, latency_s + size / each) for size in sizes),
    )


def _sharded(ours: Config) -> tuple[Timing, Timing]:
    """A micro-batch with ZeRO-1, and the same with ZeRO-3."""
    whole = _timing(Case(ours.model.layers, (32,)), ours)
    total = sharded_s(whole, TRUE, ours)
    return whole, Timing(total / 3, 2 * total / 3, spread=0.0)


def _timing(case: Case, ours: Config) -> Timing:
    """Forward and backward times of a case; each has half of the fixed costs."""
    fixed = replace(TRUE, **alike(1e30), attention_flops_per_s=1e30, half_tokens=0.0)
    half = predict(case, fixed, ours) / 2
    forward = predict(case, replace(TRUE, linear_backward=0.0, attention_backward=0.0), ours) - half
    return Timing(forward, predict(case, TRUE, ours) - forward, spread=0.0)
