"""Cuts the layers of a model into the stages of a pipeline."""

from __future__ import annotations

from itertools import accumulate, pairwise

from engine.config.schema import Config
from engine.cost import flops
from engine.family.families import family_of
from engine.family.layers import part


def stages(config: Config) -> list[range]:
    """Return the layers of each stage, of `parallel.pp` stages: those of `parallel.stages`, if it says them.

    Else the slowest stage is as fast as possible, if all layers take equally long. A stage's time is that of its linear
    layers, and the last one has the head too. Attention is not counted: its time depends on the documents. If two cuts
    are equally good, earlier stages get fewer layers, because they have more micro-batches in flight.
    """
    layers, pp, given = config.model.layers, config.parallel.pp, config.parallel.stages
    if given != "auto":
        sizes = list(given)
    elif pp == 1:
        sizes = [layers]
    else:
        head = _head(config)

        def slowest(last: int) -> float:
            """The time of the slowest stage if the last one has `last` layers, in layers."""
            return max(-(-(layers - last) // (pp - 1)), last + head)

        last = min(range(layers - pp + 1, 0, -1), key=slowest)
        size, larger = divmod(layers - last, pp - 1)
        sizes = [size] * (pp - 1 - larger) + [size + 1] * larger + [last]
    return [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


def work_shares(config: Config) -> list[float]:
    """Return the part of the linear layers' work that each stage does."""
    layers, first = family_of(config.model).layers(config.model), _first_layer(config)
    work = [0.0] * config.parallel.pp
    for stage, numbers in enumerate(stages(config)):
        for kind in part(layers, numbers):
            weights = flops.layer_weights(config.model, kind, experts=config.model.top_k)
            work[stage] += kind.count * (weights / first)
    work[-1] += _head(config)
    return [of_stage / sum(work) for of_stage in work]


def _first_layer(config: Config) -> int:
    """The weights of the first layer that a token is multiplied with."""
    model = config.model
    return flops.layer_weights(model, family_of(model).layers(model)[0], experts=model.top_k)


def _head(config: Config) -> float:
    """The work of the head, in layers like the first one."""
    return config.model.hidden * config.model.vocab / _first_layer(config)
