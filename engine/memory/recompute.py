"""Recompute: what a layer keeps for its backward pass, and what it computes anew there. One mode a run.

`none` keeps everything. `layer` keeps the layer's input; the ring's forward runs again, which all members of a ring do
for the same layers in the same order. `layer_keep_attention` keeps also what attention needs (q, k, v, its output and
log-sum-exp) and computes the parts before and after it anew: no ring traffic again. What stays is what
`engine.cost.activations.saved_bytes` counts.

Letters: T tokens, C hidden size, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.models.llama.layers import Attend, Layer, Routed
from engine.models.rope import Rotation

Output = tuple[Tensor, Routed | None]

# Layers draw no random numbers. An attention kernel or a ring is no operation that PyTorch's own selective checkpoint
# would see: it is an autograd Function.
_anew: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def _none(layer: Layer, x: Tensor, by: Rotation, attend: Attend) -> Output:
    return layer(x, by, attend)  # type: ignore[no-any-return]


def _layer(layer: Layer, x: Tensor, by: Rotation, attend: Attend) -> Output:
    return _anew(layer, x, by, attend)  # type: ignore[no-any-return]


def _layer_keep_attention(layer: Layer, x: Tensor, by: Rotation, attend: Attend) -> Output:
    return _anew(layer.after, x, attend(*_anew(layer.before, x, by)))  # type: ignore[no-any-return]


Run = Callable[[Any, Tensor, Rotation, Attend], Output]  # of a Layer, which nn.Module does not say that it is
MODES: dict[str, Run] = {"none": _none, "layer": _layer, "layer_keep_attention": _layer_keep_attention}
