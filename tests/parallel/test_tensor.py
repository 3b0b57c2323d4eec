"""Under tensor parallelism a device saves 1 / tp of the bytes of a layer, as the estimate assumes, and computes the
products that the model has: another arithmetic inside gives what it gives on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.close import error
from engine.config.load import load
from engine.config.schema import Model
from engine.cost.activations import layers_bytes
from engine.cost.flops import kinds
from engine.dtypes import DTYPES
from engine.family.families import parameters_of
from engine.models import recompute
from engine.models.build import build_model
from engine.models.common import fp8, recomputed
from engine.models.common.attention import Attention
from engine.models.common.initialise import initialise
from engine.models.common.op import Op
from engine.models.common.part import Part
from engine.models.common.product import ADDED, PRODUCT, add_product
from engine.models.common.skip_init import Linear
from engine.models.common.swiglu import FeedForward
from engine.models.experts import layer as experts_layer
from engine.models.experts.grouped import LOOP, PRODUCTS, Products
from engine.models.experts.layer import Experts
from engine.models.parallelize import parallelize
from engine.parallel.tensor import TensorParallel
from tests.attention.rings import unsplit
from tests.cost.shapes import shape
from tests.slices import slice_of
from tests.world import run_world

CPU, TOKENS, WORLD = torch.device("cpu"), 401, 2
MODEL = shape(layers=3, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=301)
EXPERTS = shape(**vars(MODEL) | {"family": "mixtral", "experts": 8, "top_k": 2})
CASES = [
    (model, mode, dtype, tile)
    for model in (MODEL, EXPERTS)
    for mode in ("none", "layer", "layer_keep_attention")
    for dtype, tile in (("fp32", 0), ("bf16", 0), ("fp32", 100))
]


def rounded(x: Tensor) -> Tensor:
    """Round x to bf16, in its own dtype: a stand-in for a product in low precision."""
    return x.bfloat16().to(x.dtype)


def tiled(product: Op, tile: int) -> Op:
    """Compute a product `tile` tokens at a time."""

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (torch.cat([product.forward(rows, weight)[0] for rows in x.split(tile)]),)

    def backward(dout: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(dout.split(tile), x.split(tile), strict=True)
        dxs, dweights = zip(*(product.backward(*pair, weight) for pair in pairs), strict=True)
        return torch.cat(dxs), sum(dweights)

    return product.around(forward, backward)


ROUNDED = PRODUCT.around(
    lambda x, weight: PRODUCT.forward(rounded(x), rounded(weight)),
    lambda dout, x, weight: PRODUCT.backward(rounded(dout), rounded(x), rounded(weight)),
)
NARROW = Op(  # saves a narrower x of its own
    lambda x, weight: (*ROUNDED.forward(x, weight), x.bfloat16()),
    lambda dout, weight, narrow: ROUNDED.backward(dout, narrow.to(dout.dtype), weight),
    keeps=(1,),
)
OF_EXPERTS = Products(
    lambda rows, weight, counts: LOOP.grouped(rounded(rows), rounded(weight), counts),
    lambda left, right, counts: LOOP.outer(rounded(left), rounded(right), counts),
)
STACKS = {"rounded": ROUNDED, "tiled": tiled(ROUNDED, 64), "narrow": NARROW, "added": ADDED}
FP8 = fp8.product(fp8.Arithmetic(fp8._emulated))
STACKED = [(MODEL, 0, name) for name in STACKS] + [
    (MODEL, 100, "rounded"),
    (MODEL, 100, "added"),
    (EXPERTS, 0, "rounded"),
]


def multiply_with(model: nn.Module, product: Op, of_experts: Products) -> None:
    """Replace the products of all layers, but not those of the head and of routers."""
    for module in model.modules():
        if isinstance(module, (Attention, FeedForward)):
            for linear in module.children():
                if isinstance(linear, Linear):
                    linear.product = product
        elif isinstance(module, Experts):
            module.products = of_experts


def saved_in_layers(shape: Model, mode: str, dtype: str, tile: int, product: Op = PRODUCT) -> int:
    """Bytes that all layers, and the losses of their routers, save in a forward pass on this device, by storage.

    Stored decisions of a recomputed layer (engine/models/common/recomputed.py) count, too.
    """
    changes = {"model": shape, "recompute": mode, "dtype": dtype, "mlp_tile": tile}
    config = load([]).model_copy(update=changes)
    model = build_model(config, Part(range(shape.layers), tp=WORLD)).to(DTYPES[dtype])
    multiply_with(model, product, PRODUCTS)
    parallelize(model, config, CPU, tensor=TensorParallel(dist.group.WORLD, shape.vocab))
    initialise(model, 0)
    kept: dict[int, torch.UntypedStorage] = {}  # alive, or an address may be given to another
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def counted(function: Callable[..., Any], *inputs: Any, others: Iterable[Tensor] = ()) -> Any:
        excluded = parameters | {tensor.untyped_storage().data_ptr() for tensor in others}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in excluded:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return function(*inputs)

    def run_layer(layer: Any, x: Tensor, rotation: Any, attention: Any) -> Any:
        return counted(recompute.MODES[mode], layer, x, rotation, attention, others=rotation)

    model.run_layer = run_layer
    lists = dict[int, list[Any]]()

    def noted() -> list[Any] | None:
        found = recomputed.stored_decisions()
        lists.update({} if found is None else {id(found): found})
        return found

    experts_layer.stored_decisions = noted
    if model.experts():
        model._balancing = partial(counted, model._balancing)  # type: ignore[method-assign]
    positions = torch.arange(TOKENS)
    numbers = positions % shape.vocab
    attention = AttentionContext(unsplit(TOKENS), None, choose(CPU, DTYPES[dtype], shape.head_dim))
    model(numbers, positions, numbers, attention).backward()
    experts_layer.stored_decisions = recomputed.stored_decisions
    chosen = sum(one.nbytes for found in lists.values() for one in found if isinstance(one, Tensor))
    return chosen + sum(storage.nbytes() for storage in kept.values())


def gradients(shape: Model, tile: int, product: Op, of_experts: Products, part: Part) -> dict[str, Tensor]:
    """The loss of a model in float64 with these products in its layers, and the gradients of its parameters."""
    config = load([]).model_copy(update={"model": shape, "dtype": "fp32", "mlp_tile": tile})
    model = build_model(config, part).double()
    multiply_with(model, product, of_experts)
    parallelize(model, config, CPU, tensor=TensorParallel(dist.group.WORLD, shape.vocab) if part.tp > 1 else None)
    initialise(model, 0)
    positions = torch.arange(TOKENS)
    numbers = positions % shape.vocab
    attention = AttentionContext(unsplit(TOKENS), None, choose(CPU, torch.float64, shape.head_dim))
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    if product is ADDED:
        for name, parameter in model.named_parameters():
            parameter.add_product = partial(add_product, sums[name])  # type: ignore[attr-defined]
    loss = model(numbers, positions, numbers, attention)
    loss.backward()
    if product is ADDED:
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                parameter.grad = sums[name]
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach()} | found


def split_gradients() -> list[dict[str, Tensor]]:
    rank = dist.get_rank()
    cases = [(of, tile, STACKS[name]) for of, tile, name in STACKED]
    return [
        gradients(of, tile, product, OF_EXPERTS, Part(range(of.layers), tp=WORLD, tp_rank=rank))
        for of, tile, product in (*cases, (MODEL, 0, FP8))
    ]


@pytest.mark.world
def test_other_products_stack_inside() -> None:
    """Communication around a product that rounds its inputs: the loss and the gradients are those of the whole model
    with the same product. In float64, where sums in another order do not change what a number is rounded to; with FP8
    the errors are those of one device."""
    world = run_world(WORLD, split_gradients)
    for number, (of, tile, name) in enumerate(STACKED):
        whole, table = Part.whole(of), parameters_of(of)
        expected = gradients(of, tile, STACKS[name], OF_EXPERTS, whole)
        plain = gradients(of, tile, PRODUCT, PRODUCTS, whole)
        assert name == "added" or error(expected["loss"], plain["loss"]) > 1e-7, "rounding changes the loss"
        for rank, of_rank in enumerate(world):
            assert of_rank[number].keys() == expected.keys() == {"loss", *table}
            for key, found in of_rank[number].items():
                right = expected[key] if key == "loss" else slice_of(table[key], expected[key], WORLD, rank)
                assert error(found, right) < 1e-10, (of.family, tile, name, rank, key)
    # In FP8 a device has the scales of its own slices, so it rounds differently: as far from exact ones.
    exact, alone = (gradients(MODEL, 0, product, PRODUCTS, Part.whole(MODEL)) for product in (PRODUCT, FP8))
    for rank, of_rank in enumerate(world):
        assert error(of_rank[-1]["loss"], exact["loss"]) < 2e-4
        for name, one in parameters_of(MODEL).items():
            right, near = (slice_of(one, found[name], WORLD, rank) for found in (exact, alone))
            assert 0 < (of_rank[-1][name] - right).norm() < 1.25 * (near - right).norm(), (rank, name)


def saved_in_all_cases() -> tuple[list[int], list[int]]:
    products = (PRODUCT, ROUNDED, tiled(ROUNDED, 64))
    return [saved_in_layers(*case) for case in CASES], [saved_in_layers(*CASES[0], one) for one in products]


@pytest.mark.world
def test_saved_bytes_are_those_of_the_estimate() -> None:
    """Only the padding of an odd number of tokens is not counted: one row in 401. No product saves gathered rows."""
    for found, of_products in run_world(WORLD, saved_in_all_cases):
        assert len(set(of_products)) == 1
        for (model, mode, dtype, tile), of_case in zip(CASES, found, strict=True):
            expected = TOKENS * layers_bytes(model, kinds(model), dtype, mode, tile) / WORLD
            assert of_case == pytest.approx(expected, rel=0.01), (model.experts, mode, dtype, tile, of_case / expected)
