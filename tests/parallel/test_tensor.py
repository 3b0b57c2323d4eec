"""Under tensor parallelism a device saves 1 / tp of the bytes of a layer, as the estimate assumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.attention.layout import unsplit
from engine.config.load import load
from engine.cost.activations import layers_bytes
from engine.dtypes import DTYPES
from engine.models import recompute
from engine.models.common.initialise import initialise
from engine.models.common.part import Part
from engine.models.llama.model import Llama
from engine.models.parallelize import parallelize
from engine.parallel.tensor import TensorParallel
from tests.cost.shapes import shape
from tests.world import run_world

CPU, TOKENS, WORLD = torch.device("cpu"), 401, 2
MODEL = shape(layers=3, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=301)
CASES = [(mode, dtype) for mode in ("none", "layer", "layer_keep_attention") for dtype in ("fp32", "bf16")]


def saved_in_layers(mode: str, dtype: str) -> int:
    """Bytes that all layers save in a forward pass on this device, counted by storage."""
    config = load([]).model_copy(update={"model": MODEL, "recompute": mode, "dtype": dtype})
    model = Llama(MODEL, Part(range(MODEL.layers), tp=WORLD)).to(DTYPES[dtype])
    parallelize(model, config, CPU)
    TensorParallel(dist.group.WORLD, MODEL.vocab).apply(model)
    initialise(model, 0)
    kept: dict[int, torch.UntypedStorage] = {}  # alive, or an address may be given to another
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def run_layer(layer: Any, x: Tensor, rotation: Any, attention: Any) -> Tensor:
        others = parameters | {angles.untyped_storage().data_ptr() for angles in rotation}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in others:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out: Tensor = recompute.MODES[mode](layer, x, rotation, attention)
        return out

    model.run_layer = run_layer
    positions = torch.arange(TOKENS)
    numbers = positions % MODEL.vocab
    attention = AttentionContext(unsplit(TOKENS), None, choose(CPU, DTYPES[dtype], MODEL.head_dim))
    model(numbers, positions, numbers, attention).backward()
    return sum(storage.nbytes() for storage in kept.values())


def saved_in_all_cases() -> list[int]:
    return [saved_in_layers(*case) for case in CASES]


@pytest.mark.world
def test_saved_bytes_are_those_of_the_estimate() -> None:
    """Only the padding of an odd number of tokens is not counted: one row in 401."""
    for found in run_world(WORLD, saved_in_all_cases):
        for (mode, dtype), of_case in zip(CASES, found, strict=True):
            expected = TOKENS * layers_bytes(MODEL, dtype, mode) / WORLD
            assert of_case == pytest.approx(expected, rel=0.01), (mode, dtype, of_case / expected)
