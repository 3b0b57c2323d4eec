"""Bytes that collectives move: those of ZeRO, and those of tensor parallelism.

| stage | in each micro-batch | at the end of a step |
|---|---|---|
| 1 | | reduce-scatter of gradients, all-gather of weights |
| 2 | reduce-scatter of gradients | all-gather of weights |
| 3 | all-gather of weights in both passes, reduce-scatter of gradients | |

In stage 3 the last two layers and the head stay between the passes, unless the head is larger than the weights that
DeepSpeed may keep (`stage3_max_live_parameters`, zero/settings.py).

Tensor parallelism gathers (G) the rows of the hidden states, or reduces and scatters them (S), as in
engine/parallel/tensor.py:

| | forward | recomputed | backward |
|---|---|---|---|
| embedding | S | | G |
| attention, each layer | G S | G S | G S, and G of its input, which is not saved |
| MLP, each layer | G S | G | G S, and G of its input, which is not saved |
| MLP in tiles | G S | | G S twice, and G of its input |
| head | G, and sums of 3 numbers of each token | | S |

The last S of a recomputed layer is left out, because PyTorch stops behind the last tensor that is needed. Tiles are
computed again in the backward pass in every mode, and then do not take part in the recompute of their layer.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.config.schema import Config
from engine.cost.flops import kinds, largest_layer
from engine.cost.sizes import element_bytes, expert_parameters, parameters

LIVE_LAYERS = 2  # layers whose weights stage 3 keeps gathered


class Collectives(NamedTuple):
    """Bytes that each device of a rank sends, and as many that it receives."""

    forward: float  # of a micro-batch: weights gathered in the forward pass
    backward: float  # of a micro-batch: weights gathered in the backward pass
    layer: float  # of these, the weights of one layer, the largest
    reduction: float  # of a micro-batch: gradients
    step: float  # at the end of a step: gradients
    gather: float  # at the end of a step: updated weights


def collectives(config: Config, ranks: int) -> Collectives:
    """Return the bytes of a model partitioned over `ranks` HDP ranks of tp x pp devices each."""
    model, stage = config.model, config.zero.stage
    b, w = element_bytes(config.dtype)
    # An all-gather or a reduce-scatter of n bytes sends (R - 1) / R n from each of R ranks.
    sent = (ranks - 1) / ranks / (config.parallel.tp * config.parallel.pp)
    whole = parameters(model)
    if stage < 3:
        ep = config.parallel.ep
        shared = expert_parameters(model) if ep > 1 else 0
        # A share of the experts is reduced over the ranks that store it.
        elements = sent * (whole - shared) + (ranks - ep) / ranks * shared / ep
        gradients, weights = elements * w, elements * b
        each, once = (gradients, 0.0) if stage == 2 else (0.0, gradients)
        return Collectives(0.0, 0.0, 0.0, each, once, weights)
    layer, head = largest_layer(model, experts=model.experts), model.hidden * model.vocab
    live = min(LIVE_LAYERS, model.layers) * layer
    kept = live + head if head <= live else 0
    return Collectives(sent * whole * b, sent * (whole - kept) * b, sent * layer * b, sent * whole * w, 0.0, 0.0)


def hops(ranks: int) -> int:
    """Hops of a reduce-scatter or an all-gather over `ranks` ranks: those of NCCL's ring.

    NCCL's logarithmic algorithm, PAT, needs nodes of one rank (`ncclPatEnable`, src/graph/tuning.cc).
    """
    return ranks - 1


def expert_collectives(config: Config) -> tuple[float, float]:
    """Return the bytes per token that each device of an ep group sends in the forward and in the backward pass.

    The rows of a token's experts go there and back; in the backward pass those of its gradient and its input go there,
    and the gradient of its input returns. Their weights go there, and the gradients of the weights return. Experts are
    taken to be chosen equally often.
    """
    model, ep = config.model, config.parallel.ep
    b, w = element_bytes(config.dtype)
    rows, weights = model.hidden * b, w
    forward = 2 * rows + weights
    backward = 3 * rows + 2 * weights + (forward if config.recompute != "none" else 0)
    sent = sum(kind.count for kind in kinds(model) if kind.experts) * model.top_k * (ep - 1) / ep
    return sent * forward, sent * backward


def tensor_collectives(config: Config) -> tuple[float, float]:
    """Return the bytes per token that each device of a tp group sends in the forward and in the backward pass."""
    model, tp = config.model, config.parallel.tp
    b, w = element_bytes(config.dtype)
    attention, mlp = (2, 1) if config.recompute != "none" else (0, 0)
    again = 2 + attention + (2 if config.mlp_tile else mlp)
    rows = model.hidden * b
    forward = (4 * model.layers + 2) * rows + 2 * 3 * w
    backward = ((4 + again) * model.layers + 2) * rows
    return forward * (tp - 1) / tp, backward * (tp - 1) / tp
