"""Rules for `parallel`, the mesh and its model. Each rule returns its problem, or None (checks.py)."""

from __future__ import annotations

import math
from itertools import product

from engine.config.schema import Config
from engine.config.units import counted
from engine.errors import Problem
from engine.family.families import family_of

MOST_RANKS = 2**16  # maximum HDP ranks of a plan: planning still takes seconds, and no cluster is larger


def unit_nodes(config: Config) -> int:
    """Return the smallest number of nodes whose devices form whole HDP ranks."""
    node = config.cluster.ranks_per_node
    return math.lcm(node, config.parallel.tp * config.parallel.pp) // node


def ranks_can_be_planned(config: Config) -> Problem | None:
    """The cluster has at most MOST_RANKS HDP ranks. With a hostfile the planner checks this."""
    devices, group = config.cluster.nodes * config.cluster.ranks_per_node, config.parallel.tp * config.parallel.pp
    ranks = devices // group
    # `devices_form_whole_ranks` reports devices that do not divide evenly.
    if config.cluster.hostfile is not None or devices % group or ranks <= MOST_RANKS:
        return None
    message = f"{ranks:,} HDP ranks exceed the maximum of {MOST_RANKS:,}"
    return Problem(message, "cluster.nodes", "use fewer nodes, or more devices per rank: parallel.tp, parallel.pp")


def devices_form_whole_ranks(config: Config) -> Problem | None:
    """tp x pp divides the devices, and no stage has parts of two nodes. With a hostfile `Cluster.hdp` checks this."""
    if config.cluster.hostfile is not None:
        return None
    node, tp = config.cluster.ranks_per_node, config.parallel.tp
    devices, group = config.cluster.nodes * node, tp * config.parallel.pp
    if devices % group:
        message = f"parallel.tp x parallel.pp = {group} does not divide {counted(devices, 'device')}"
        key = "parallel.tp" if devices % tp else "parallel.pp"
        hint = f"use a multiple of {group} devices: cluster.nodes, cluster.ranks_per_node"
        if nearest := nearest_mesh(config):
            hint += "; or parallel.tp={} parallel.pp={}, the nearest that divides them".format(*nearest)
        return Problem(message, key, hint)
    if node % tp and tp % node:
        message = (
            f"{tp} is neither a divisor nor a multiple of a node's {node} devices, "
            "so a rank would span parts of two nodes"
        )
        return Problem(message, "parallel.tp", f"choose a divisor of {node}")
    return None


def tp_divides_the_matrices(config: Config) -> Problem | None:
    """Each device of a tp group gets as many heads, key and value heads and columns of SwiGLU as the others."""
    model, tp = config.model, config.parallel.tp
    sizes = {"model.heads": model.heads, "model.kv_heads": model.kv_heads, "model.ffn": model.ffn}
    wrong = [f"{key}={size:,}" for key, size in sizes.items() if size % tp]
    if not wrong:
        return None
    works = [degree for degree in _tp_degrees(config) if _forms_ranks(config, degree)]
    hint = f"the nearest that works is parallel.tp={min(works, key=lambda degree: abs(degree - tp))}" if works else None
    return Problem(f"{tp} does not divide {_any_of(wrong)}", "parallel.tp", hint)


def stages_have_layers(config: Config) -> Problem | None:
    """Each stage has a layer, and `parallel.stages` has all of them."""
    layers, pp, stages = config.model.layers, config.parallel.pp, config.parallel.stages
    if pp > layers:
        most = max(
            (degree for degree in range(1, layers + 1) if _forms_ranks(config, config.parallel.tp, degree)), default=1
        )
        message = f"{pp} stages cannot share the {counted(layers, 'layer')} of the model"
        hint = f"the nearest that works is parallel.pp={most}"
        if config.cluster.hostfile is not None:  # whose devices are not known here
            hint = f"set parallel.pp={layers} or less; tp x pp must divide the devices of the hostfile"
        return Problem(message, "parallel.pp", hint)
    if stages == "auto" or (len(stages), sum(stages)) == (pp, layers):
        return None
    hint = f"write {counted(pp, 'number')} whose sum is {layers}, or parallel.stages=auto"
    if sum(stages) == layers:
        hint = f"set parallel.pp={len(stages)}, or parallel.stages=auto"
    message = f"{counted(len(stages), 'stage')} with {counted(sum(stages), 'layer')} in total, not {pp} with {layers}"
    return Problem(message, "parallel.stages", hint)


def mode_goes_with_stages(config: Config) -> Problem | None:
    """Pipeline mode and parallel.pp > 1 need each other, and ZeRO-1; ZeRO-2 and 3 need lockstep mode."""
    mode, stages, stage = config.planner.mode, config.parallel.pp, config.zero.stage
    if mode == "pipeline" and stages == 1:
        return Problem(
            "pipeline mode needs parallel.pp=2 or more", "planner.mode", "set parallel.pp, or planner.mode=auto"
        )
    if mode in ("free", "lockstep") and stages > 1:
        return Problem(f"parallel.pp={stages} needs pipeline mode, not {mode}", "planner.mode", "set planner.mode=auto")
    if stages > 1 and stage > 1:
        one = "zero.stage=1" + (" zero.weights_on_host=false" if config.zero.weights_on_host else "")
        return Problem(
            f"ZeRO-{stage} cannot be combined with parallel.pp={stages}", "zero.stage", f"set {one}, or parallel.pp=1"
        )
    if mode == "free" and stage > 1:
        return Problem(f"ZeRO-{stage} needs lockstep mode, not free", "planner.mode", "set planner.mode=auto")
    return None


def experts_can_be_shared(config: Config) -> Problem | None:
    """ep divides the experts and the HDP ranks."""
    parallel, experts, ep = config.parallel, config.model.experts, config.parallel.ep
    if ep == 1:
        return None
    group = parallel.tp * parallel.pp
    ranks = config.cluster.nodes * config.cluster.ranks_per_node // group
    key = "parallel.ep"
    if not family_of(config.model).experts:
        return Problem(f"{ep} ranks cannot share experts, because the model has none", key, "set parallel.ep=1")
    # A hostfile may have any ranks: `Cluster.hdp` rejects those that ep does not divide.
    common = experts if config.cluster.hostfile else math.gcd(experts, ranks)
    if common % ep == 0:
        return None
    wrong = [f"model.experts={experts}"] if experts % ep else []
    wrong += [counted(ranks, "HDP rank")] if ranks % ep and not config.cluster.hostfile else []
    works = [degree for degree in range(1, common + 1) if common % degree == 0]
    near = min(works, key=lambda degree: abs(degree - ep))
    return Problem(f"{ep} does not divide {_any_of(wrong)}", key, f"the nearest that works is {key}={near}")


def experts_go_with_the_rest(config: Config) -> Problem | None:
    """ep > 1 goes with neither tensor parallelism, stages, tiles, an optimizer on the host, ZeRO-3 nor free mode."""
    parallel, ep = config.parallel, config.parallel.ep
    if ep == 1 or not family_of(config.model).experts:
        return None
    other = {
        "parallel.tp": (parallel.tp, 1),
        "parallel.pp": (parallel.pp, 1),
        "mlp_tile": (config.mlp_tile, 0),
        "optimizer.on_host": (config.optimizer.on_host, False),
        "zero.stage": (config.zero.stage, 2 if config.zero.stage == 3 else config.zero.stage),
    }
    wrong = {name: values for name, values in other.items() if values[0] != values[1]}
    if wrong:
        has = [f"{name}={str(value).lower()}" for name, (value, _) in wrong.items()]
        sets = " ".join(f"{name}={str(works).lower()}" for name, (_, works) in wrong.items())
        return Problem(f"{ep} cannot be combined with {_any_of(has)}", "parallel.ep", f"set {sets}, or parallel.ep=1")
    if config.planner.mode == "free":
        message = f"parallel.ep={ep} needs lockstep mode, not free: the ranks that share experts would wait forever"
        return Problem(message, "planner.mode", "set planner.mode=auto")
    return None


def _tp_degrees(config: Config) -> list[int]:
    """The degrees that divide heads, key and value heads and columns of SwiGLU."""
    common = math.gcd(config.model.heads, config.model.kv_heads, config.model.ffn)
    return [degree for degree in range(1, common + 1) if common % degree == 0]


def nearest_mesh(config: Config) -> tuple[int, int] | None:
    """The tp and pp nearest to those of the config, rather with the same tp, that all rules for the mesh allow."""
    parallel, stages = config.parallel, config.parallel.stages
    pipelined = config.planner.mode == "pipeline"
    works = [
        (tp, pp)
        for tp, pp in product(_tp_degrees(config), range(1, config.model.layers + 1))
        if _forms_ranks(config, tp, pp)
        and (pp > 1 or not pipelined)
        and (pp == 1 or config.zero.stage == 1)
        and (stages == "auto" or len(stages) == pp)
    ]
    return min(
        works,
        key=lambda mesh: (abs(mesh[0] - parallel.tp) + abs(mesh[1] - parallel.pp), mesh[0] != parallel.tp),
        default=None,
    )


def _any_of(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _forms_ranks(config: Config, tp: int, pp: int | None = None) -> bool:
    """Whether tp and pp divide the devices of the config's cluster. A hostfile may have any devices."""
    node, devices = config.cluster.ranks_per_node, config.cluster.nodes * config.cluster.ranks_per_node
    fits = devices % (tp * (pp or config.parallel.pp)) == 0 and (node % tp == 0 or tp % node == 0)
    return fits or config.cluster.hostfile is not None


RULES = (
    ranks_can_be_planned,
    devices_form_whole_ranks,
    tp_divides_the_matrices,
    stages_have_layers,
    mode_goes_with_stages,
    experts_can_be_shared,
    experts_go_with_the_rest,
)
