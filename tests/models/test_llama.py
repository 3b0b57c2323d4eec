"""The model against Hugging Face's LlamaForCausalLM, and what it must be able to do by itself.

If these fail, weights of LLaMA models mean something else here. Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.attention.kernels.choice import choose
from engine.attention.layout import whole
from engine.attention.ring import attend
from engine.config.schema import Model
from engine.models.llama.layers import RMSNorm
from engine.models.llama.model import Llama
from engine.models.loss import token_loss
from engine.weights.architectures import tensor_names
from engine.weights.check import places
from tests.close import error
from tests.models.huggingface import fill
from tests.models.reference import ROPES, float64_huggingface, huggingface, nearly_all_rounded_once

CPU = torch.device("cpu")
SIZE = {
    "name": "tiny",
    "hidden": 32,
    "ffn": 40,
    "experts": 1,
    "top_k": 1,
    "vocab": 50,
    "layers": 2,
    "rope_theta": 10000.0,
    "rope": ROPES["none"],
    "norm_eps": 1e-5,
}
SHAPES = {
    "gqa": Model(**SIZE, heads=4, kv_heads=2, tied=False),
    "gqa tied": Model(**SIZE, heads=4, kv_heads=1, tied=True),
    "mha": Model(**SIZE, heads=4, kv_heads=4, tied=False),
    "mha tied, another base": Model(**SIZE | {"rope_theta": 5e5, "norm_eps": 1e-6}, heads=2, kv_heads=2, tied=True),
    **{
        f"gqa, {name}": Model(**SIZE | {"rope": rope}, heads=4, kv_heads=2, tied=False)
        for name, rope in ROPES.items()
        if name != "none"
    },
}
TOKENS = 67


def ours_of(theirs: LlamaForCausalLM, shape: Model, dtype: torch.dtype) -> Llama:
    model = Llama(shape).to(dtype)
    fill(model, theirs.state_dict())
    return model


def run(model: Llama, tokens: Tensor, kernel: str | None = None) -> Tensor:
    """Return the logits of one whole sequence."""
    dtype = model.embedding.weight.dtype
    chosen = choose(CPU, dtype, model.shape.head_dim, kernel)
    one = partial(attend, layout=whole(len(tokens)), comm=None, kernel=chosen)
    return model(tokens, torch.arange(len(tokens)), one)


def compare(shape: Model, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of logits, loss and every gradient, by name."""
    theirs = huggingface(shape, dtype)
    ours = ours_of(theirs, shape, dtype)
    tokens = torch.randint(0, shape.vocab, (TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = theirs(tokens[None], labels=tokens[None])
    expected.loss.backward()
    logits = run(ours, tokens)
    loss = token_loss(logits[:-1], tokens[1:]) / (TOKENS - 1)
    loss.backward()
    assert expected.logits.dtype == logits.dtype == expected.loss.dtype == loss.dtype == dtype
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    names = tensor_names(shape)
    found = {name: error(p.grad, gradients[names[name][0]]) for name, p in ours.named_parameters()}
    assert len(found) == len(gradients)
    return {"logits": error(logits, expected.logits[0]), "loss": error(loss, expected.loss), **found}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float32_is_that_of_huggingface_as_it_is(shape: Model) -> None:
    found = compare(shape, torch.float32)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float64_is_that_of_huggingface_without_its_casts(shape: Model) -> None:
    with float64_huggingface():
        found = compare(shape, torch.float64)
    assert max(found.values()) < 1e-9, found


def test_names_are_theirs() -> None:
    shape = SHAPES["gqa"]
    assert places(Llama(shape), shape).keys() == huggingface(shape, torch.float32).state_dict().keys()


def test_initial_weights_are_those_of_the_seed() -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        model = Llama(SHAPES["gqa"])
        model.initialise(seed)
        return model.state_dict()

    one, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert all(torch.equal(one[name], other[name]) == ("norm" in name) for name in one)
    assert len({one[name].flatten()[0].item() for name in one if "norm" not in name}) == 16, "each drawn anew"


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_start_with_a_deviation_of_two_hundredths_and_norms_with_one(tied: bool) -> None:
    model = Llama(Model(**SIZE | {"hidden": 128, "ffn": 256, "vocab": 258}, heads=4, kv_heads=2, tied=tied))
    model.initialise(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.001, name


def test_a_tied_head_is_the_embedding() -> None:
    model = Llama(SHAPES["gqa tied"])
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("kernel", ["fused_cpu", "reference"])
def test_no_token_runs_forward_and_backward(kernel: str) -> None:
    """A ring member whose shards are all empty still takes part in both passes."""
    model = Llama(SHAPES["gqa"])
    model.initialise(0)
    logits = run(model, torch.zeros(0, dtype=torch.int64), kernel)
    token_loss(logits, torch.zeros(0, dtype=torch.int64)).backward()
    assert logits.shape == (0, 50)
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_the_norm_of_bf16_is_taken_in_float32_and_rounded_once() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert nearly_all_rounded_once(RMSNorm(512, 1e-5).bfloat16()(x), exact)
