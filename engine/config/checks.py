"""What must hold between keys: each rule returns its problem, or None."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from engine.config.schema import Config, Rope
from engine.config.units import counted, format_count
from engine.errors import Problem

MOST_RANKS = 2**16  # HDP ranks of a plan: it takes seconds, and no cluster has more
_MOST_WEIGHTS = 2**48  # of a model: beyond, bytes and FLOPs pass what 64 bits hold


def check(config: Config, refuses: bool = True) -> list[Problem]:
    """Return every rule that the config breaks; not that its ranks hold too little for whoever asks what they hold."""
    found = [rule(config) for rule in _RULES if refuses or rule is not _context]
    return [problem for problem in found if problem is not None]


def check_part(config: Config) -> list[Problem]:
    """Return every rule that a config without its wrong values breaks; rules that read one of those stay silent."""
    found = []
    for rule in _RULES:
        with suppress(AttributeError):  # the value is not there
            found.append(rule(config))
    return [problem for problem in found if problem is not None]


def context_problem(config: Config, ranks: int) -> Problem | None:
    """Return the refusal of a context that `ranks` cannot hold together, a ring over all of them at most."""
    if config.context <= config.capacity * ranks:
        return None
    holds = format_count(config.capacity * ranks)
    message = (
        f"{format_count(config.context)} does not fit: "
        f"{counted(ranks, 'rank')} x capacity {format_count(config.capacity)} hold {holds} tokens"
    )
    nodes = _nodes(config, -(-config.context // config.capacity)) if config.cluster.hostfile is None else None
    return Problem(message, "context", holding(config.context, ranks, config.capacity, nodes))


def holding(tokens: int, ranks: int, capacity: int, nodes: int | None = None) -> str:
    """Return the ways out, for a hint, of a sequence of so many tokens that ranks of this capacity cannot hold.

    `nodes` are those that have enough ranks, where the hostfile does not say them.
    """
    context, each = format_count(ranks * capacity), format_count(-(-tokens // ranks))
    least = -(-tokens // capacity)
    more = f"{least:,}" if nodes is None else f"cluster.nodes={nodes}"
    tried = "`bytescale estimate-memory --fit` says what fits"
    found = f"context={context}, or capacity={each} ({tried})"
    return f"{found}, or more ranks: {more}" if least <= MOST_RANKS else found


def unit_nodes(config: Config) -> int:
    """Return the least nodes whose devices are whole HDP ranks."""
    node = config.cluster.ranks_per_node
    return math.lcm(node, config.parallel.tp * config.parallel.pp) // node


def _nodes(config: Config, ranks: int) -> int:
    """Return the least nodes that have so many HDP ranks."""
    unit = unit_nodes(config)
    return unit * -(-ranks * config.parallel.tp * config.parallel.pp // (unit * config.cluster.ranks_per_node))


def ranks_problem(config: Config, ranks: int) -> Problem | None:
    """Return the refusal of more HDP ranks than can be planned."""
    if ranks <= MOST_RANKS:
        return None
    message = f"{ranks:,} HDP ranks are more than the {MOST_RANKS:,} that can be planned"
    key = "cluster.nodes" if config.cluster.hostfile is None else "cluster.hostfile"
    return Problem(message, key, "take fewer nodes, or more devices for a rank: parallel.tp, parallel.pp")


def _context(config: Config) -> Problem | None:
    """With a hostfile the ranks are known only when it is read; then whoever reads it asks `context_problem`."""
    ranks = _whole_ranks(config)
    return None if ranks is None else context_problem(config, ranks)


def _ranks(config: Config) -> Problem | None:
    ranks = _whole_ranks(config)
    return None if ranks is None else ranks_problem(config, ranks)


def _whole_ranks(config: Config) -> int | None:
    """Return the HDP ranks, or None where a hostfile says them, or they are no whole number: `_devices` tells that."""
    devices, group = config.cluster.nodes * config.cluster.ranks_per_node, config.parallel.tp * config.parallel.pp
    return None if config.cluster.hostfile is not None or devices % group else devices // group


def _size(config: Config) -> Problem | None:
    """No device holds such a model; it is refused here because no arithmetic of its bytes would be right."""
    model = config.model
    weights = model.layers * model.hidden * (model.hidden + model.experts * model.ffn) + model.hidden * model.vocab
    if weights <= _MOST_WEIGHTS:
        return None
    message = f"{model.hidden} with these layers, experts and vocabulary has more weights than can be counted"
    return Problem(message, "model.hidden", "take a smaller model")


def _head_groups(config: Config) -> Problem | None:
    heads, kv_heads = config.model.heads, config.model.kv_heads
    if heads % kv_heads == 0:
        return None
    return Problem(f"{kv_heads} does not divide model.heads={heads}", "model.kv_heads", f"for example {heads}")


def _head_size(config: Config) -> Problem | None:
    """Rotary embedding turns pairs, so a head's size is even."""
    hidden, heads = config.model.hidden, config.model.heads
    if hidden % (2 * heads) == 0:
        return None
    message = f"{hidden} is not a multiple of 2 x model.heads={heads}, and rotary embedding needs even heads"
    return Problem(message, "model.hidden", f"for example {-(-hidden // (2 * heads)) * 2 * heads}")


def _betas(config: Config) -> Problem | None:
    if all(0 <= beta < 1 for beta in config.optimizer.betas):
        return None
    betas = list(config.optimizer.betas)
    return Problem(f"must be at least 0 and less than 1, not {betas}", "optimizer.betas", "for example [0.9,0.95]")


def _offload(config: Config) -> Problem | None:
    ratio = config.offload.ratio
    if ratio == "auto" or 0 <= ratio <= 1:
        return None
    hint = "set offload.ratio=auto, or a share such as offload.ratio=0.5"
    return Problem(f"must be auto or from 0 to 1, not {ratio:g}", "offload.ratio", hint)


def _experts(config: Config) -> Problem | None:
    experts, top_k = config.model.experts, config.model.top_k
    if top_k <= experts:
        return None
    return Problem(f"{top_k} is more than model.experts={experts}", "model.top_k", f"at most {experts}")


# Parameters of each kind of rotary scaling: those that it needs, and those that it may have beside them.
_ROPE = {
    "none": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}
_LLAMA_3_1 = {
    "factor": "8",
    "original_max_position_embeddings": "8K",
    "low_freq_factor": "1",
    "high_freq_factor": "4",
}


def _rope(config: Config) -> Problem | None:
    rope = config.model.rope
    kind, given = rope.kind, [name for name in Rope.model_fields if name != "kind" and getattr(rope, name) is not None]
    needs, may = _ROPE[kind]
    missing = [name for name in needs if name not in given]
    if missing:
        hint = f"for example {' '.join(f'model.rope.{name}={_LLAMA_3_1[name]}' for name in missing)}"
        message = f"{kind} is a rotary scaling without its parameters: {', '.join(missing)}"
        return Problem(message, "model.rope.kind", hint)
    extra = [name for name in given if name not in needs + may]
    if extra:
        takers = [other for other, names in _ROPE.items() if extra[0] in sum(names, ())]
        hint = f"set model.rope.kind={' or '.join(takers)}, or leave it out"
        return Problem(f"is not taken by model.rope.kind={kind}", f"model.rope.{extra[0]}", hint)
    return None


def _rope_order(config: Config) -> Problem | None:
    """What turns fast is above what turns slowly, and DeepSeek's two factors come together."""
    if _rope(config) is not None:
        return None
    rope = config.model.rope
    low, high = rope.low_freq_factor, rope.high_freq_factor
    if low is not None and high is not None and low >= high:
        message = f"must be more than model.rope.low_freq_factor={low:g}, not {high:g}"
        return Problem(message, "model.rope.high_freq_factor", "Llama 3.1 has 1 and 4")
    fast, slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0
    if slow >= fast:
        message = f"must be more than model.rope.beta_slow={slow:g}, not {fast:g}"
        return Problem(message, "model.rope.beta_fast", "YaRN has 32 and 1")
    if (rope.mscale is None) != (rope.mscale_all_dim is None):
        missing = "mscale" if rope.mscale is None else "mscale_all_dim"
        return Problem("is not set", f"model.rope.{missing}", "mscale and mscale_all_dim go together")
    return None


def _lengths_file(config: Config) -> Problem | None:
    name, path = config.lengths.name, config.lengths.path
    if name == "file" and path is None:
        return Problem("is not set", "lengths.path", "name a file of one length a line")
    if name != "file" and path is not None:
        return Problem(f"is not read with lengths={name}", "lengths.path", "set lengths=file too")
    return None


def _devices(config: Config) -> Problem | None:
    """With a hostfile the devices are known only when it is read; `Cluster.of` asks then."""
    if config.cluster.hostfile is not None:
        return None
    node, tp = config.cluster.ranks_per_node, config.parallel.tp
    devices, group = config.cluster.nodes * node, tp * config.parallel.pp
    if devices % group:
        message = f"parallel.tp x parallel.pp = {group} does not divide {counted(devices, 'device')}"
        key = "parallel.tp" if devices % tp else "parallel.pp"
        return Problem(message, key, "choose degrees that divide them, or other nodes")
    if node % tp and tp % node:
        message = (
            f"{tp} neither divides a node's {node} devices nor is a multiple, so a rank would hold parts of two nodes"
        )
        return Problem(message, "parallel.tp", f"choose a divisor of {node}")
    return None


def _modes(config: Config) -> Problem | None:
    """A pipeline has stages, stages are a pipeline, and ZeRO-2/3 meet in slots."""
    mode, stages, stage = config.planner.mode, config.parallel.pp, config.zero.stage
    if mode == "pipeline" and stages == 1:
        return Problem("a pipeline needs stages", "planner.mode", "set parallel.pp=2 or more")
    if mode in ("free", "lockstep") and stages > 1:
        return Problem(f"{stages} stages are a pipeline, not {mode}", "planner.mode", "leave planner.mode=auto")
    if stages > 1 and stage > 1:
        one = "zero.stage=1" + (" zero.weights_on_host=false" if config.zero.weights_on_host else "")
        return Problem(f"ZeRO-{stage} does not go with pipeline stages", "zero.stage", f"{one}, or parallel.pp=1")
    if mode == "free" and stage > 1:
        return Problem(
            f"ZeRO-{stage} gathers in slots, and free mode has none", "planner.mode", "planner.mode=lockstep"
        )
    return None


def _weights_on_host(config: Config) -> Problem | None:
    """Weights that every rank holds whole are not gathered, so they cannot wait elsewhere."""
    if config.zero.stage == 3 or not config.zero.weights_on_host:
        return None
    message = f"weights wait on the host in stage 3 only, not in {config.zero.stage}"
    other = (
        "set zero.stage=3 too" if config.parallel.pp == 1 else "set zero.weights_on_host=false"
    )  # stages take stage 1
    return Problem(message, "zero.weights_on_host", other)


_RULES: tuple[Callable[[Config], Problem | None], ...] = (
    _context,
    _ranks,
    _size,
    _head_groups,
    _head_size,
    _betas,
    _offload,
    _experts,
    _rope,
    _rope_order,
    _lengths_file,
    _devices,
    _modes,
    _weights_on_host,
)
