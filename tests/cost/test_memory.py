from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from engine.config.load import load
from engine.config.schema import Model
from engine.cost import memory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def shape(**changes: object) -> Model:
    return load([]).model.model_copy(update=changes)


SMALL = shape(layers=3, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=300)


SPARSE = shape(**vars(SMALL) | {"experts": 8, "top_k": 2})


def model_of(shape: Model) -> nn.Module:
    from engine.models.build import build_model

    return build_model(load([]).model_copy(update={"model": shape}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("small", [SMALL, SPARSE], ids=["dense", "experts"])
def test_parameters_are_those_of_the_model(small: Model, tied: bool) -> None:
    model = shape(**vars(small) | {"tied": tied})
    assert memory.parameters(model) == sum(p.numel() for p in model_of(model).parameters())


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
@pytest.mark.parametrize("small", [SMALL, SPARSE], ids=["dense", "experts"])
def test_saved_bytes_are_what_the_model_saves(small: Model, dtype: str) -> None:
    """Counted by storage, parameters aside. Rotary angles and a norm's one number a token make the last percents."""
    tokens = 64
    model = model_of(small).to(DTYPES[dtype])
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
    assert sum(kept.values()) / tokens == pytest.approx(memory.saved_bytes(small, dtype), rel=0.05)


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


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_recomputing_keeps_the_entry_of_each_layer_and_attention_if_asked_to(dtype: str) -> None:
    """Three layers of 64, and the last norm: its input in the wider dtype, two rows in the model's own."""
    b, w = memory.element_bytes(dtype)
    norm, entry = 64 * w + 2 * 64 * b, 64 * b
    attention = (64 + 32 + 32 + 64) * b + 4 * w  # q, k, v, the output; a log-sum-exp a head
    assert memory.saved_bytes(SMALL, dtype, "layer") == 3 * entry + norm
    assert memory.saved_bytes(SMALL, dtype, "layer_keep_attention") == 3 * (entry + attention) + norm


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_what_is_kept_less_is_computed_anew_in_one_layer_at_a_time(dtype: str) -> None:
    model = shape(layers=30, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=2)
    modes = ("layer", "layer_keep_attention", "none")
    saved = [memory.saved_bytes(model, dtype, mode) for mode in modes]
    assert saved == sorted(saved) and len(set(saved)) == 3
    working = [memory.working_bytes(model, dtype, mode) for mode in modes]
    one_layer = (
        memory.saved_bytes(model, dtype) - memory.saved_bytes(shape(**vars(model) | {"layers": 1}), dtype)
    ) / 29
    assert working[0] == working[1] == working[2] + one_layer


def test_experts_a_token_goes_through_the_top_k_and_all_of_them_lie_in_memory() -> None:
    """SwiGLU keeps four rows of `ffn` for each expert, and each one's input and output; the router adds a row of
    weights an expert, and keeps its input and three numbers an expert in fp32, and a few for each that is chosen."""
    router = 64 * 4 + 3 * 8 * 4 + 2 * (3 * 8 + 3 * 4)
    more = 3 * (4 * 160 * 2 + 2 * 2 * 64 * 2 + router)
    assert memory.saved_bytes(SPARSE, "bf16") - memory.saved_bytes(SMALL, "bf16") == more
    assert memory.parameters(SPARSE) - memory.parameters(SMALL) == 3 * (7 * 3 * 64 * 160 + 8 * 64)
    recomputed = memory.saved_bytes(SPARSE, "bf16", "layer") - memory.saved_bytes(SMALL, "bf16", "layer")
    assert recomputed == 3 * (8 * 4 + 2 * 8), "what the router said is kept: the loss reads it"
    assert (memory.counts_bytes(SPARSE), memory.counts_bytes(SMALL)) == (8 * (3 * 8 + 1), 0)


@pytest.mark.parametrize("ranks", [1, 8, 1000])
def test_each_stage_of_zero_shards_more(ranks: int) -> None:
    """bf16: 12 bytes of optimizer a parameter, 4 of gradients, 2 of weights; in stage 3 two layers are whole."""
    count, two_layers = memory.parameters(SMALL), 2 * 2 * (memory.parameters(SMALL) - 2 * 64 * 300 - 7 * 64) // 3

    def share(size: int) -> int:
        return math.ceil(size * count / ranks)

    assert memory.state_bytes(SMALL, "bf16", ranks, 1) == (2 + 4) * count + share(12)
    assert memory.state_bytes(SMALL, "bf16", ranks, 2) == 2 * count + share(4) + share(12)
    assert memory.state_bytes(SMALL, "bf16", ranks, 3) == share(2) + share(4) + share(12) + two_layers
    assert [memory.passing_bytes(SMALL, "bf16", stage) for stage in (1, 2, 3)] == [2 * count, 0, 0]
