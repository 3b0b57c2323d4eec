"""Sizes: parameters of a model, bytes of an element, and the sizes of ZeRO's buffers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from engine.config import schema
from engine.cost.flops import kinds
from engine.cost.optimizers import KINDS, states_of
from engine.cost.stages import stages
from engine.family.families import family_of
from engine.family.layers import part
from engine.family.parameters import Parameter, of_ends

ELEMENT = {"bf16": 2, "fp32": 4, "fp64": 8}
BUCKET = 1 << 26  # gradient elements that are reduced at once, at least; a larger parameter is reduced separately
HOP = 1 << 20  # gradient elements that travel in the time of a hop: 10 us at 400 GB/s
SUB_GROUP = 10**9  # elements of stage 3's gradients that share one tensor on the host (DeepSpeed's sub_group_size)


def element_bytes(dtype: str) -> tuple[int, int]:
    """Bytes of an element in the model's dtype (b), and in the wider of this dtype and fp32 (w)."""
    return ELEMENT[dtype], max(ELEMENT[dtype], 4)


def parameters(model: schema.Model) -> int:
    """Number of parameters: matrices, norms, head, and the embedding unless the head shares it."""
    family = family_of(model)
    layers = sum(kind.count * sum(one.elements for one in family.of_layer(model, kind)) for kind in kinds(model))
    return layers + model.hidden + (1 if model.tied else 2) * model.hidden * model.vocab


def expert_parameters(model: schema.Model) -> int:
    """Number of parameters of all experts."""
    experts = ((kind.count, family_of(model).of_layer(model, kind)) for kind in kinds(model))
    return sum(count * one.elements for count, layer in experts for one in layer if one.stacked)


def device_parameters(
    config: schema.Config, stage: int, ep: int | None = None, only: Callable[[Parameter], bool] = lambda one: True
) -> int:
    """Number of parameters on a device of a stage: those of its layers, and at the ends the embedding and the head.

    Tensor parallelism splits most matrices (engine/family/parameters.py), and the vocabulary in equal parts, the last
    one padded. A head that shares the embedding's weights is a copy of them if it is on another stage. `ep` devices
    share the experts; by default as many as the config says. Counts the parameters for which `only` is true.
    """
    model, tp, pp = config.model, config.parallel.tp, config.parallel.pp
    family, layers = family_of(model), 0
    for kind in part(family.layers(model), stages(config)[stage]):
        for one in filter(only, family.of_layer(model, kind)):
            whole = one.elements // (ep or config.parallel.ep) if one.stacked else one.elements
            layers += kind.count * (whole if one.split is None else whole // tp)
    rows, first, last = -(-model.vocab // tp) * model.hidden, stage == 0, stage == pp - 1
    embedding, norm, _ = of_ends(model)
    ends = rows * (first + last - (first and last and model.tied)) * only(embedding)
    return layers + ends + model.hidden * last * only(norm)


def bucket_elements(config: schema.Config, ranks: int = 1) -> int:
    """Most elements of a bucket of gradients over `ranks` HDP ranks, unless a single parameter has more.

    Each bucket costs the hops of a ring of all ranks, and no backward pass hides the last one. Of P parameters in
    buckets of n, these take P / n x ranks x hop + n / rate, which is least if n^2 = P x ranks x (hop x rate). In
    stages 2 and 3 a bucket is memory (table.py), so it does not grow.
    """
    whole, growing = parameters(config.model), config.zero.stage == 1
    devices = config.parallel.tp * config.parallel.pp
    return min(whole, max(BUCKET, math.isqrt(whole // devices * ranks * HOP) if growing else 0))


def experts_apart(config: schema.Config) -> bool:
    """Whether experts have buckets of their own (engine/trainer/optimizer.py)."""
    kept = states_of(config.optimizer)
    return config.model.experts > 1 and (config.parallel.ep > 1 or kept["expert"] != kept["matrix"])


def optimizer_tensors(optimizer: schema.Optimizer) -> int:
    """Values that an optimizer keeps per element of a matrix: the master weight, and AdamW's moments for example."""
    return 1 + states_of(optimizer)["matrix"]


def moments(config: schema.Config, stage: int, ranks: int, partition: int) -> int:
    """Elements of an optimizer's states besides master weights on a device of a stage, which has `partition` of these.

    ZeRO partitions each kind of parameters separately over the `ranks`.
    """
    kept = states_of(config.optimizer)
    found = kept["matrix"] * partition
    for kind in KINDS:
        if kept[kind] != kept["matrix"]:
            count = device_parameters(config, stage, ep=1, only=partial(_is_of_kind, kind))
            found += (kept[kind] - kept["matrix"]) * -(-count // ranks)
    return found


def _is_of_kind(kind: str, parameter: Parameter) -> bool:
    return kind == ("expert" if parameter.stacked else "matrix" if parameter.is_matrix else "vector")


def optimizer_bytes(optimizer: schema.Optimizer, dtype: str) -> int:
    """Bytes that a fused optimizer reads and writes per element of a matrix: its values, and the gradient."""
    return (2 * optimizer_tensors(optimizer) + 1) * element_bytes(dtype)[1]


def update_bytes(optimizer: schema.Optimizer, dtype: str) -> tuple[int, int]:
    """Bytes that an update reads and writes per element of a matrix, before and while weights are gathered.

    | when | what (engine/zero/sharded.py) | bytes | AdamW, bf16 |
    |---|---|---|---|
    | before | norm of the gradients | w read | 4 |
    | before | scale: average and clip | w read, w written | 8 |
    | while | optimizer | `optimizer_bytes` | 28 |
    | while | weights, rounded from master weights | w read, b written | 6 |
    """
    b, w = element_bytes(dtype)
    return 3 * w, optimizer_bytes(optimizer, dtype) + w + b


def pinned(size: int, many: bool = False) -> int:
    """Bytes that PyTorch's pinned allocator takes for a tensor of `size` bytes: the next power of two.

    If `size` is the sum of `many` tensors, returns an upper bound: twice the size.
    """
    return 2 * size if many else 1 << (size - 1).bit_length() if size else 0


def ray_bytes(config: schema.Config) -> int:
    """A rank's share of the host memory that Ray has on its node, which offload does not get; 0 without Ray.

    At most what the host gives to tensors: a run whose tensors stay on its devices needs none of it.
    """
    if config.data.runtime != "ray":
        return 0
    host, headroom = config.cluster.host_memory, config.cluster.headroom
    return min(-(-config.data.ray.memory // config.cluster.ranks_per_node), host - math.ceil(headroom * host))
