"""Cuts the layers of a model into the stages of a pipeline."""

from __future__ import annotations

from itertools import accumulate, pairwise

from engine.config.schema import Config
from engine.cost import flops
from engine.cost.calibration import Calibration
from engine.cost.linear import work
from engine.family.families import family_of
from engine.family.layers import part


def stages(config: Config) -> list[range]:
    """Return the layers of each stage, of `parallel.pp` stages: those of `parallel.stages`, if it says them.

    Else the slowest stage is as fast as possible, if all layers take equally long. A stage's time is that of its linear
    layers, and the last one has the head too. Weights of all kinds count alike, so that a calibration moves no layer.
    Attention is not counted: its time depends on the documents. If two cuts are equally good, earlier stages get fewer
    layers, because they have more micro-batches in flight.
    """
    layers, pp, given = config.model.layers, config.parallel.pp, config.parallel.stages
    if given != "auto":
        sizes = list(given)
    elif pp == 1:
        sizes = [layers]
    else:
        # In layers like the first one.
        first = flops.layer_products(config.model, family_of(config.model).layers(config.model)[0])
        head = config.model.hidden * config.model.vocab / sum(first.values())

        def slowest(last: int) -> float:
            """The time of the slowest stage if the last one has `last` layers, in layers."""
            return max(-(-(layers - last) // (pp - 1)), last + head)

        last = min(range(layers - pp + 1, 0, -1), key=slowest)
        size, larger = divmod(layers - last, pp - 1)
        sizes = [size] * (pp - 1 - larger) + [size + 1] * larger + [last]
    return [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


def work_shares(config: Config, rates: Calibration) -> tuple[float, ...]:
    """Return the part of the linear layers' work that each stage does."""
    model = config.model
    layers = family_of(model).layers(model)
    first = work(flops.layer_products(model, layers[0]), rates)
    found = [0.0] * config.parallel.pp
    for stage, numbers in enumerate(stages(config)):
        for kind in part(layers, numbers):
            found[stage] += kind.count * (work(flops.layer_products(model, kind), rates) / first)
    found[-1] += model.hidden * model.vocab / first
    return tuple(of_stage / sum(found) for of_stage in found)
