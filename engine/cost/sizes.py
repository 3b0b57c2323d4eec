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
BUCKET = 1 << 26  # gradient elements that are reduced at once; a larger parameter is reduced separately
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


def bucket_elements(model: schema.Model) -> int:
    """Most elements of a bucket of gradients, unless a single parameter has more."""
    return min(parameters(model), BUCKET)


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


def update_bytes(optimizer: schema.Optimizer, dtype: str) -> int:
    """Bytes that an update reads and writes per element of a matrix: the optimizer's values and the weight."""
    b, w = element_bytes(dtype)
    return 2 * optimizer_tensors(optimizer) * w + b


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
