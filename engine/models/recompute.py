"""Recompute: which tensors of a layer are saved for the backward pass, and what is computed again there.

| mode | saved per layer | computed again |
|---|---|---|
| `none` | everything that the gradient needs | nothing |
| `layer` | the layer's input | the whole layer, including the communication of rings |
| `layer_keep_attention` | the layer's input, q, k, v, and the output and log-sum-exp of attention | all but attention |

With `layer`, ring attention runs forward again in the backward pass. It cannot deadlock, because all ranks of a ring
recompute the same layers in the same order. Routers decide once: the second pass sends tokens to the same experts
(engine/models/common/recomputed.py). `engine.cost.activations.saved_bytes` counts the saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.models.common.attention import PackedAttention
from engine.models.common.recomputed import first_and_second_pass
from engine.models.common.rope import Rotation

# Runs a layer of any model family and returns its result. `Any`, because nn.Module does not type its submodules.
RunLayer = Callable[[Any, Tensor, Rotation, PackedAttention], Any]

# Layers use no random numbers, so their state is not preserved. `layer_keep_attention` cannot use PyTorch's selective
# checkpointing, which selects operators: attention here is an autograd Function.
_recomputed: Callable[..., Any] = partial(
    checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=first_and_second_pass
)


def _layer_keep_attention(layer: Any, x: Tensor, rotation: Rotation, attention: PackedAttention) -> Any:
    return _recomputed(layer.after_attention, x, attention(*_recomputed(layer.before_attention, x, rotation)))


MODES: dict[str, RunLayer] = {
    "none": nn.Module.__call__,
    "layer": _recomputed,
    "layer_keep_attention": _layer_keep_attention,
}
