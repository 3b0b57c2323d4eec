"""Text that pages and commands share: formatted numbers, labels, explanations of terms, and facts of a config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.keys import field_at
from engine.config.schema import Config
from engine.config.units import counted, format_apart, format_count, unit_of
from engine.fit.estimate import Estimate
from engine.planner.plan.step_plan import StepPlan
from engine.run.speed import Speed

Pair = tuple[str, str]  # a name and its value, as text
Triple = tuple[str, str, str]


def short_tokens(tokens: float) -> str:
    """Format a number of tokens in a few letters: 640, 1.5K, 2M (K = 1,024)."""
    for unit, letter in ((1024**2, "M"), (1024, "K")):
        if tokens >= unit:
            return f"{tokens / unit:.1f}".removesuffix(".0") + letter
    return f"{tokens:.0f}"


def short_seconds(seconds: float) -> str:
    """Format a time with three digits and a unit: 1.25 s, 340 ms, 18 µs; whole seconds from 1,000 on."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit or name == "µs":
            value = seconds / unit
            return f"{value:,.0f} {name}" if value >= 1000 else f"{value:.3g} {name}"
    raise AssertionError("the last unit applies to every time")


def long_seconds(seconds: float) -> str:
    """Format a duration in words: 42 s, 7 min 5 s, 3 h 20 min, 2 d 4 h."""
    for unit, name, smaller, less in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if round(seconds) >= unit:
            whole, rest = divmod(round(seconds / smaller) * smaller, unit)
            return f"{whole} {name}" + (f" {rest // smaller} {less}" if rest else "")
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def value_texts(key: str, values: Sequence[Any]) -> list[str]:
    """Format values of a key of the config, tokens and bytes with units; a missing value is a dash.

    Sizes that differ have enough decimals to show it.
    """
    field = field_at(key)
    unit = unit_of(field) if field else None
    counts = [value for value in values if type(value) is int]
    sizes = dict(zip(counts, format_apart(*counts), strict=True)) if unit == "bytes" else {}

    def text(value: Any) -> str:
        if unit and type(value) is int:
            return sizes.get(value) or format_count(value)
        return "-" if value is None else value if isinstance(value, str) else json.dumps(value)

    return [text(value) for value in values]


def metric_text(speed: Speed | None, name: str) -> str:
    """Format a figure of the speed of a run; a dash if no step has that metric."""
    value: float | None = getattr(speed, name, None)
    if value is None:
        return "-"
    return {"tokens_per_s": f"{value:,.0f}", "step_s": short_seconds(value)}.get(name, f"{value:.1%}")


def number(value: str | int | float) -> str:
    """Format a number with thousands separators; floats below 1,000 get three decimals. Returns text unchanged."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
    return value if isinstance(value, str) else f"{value:,}"


# The facts of a plan that tables show.
PLAN_FACTS = (
    "sequences",
    "tokens",
    "micro_batches",
    "offloaded_micro_batches",
    "max_degree",
    "max_peers",
    "balance",
    "makespan_s",
    "lower_bound_s",
    "ring_bytes",
    "planning_s",
)
# The facts that tables compare planners by.
PLANNER_FACTS = ("balance", "max_degree", "micro_batches", "ring_bytes", "makespan_s")
# Facts of document lengths, in tokens, and their labels.
LENGTH_FACTS = {"mean": "mean", "p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9", "max": "longest"}
# Facts of the documents of a source, and their labels.
SOURCE_FACTS = {"samples": "documents", "tokens": "tokens", "p50": "p50", "p99": "p99", "max": "longest"}
# Labels of facts whose JSON keys do not read well, or lack a unit.
NAMES = {
    "max_degree": "largest ring (ranks)",
    "micro_batches": "micro-batches",
    "offloaded_micro_batches": "micro-batches with offload",
    "max_peers": "max. peers of a rank",
    "makespan_s": "makespan (s)",
    "lower_bound_s": "lower bound (s)",
    "ring_bytes": "sent in rings (GiB)",
    "planning_s": "planning (s)",
    "step_s": "step (s)",
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up",
    "speedup_tuned": "speed-up over static, tuned",
    "compute_s": "compute (s)",
    "exposed_comm_s": "transfer wait (s)",
    "mfu": "MFU",
}
MAKESPAN = "Makespan: the time until the last rank finishes its micro-batches."
BALANCE = (
    "Balance: mean useful work of a rank, at the speed of unsplit sequences, divided by the makespan; 1 is perfect."
)
BOUND = "Lower bound: no plan of this step has a shorter makespan."
# Values of planner.mode. HDP ranks are explained by `hdp_ranks`.
MODES = {
    "free": "free: ranks wait for each other only in their rings and at the end of a step (ZeRO-1)",
    "lockstep": "lockstep: all ranks wait for each other at every micro-batch, where ZeRO-2 and ZeRO-3 communicate",
    "pipeline": "pipeline: each rank is a pipeline of stages, through which its micro-batches pass in the plan's order",
}


def cell(facts: Mapping[str, Any], name: str) -> str:
    """Format the fact `name` of a plan or a run, in the unit of its label in NAMES."""
    return number(facts[name] / 2**30 if name == "ring_bytes" else facts[name])


MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "saved": "activations",
    "working_set": "working set",
    "logits": "loss",
    "ring_buffers": "ring buffers",
    "gather_buffers": "ZeRO buffers",
    "context": "CUDA context or process",
    "fragmentation": "fragmentation",
}


def memory_parts(found: Estimate) -> dict[str, int]:
    """Return the bytes on a device by label of MEMORY.

    The items `activations` and `other` of the estimate are split into their parts.
    """
    parts = found.items | {"saved": found.items["activations"] - found.working_set, **vars(found)}
    return {name: parts[key] for key, name in MEMORY.items()}


def memory_unit(peak: int) -> tuple[str, int]:
    """Return the name and the bytes of the unit to show an estimate in: GiB from a peak of 4 GiB on, else MiB."""
    return ("GiB", 2**30) if peak >= 4 * 2**30 else ("MiB", 2**20)


def memory_rows(found: Estimate) -> list[Triple]:
    """Return rows (label, size, percentage) of the device, then of its host; sizes are in the unit of `memory_unit`.

    Percentages are of the total memory of the device or the host; empty if that is 0.
    """
    _, unit = memory_unit(found.peak)
    device = [*memory_parts(found).items(), ("peak", found.peak)]
    device += [("headroom, left free", found.headroom), ("device total", found.device_total)]
    host = [("on the host", found.host), ("of it for checkpoints", found.checkpoint)]
    host += [("of it for Ray", found.ray)] if found.ray else []
    host += [("headroom, left free", found.host_headroom), ("host total", found.host_total)]
    return [
        (name, f"{size / unit:,.2f}", f"{size / of:.0%}" if of else "")
        for rows, of in ((device, found.device_total), (host, found.host_total))
        for name, size in rows
    ]


def without_address(source: str) -> str:
    """The source of rates without the address of a data sheet, which is long."""
    return re.sub(r" https?://[^ )]+", "", source)


def source(config: Config) -> str:
    """The override that sets the source of lengths, such as `lengths=github`."""
    lengths = config.lengths
    if lengths.name == "data":
        return config.data.place
    return f"lengths.path={lengths.path}" if lengths.name == "file" else f"lengths={lengths.name}"


def hdp_ranks(ranks: int, tp: int, pp: int) -> str:
    """Format a number of HDP ranks, with the devices per rank if there are several."""
    if tp * pp == 1:
        return counted(ranks, "rank")
    return f"{counted(ranks, 'HDP rank')} of {tp * pp} devices (tp {tp} x pp {pp})"


def machine(config: Config, plan: StepPlan, rates: str) -> list[Pair]:
    """The head of a plan's page: model, ranks and lengths. `rates` is the source of the cost model's rates."""
    parallel = config.parallel
    return [
        ("model", config.model.name),
        ("planner", plan.planner),
        ("ranks", f"{hdp_ranks(plan.ranks, parallel.tp, parallel.pp)}, cluster={config.cluster.name}"),
        ("mode", MODES[plan.mode]),
        ("hardware rates", without_address(rates)),
        ("lengths", source(config)),
        ("context", f"{short_tokens(config.context)} tokens"),
        ("capacity of a rank", f"{short_tokens(plan.capacity)} tokens"),
    ]
