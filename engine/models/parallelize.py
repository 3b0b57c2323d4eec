"""Adds recompute, tiles, offload, compiled operations, FP8, tensor and expert parallelism to a single-device model.

The code of the models contains none of these. Names and values of parameters do not change. Rings are not set here:
callers pass an `engine.attention.context.AttentionContext` to a model's `forward` for each micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.config.schema import Config
from engine.dtypes import DTYPES
from engine.models.common import fp8, product
from engine.models.common.attention import Attention, PackedAttention
from engine.models.common.op import Op
from engine.models.common.rope import Rotation
from engine.models.common.skip_init import Linear
from engine.models.common.swiglu import FeedForward
from engine.models.decoder import Decoder
from engine.models.experts import grouped
from engine.models.experts.layer import Experts
from engine.models.fuse import compiled_function, fuse, is_fused
from engine.models.recompute import MODES
from engine.offload.offload import Offload
from engine.parallel.expert import ExpertParallel
from engine.parallel.tensor import TensorParallel


def parallelize(
    model: Decoder,
    config: Config,
    device: torch.device,
    offload: Offload | None = None,
    tensor: TensorParallel | None = None,
    experts: ExpertParallel | None = None,
) -> None:
    """Apply a config's `recompute`, `mlp_tile`, `compile` and `linear_dtype` to a model, in place; with `offload`,
    offload activations; with `tensor`, split its layers over a tp group; with `experts`, exchange tokens in an ep
    group.

    Call it once, after the model has been moved to `device`. Raises HostError if its GPU lacks what the config needs.
    """
    if model.experts() and config.dtype == "bf16":
        # Run the self-test of the grouped product now. If it ran inside a layer, the saved-tensor hooks of recompute
        # and offload would treat its tensors as activations of the layer.
        grouped.choose(device)
    run_layer = model.run_layer = MODES[config.recompute]
    # The saved-tensor hooks of offload surround recompute, so they see only the tensors that recompute saves.
    if offload is not None:

        def run_offloaded(layer: Any, x: Tensor, rotation: Rotation, attention: PackedAttention) -> Any:
            # All layers save the same rotary embedding, so moving it to the host would free nothing.
            with offload.layer(layer, shared=rotation):
                return run_layer(layer, x, rotation, attention)

        model.run_layer = run_offloaded
    for module in model.modules():
        if isinstance(module, (FeedForward, Experts)):
            module.tile = config.mlp_tile
    fuse(model, config.model, device, DTYPES[config.dtype], config.compile)
    if config.linear_dtype == "fp8":
        arithmetic = fp8.Arithmetic(fp8.choose(device))
        if is_fused(config.model, device, DTYPES[config.dtype], config.compile):
            arithmetic = arithmetic.compiled(compiled_function)
        multiply_with(model, fp8.product(arithmetic))
    elif config.zero.stage < 3 and product.adds(device):
        multiply_with(model, product.ADDED)
    # Tensor and expert parallelism come last, because they communicate around the operations that the modules have by
    # then.
    if tensor is not None:
        tensor.apply(model)
    if experts is not None:
        experts.apply(model)


def multiply_with(model: Decoder, op: Op) -> None:
    """Set the product of the linear layers of attention and SwiGLU. Those of routers and the head need their digits."""
    for module in model.modules():
        if isinstance(module, (Attention, FeedForward)):
            for child in module.children():
                if isinstance(child, Linear):
                    child.product = op
