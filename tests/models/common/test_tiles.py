"""Tiles change nothing but rounding: gradients are the untiled ones. Whatever is recomputed, a tile runs twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.close import error
from engine.config.load import load
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.models.common.tiles import in_tiles
from engine.models.parallelize import parallelize
from engine.models.recompute import MODES
from tests.attention.rings import unsplit
from tests.covering import covered

LAYERS, TOKENS = 3, 37
SHAPES = {"dense": {"experts": 1, "top_k": 1}, "experts": {"family": "mixtral", "experts": 4, "top_k": 2}}
MOST = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # error of a gradient
SIZE = {"layers": LAYERS, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 50}


def run(name: str, mode: str, tile: int, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[dict[str, Tensor], int]:
    """Return the loss and every gradient by name, and how often SwiGLU ran; experts are balanced by a loss."""
    config = load(["balance.loss_weight=0.5", "balance.z_weight=0.1"])
    model = config.model.model_copy(update=SIZE | SHAPES[name])
    config = config.model_copy(update={"model": model, "recompute": mode, "mlp_tile": tile})
    llama = build_model(config)
    parallelize(llama, config, torch.device("cpu"))
    initialise(llama, 3)
    llama.to(dtype)
    runs = 0
    for layer in llama.layers.values():
        op = layer.ffn.op  # type: ignore[union-attr]

        def counted(*inputs: Tensor, op: object = op) -> Tensor:
            nonlocal runs
            runs += 1
            return op(*inputs)  # type: ignore[operator, no-any-return]

        setattr(layer.ffn, "op", counted)  # noqa: B010
    attention = AttentionContext(unsplit(tokens), None, choose(torch.device("cpu"), dtype, model.head_dim))
    numbers = torch.randint(0, model.vocab, (tokens + 1,), generator=torch.Generator().manual_seed(1))
    loss = llama(numbers[:-1], torch.arange(tokens), numbers[1:], attention)
    (loss * 0.3).backward()
    gradients = {key: parameter.grad for key, parameter in llama.named_parameters()}
    return {"loss": loss.detach(), **gradients}, runs


@covered("name, mode, dtype, tile", list(SHAPES), list(MODES), list(MOST), [5, 64])
def test_gradients_are_the_untiled_ones(name: str, mode: str, dtype: torch.dtype, tile: int) -> None:
    expected, _ = run(name, "none", 0, dtype)
    found, runs = run(name, mode, tile, dtype)
    assert runs == 2 * LAYERS * -(-TOKENS // tile), "recomputing a layer computes its tiles once more"
    assert max(error(found[key], expected[key]) for key in expected) < MOST[dtype]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHAPES)
def test_no_token_runs_forward_and_backward(name: str, mode: str) -> None:
    found, _ = run(name, mode, 5, torch.float32, tokens=0)
    assert all((value == 0).all() for value in found.values())


def test_many_tiles_do_not_round_the_sum_of_gradients() -> None:
    """In bf16, ones added one by one would stay at 256."""
    linear = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    x = torch.ones(1000, 4, dtype=torch.bfloat16, requires_grad=True)
    in_tiles(lambda tokens: (linear(tokens),), x, 1, linear.parameters())[0].sum().backward()
    assert linear.weight.grad is not None and (linear.weight.grad == 1000).all()


def test_of_a_tiled_part_only_the_input_is_kept() -> None:
    linear, kept = torch.nn.Linear(8, 100), list[int]()
    x = torch.randn(64, 8, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (out,) = in_tiles(lambda tokens: (linear(tokens).relu().sum(-1),), x, 10, linear.parameters())
    assert kept == [64 * 8 * 4], "what ZeRO-3 gathered must not stay either"
    out.sum().backward()
    (dx,) = torch.autograd.grad(linear(x).relu().sum(), x)
    assert x.grad is not None and error(x.grad, dx) < 1e-6


def test_validation_keeps_nothing() -> None:
    linear = torch.nn.Linear(8, 8)
    with torch.no_grad():
        (out,) = in_tiles(lambda tokens: (linear(tokens),), torch.randn(5, 8), 2, linear.parameters())
    assert not out.requires_grad and out.shape == (5, 8)
