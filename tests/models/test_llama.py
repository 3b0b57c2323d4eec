"""What the model must be able to do by itself; test_huggingface.py compares it with Hugging Face's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config.schema import Model
from engine.models.common.initialise import initialise
from engine.models.common.loss import token_loss
from engine.models.common.norm import RMSNorm
from engine.models.decoder import Decoder
from tests.models.huggingface import run
from tests.models.rounding import nearly_all_rounded_once
from tests.models.shapes import LLAMA, LLAMA_SIZE

CPU = torch.device("cpu")


def test_initial_weights_are_those_of_the_seed() -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        model = Decoder(LLAMA["gqa"])
        initialise(model, seed)
        return model.state_dict()

    one, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert all(torch.equal(one[name], other[name]) == ("norm" in name) for name in one)
    assert len({one[name].flatten()[0].item() for name in one if "norm" not in name}) == 16, (
        "each with values of its own"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_start_with_a_deviation_of_two_hundredths_and_norms_with_one(tied: bool) -> None:
    model = Decoder(Model(**LLAMA_SIZE | {"hidden": 128, "ffn": 256, "vocab": 258}, heads=4, kv_heads=2, tied=tied))
    initialise(model, 0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.001, name


def test_a_tied_head_is_the_embedding() -> None:
    model = Decoder(LLAMA["gqa tied"])
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("kernel", ["fused_cpu", "reference"])
def test_no_token_runs_forward_and_backward(kernel: str) -> None:
    """A ring member whose shards are all empty still takes part in both passes."""
    model = Decoder(LLAMA["gqa"])
    initialise(model, 0)
    logits = run(model, torch.zeros(0, dtype=torch.int64), kernel)
    token_loss(logits, torch.zeros(0, dtype=torch.int64)).backward()
    assert logits.shape == (0, 50)
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_the_norm_of_bf16_is_taken_in_float32_and_rounded_once() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert nearly_all_rounded_once(RMSNorm(512, 1e-5).bfloat16()(x), exact)
