"""Numbers as a page writes them, and what several pages say of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config.schema import Config
from engine.config.units import counted
from engine.planner.estimate import Estimate
from engine.planner.plan import StepPlan

Pair = tuple[str, str]  # a name and its value, as text
Triple = tuple[str, str, str]


def short_tokens(tokens: float) -> str:
    """Return a number of tokens in a few letters: 640, 1.5K, 2M (K = 1024)."""
    for unit, letter in ((1024**2, "M"), (1024, "K")):
        if tokens >= unit:
            return f"{tokens / unit:.1f}".removesuffix(".0") + letter
    return f"{tokens:.0f}"


def short_seconds(seconds: float) -> str:
    """Return a time in three digits and a unit: 1.25 s, 340 ms, 18 us; whole seconds from 1,000 on."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit or name == "µs":
            value = seconds / unit
            return f"{value:,.0f} {name}" if value >= 1000 else f"{value:.3g} {name}"
    raise AssertionError("the last unit takes all")


def number(value: str | int | float) -> str:
    """Return a number with separators, three digits behind the point if it is small and no whole one; text as it is."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
    return value if isinstance(value, str) else f"{value:,}"


# Facts whose names in JSON do not read well, or lack a unit.
NAMES = {
    "max_degree": "largest ring (ranks)",
    "micro_batches": "micro-batches",
    "offloaded_micro_batches": "of them with offload",
    "max_peers": "most peers of a rank",
    "makespan_s": "makespan (s)",
    "lower_bound_s": "lower bound (s)",
    "ring_bytes": "sent in rings (GiB)",
    "planning_s": "planning (s)",
    "step_s": "step (s)",
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up",
    "compute_s": "computes (s)",
    "exposed_comm_s": "waits for transfers (s)",
    "mfu": "MFU",
}


def cell(facts: Mapping[str, Any], name: str) -> str:
    """Return a fact as its table has it, in the unit that NAMES says."""
    return number(facts[name] / 2**30 if name == "ring_bytes" else facts[name])


MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "saved": "activations",
    "working_set": "working set",
    "logits": "loss",
    "ring_buffers": "ring buffers",
    "gather_buffers": "ZeRO's buffers",
    "context": "runtime",
    "fragmentation": "gaps",
}


def memory_parts(found: Estimate) -> dict[str, int]:
    """Return the bytes of a device by name, activations and what is beside the tensors in their parts."""
    parts = found.items | {"saved": found.items["activations"] - found.working_set, **vars(found)}
    return {name: parts[key] for key, name in MEMORY.items()}


def memory_unit(peak: int) -> tuple[str, int]:
    """Return the unit that an estimate is written in, and its bytes: one that shows the parts of a tiny model too.

    The runtime of a GPU alone takes two GiB.
    """
    return ("GiB", 2**30) if peak >= 4 * 2**30 else ("MiB", 2**20)


def memory_rows(found: Estimate) -> list[Triple]:
    """Return rows of a name, its size in the unit of the estimate and its share of the device.

    The last ones are the sum and the host.
    """
    _, unit = memory_unit(found.peak)
    rows = [*memory_parts(found).items(), ("peak", found.peak), ("of a device's", found.device_total)]
    on_host = [("on the host", found.host, found.host_total), ("of a rank's share", found.host_total, found.host_total)]
    told = [(name, size, found.device_total) for name, size in rows] + on_host
    return [(name, f"{size / unit:,.2f}", f"{size / of:.0%}" if of else "") for name, size, of in told]


def source(config: Config) -> str:
    """Return where the lengths come from, as people say it."""
    lengths = config.lengths
    if lengths.name == "data":
        return f"data.path={config.data.path}"
    return f"lengths.path={lengths.path}" if lengths.name == "file" else f"lengths={lengths.name}"


def hdp_ranks(ranks: int, tp: int, pp: int) -> str:
    """Return a number of HDP ranks as people say it, with their devices where they have several."""
    if tp * pp == 1:
        return counted(ranks, "rank")
    return f"{counted(ranks, 'HDP rank')} of {tp * pp} devices (tp {tp} x pp {pp})"


def machine(config: Config, plan: StepPlan, rates: str) -> list[Pair]:
    """Return the model, the ranks and the lengths that a plan was made for; `rates` are the cost model's."""
    stages = f", each a pipeline of {plan.stages}" if plan.stages > 1 else ""
    return [
        ("model", config.model.name),
        ("planner", plan.planner),
        ("ranks", f"{plan.ranks:,} of cluster={config.cluster.name}{stages}, {plan.mode} mode"),
        ("rates", rates),
        ("lengths", source(config)),
        ("context", f"{short_tokens(config.context)} tokens"),
        ("capacity of a rank", f"{short_tokens(plan.capacity)} tokens"),
    ]
