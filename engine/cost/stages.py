"""Cuts the layers of a model into the stages of a pipeline."""

from __future__ import annotations

from itertools import accumulate, pairwise

from engine.config.schema import Config
from engine.cost import flops


def stages(config: Config) -> list[range]:
    """Return the layers of each stage, of `parallel.pp` stages: those of `parallel.stages`, if it says them.

    Else the slowest stage is as fast as possible. A stage's time is that of its linear layers, and the last one has the
    head too. Attention is not counted: its time depends on the documents. If two cuts are equally good, earlier stages
    get fewer layers, because they have more micro-batches in flight.
    """
    layers, pp, given = config.model.layers, config.parallel.pp, config.parallel.stages
    if given != "auto":
        sizes = list(given)
    elif pp == 1:
        sizes = [layers]
    else:

        def slowest(last: int) -> float:
            """The time of the slowest stage if the last one has `last` layers, in layers."""
            return max(-(-(layers - last) // (pp - 1)), last + _head(config))

        last = min(range(layers - pp + 1, 0, -1), key=slowest)
        size, larger = divmod(layers - last, pp - 1)
        sizes = [size] * (pp - 1 - larger) + [size + 1] * larger + [last]
    return [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


def work_shares(config: Config) -> list[float]:
    """Return the part of the linear layers' work that each stage does."""
    work = [float(len(layers)) for layers in stages(config)]
    work[-1] += _head(config)
    return [of_stage / sum(work) for of_stage in work]


def _head(config: Config) -> float:
    """The work of the head, in layers."""
    model = config.model
    return model.hidden * model.vocab / flops.layer_weights(model, experts=model.top_k)
