from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config.load import load
from engine.config.schema import Model
from engine.cost import memory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def shape(**changes: object) -> Model:
    return load([]).model.model_copy(update=changes)


SMALL = shape(layers=3, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=300)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(tied: bool) -> None:
    from engine.models.llama.model import Llama

    model = shape(layers=3, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=300, tied=tied)
    assert memory.parameters(model) == sum(p.numel() for p in Llama(model).parameters())


class Attend(torch.autograd.Function):
    """Keeps what attention keeps: q, k, v, the output and the log-sum-exp in the wider dtype."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.clone()
        lse = torch.zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_saved_bytes_are_what_the_model_saves(dtype: str) -> None:
    """Counted by storage, parameters aside. Rotary angles and a norm's one number a token make the last percents."""
    from engine.models.llama.model import Llama

    tokens = 64
    model = Llama(SMALL).to(DTYPES[dtype])
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # else its address may be given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), Attend.apply)
    assert sum(kept.values()) / tokens == pytest.approx(memory.saved_bytes(SMALL, dtype), rel=0.05)


def test_states_under_zero_1_are_those_of_deepspeed_md() -> None:
    count = memory.parameters(SMALL)
    assert memory.state_bytes(SMALL, "bf16", 1) == (2 + 4 + 12) * count
    assert memory.state_bytes(SMALL, "bf16", 8) == (2 + 4) * count + -(-12 * count // 8)
    assert memory.state_bytes(SMALL, "fp32", 2) == (4 + 4) * count + 12 * count // 2
    assert (memory.passing_bytes(SMALL, "bf16"), memory.passing_bytes(SMALL, "fp32")) == (2 * count, 0)


def test_a_ring_holds_keys_and_gradients_twice() -> None:
    """bf16: K and V of 2 heads of 16, in 2 bytes, and their gradients in 4, each held and on its way."""
    assert memory.ring_bytes(SMALL, "bf16") == 2 * (2 * 2 * 16) * (2 + 4)


def test_a_large_vocabulary_is_what_the_loss_holds() -> None:
    assert memory.working_bytes(shape(vocab=10**6), "bf16") == 10**6 * (2 + 3 * 4)
    assert memory.working_bytes(shape(vocab=258, ffn=10**5), "bf16") > 3 * 10**5 * 2
