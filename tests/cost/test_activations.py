from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.config.load import load
from engine.config.schema import Model, Zero
from engine.cost import activations
from engine.cost.activations import Instant
from engine.cost.flops import kinds
from engine.cost.sizes import element_bytes, parameters
from engine.dtypes import DTYPES
from engine.models import recompute
from engine.models.build import build_model
from engine.models.common.attention import PackedAttention
from engine.models.common.initialise import initialise
from engine.models.common.loss import choose as loss_of
from engine.models.common.rope import Rotation
from engine.models.decoder import Decoder
from engine.models.parallelize import parallelize
from tests.allocations import allocated
from tests.attention.rings import unsplit
from tests.cost.shapes import GPU, SMALL, SPARSE, shape
from tests.covering import covered

STAGES: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)


def zero(stage: Literal[1, 2, 3]) -> Zero:
    return Zero(stage=stage, weights_on_host=False)


def instants_of(model: Model, dtype: str, stage: Literal[1, 2, 3] = 3, **changes: object) -> tuple[Instant, ...]:
    """The instants on a GPU; in stage 3 no gradient waits for others and every bucket is always there."""
    update = {"model": model, "dtype": dtype, "zero": zero(stage)} | changes
    return activations.instants(load([GPU]).model_copy(update=update))


def losses_of(model: Model, dtype: str) -> list[Instant]:
    """The instants of the loss without what the model keeps of a token."""
    kept = activations.kept_bytes(model, dtype)
    return [one._replace(token=one.token - kept) for one in instants_of(model, dtype)[1:4]]


def model_of(shape: Model, mode: str = "none", tile: int = 0) -> Decoder:
    config = load([]).model_copy(update={"model": shape, "recompute": mode, "mlp_tile": tile})
    model = build_model(config)
    parallelize(model, config, torch.device("cpu"))
    return model


def kept_bytes(model: Model, dtype: str, mode: str, tokens: int, tile: int = 0) -> int:
    """Bytes that a forward pass with its loss saves, counted by storage, without parameters and token numbers."""
    llama = model_of(model, mode, tile).to(DTYPES[dtype])
    initialise(llama, 0)
    numbers = torch.arange(tokens) % model.vocab
    own = {p.untyped_storage().data_ptr() for p in (*llama.parameters(), numbers)}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, or an address may be given to another

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    def run_layer(layer: torch.nn.Module, x: Tensor, rotation: Rotation, attention: PackedAttention) -> Any:
        for angles in rotation:  # recomputing holds them as they are: hooks do not see them
            pack(angles)
        return recompute.MODES[mode](layer, x, rotation, attention)

    llama.run_layer = run_layer
    loss_of(torch.device("cpu"), DTYPES[dtype])  # or its self-test would be counted
    attention = AttentionContext(unsplit(tokens), None, choose(torch.device("cpu"), DTYPES[dtype], model.head_dim))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = llama(numbers, torch.arange(tokens), numbers, attention)
    gradient = tokens * model.hidden * DTYPES[dtype].itemsize  # of the last norm's output, which the loss keeps
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values()) + gradient


MODES = ("none", "layer", "layer_keep_attention")


FAMILIES = (("llama", (4, 2), None), ("qwen3", (4, 2), 20), ("llama", (8, 1), 6))


@covered("dtype, mode, kind", sorted(DTYPES), MODES, FAMILIES)
def test_saved_bytes_are_what_the_model_saves(
    dtype: str, mode: str, kind: tuple[str, tuple[int, int], int | None]
) -> None:
    family, heads, size = kind
    sizes = {"layers": 3, "hidden": 64, "heads": heads[0], "kv_heads": heads[1], "ffn": 160, "vocab": 300}
    model = shape(**sizes, family=family, head_size=size)
    for tile in (0, 5):
        assert kept_bytes(model, dtype, mode, 64, tile) == 64 * activations.saved_bytes(model, dtype, mode, tile)


@covered("dtype, mode, kind", sorted(DTYPES), MODES, [(8, 2), (64, 3)])
def test_saved_bytes_of_experts_and_what_balances_them(dtype: str, mode: str, kind: tuple[int, int]) -> None:
    """What a router and its losses save depends on PyTorch's operators: within 2 %."""
    experts, top_k = kind
    model = shape(**vars(SMALL) | {"family": "mixtral", "experts": experts, "top_k": top_k})
    for tile in (0, 100):
        found = kept_bytes(model, dtype, mode, 256, tile) / 256
        assert found == pytest.approx(activations.saved_bytes(model, dtype, mode, tile), rel=0.02)


def test_a_ring_holds_keys_and_gradients_twice() -> None:
    """bf16: K and V of 2 heads of 16 in 2 bytes, their gradients in 4, each held and in transit."""
    assert activations.ring_bytes(SMALL, "bf16") == 2 * (2 * 2 * 16) * (2 + 4)


def peak_and_formula(model: Model, dtype: str, mode: str, tokens: int) -> tuple[int, int]:
    """Peak of a micro-batch without weights and their gradients: measured, and by the formula."""
    config = load([]).model_copy(update={"model": model, "dtype": dtype, "recompute": mode})
    llama = model_of(model, mode).to(DTYPES[dtype])
    initialise(llama, 0)
    loss_of(torch.device("cpu"), DTYPES[dtype])  # or its self-test would be counted
    attention = AttentionContext(unsplit(tokens), None, choose(torch.device("cpu"), DTYPES[dtype], model.head_dim))
    numbers = torch.arange(tokens)

    def micro_batch() -> None:
        llama(numbers % model.vocab, numbers, numbers % model.vocab, attention).backward()

    micro_batch()  # gradients are there
    beside = max(one.of(tokens) for one in activations.instants(config.model_copy(update={"zero": zero(1)})))
    return allocated(micro_batch).peak, activations.layers_bytes(model, kinds(model), dtype, mode) * tokens + beside


@covered("mode, dtype, vocab", MODES, ["fp32", "fp64"], [2, 5000])
def test_a_micro_batch_is_fullest_where_the_formula_says(dtype: str, mode: str, vocab: int) -> None:
    """To a few bytes: in the loss with the large vocabulary, else in SwiGLU's backward pass of the last layer.

    Not in bf16: PyTorch without a compiler computes norms in fp32 copies that a compiled norm (on a GPU) never has.
    """
    model = shape(layers=3, hidden=64, heads=4, kv_heads=2, ffn=320, vocab=vocab)
    found, formula = peak_and_formula(model, dtype, mode, 1500)
    assert found == pytest.approx(formula, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["none", pytest.param("layer", marks=pytest.mark.slow), "layer_keep_attention"])
def test_a_micro_batch_of_experts_too(mode: str) -> None:
    """A router's tensors are freed one after the other; they are small in models of any size."""
    model = shape(layers=3, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=2, family="mixtral", experts=8, top_k=2)
    found, formula = peak_and_formula(model, "fp32", mode, 1500)
    assert found == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("vocab", [258, 32_000, 128_256, 10**6])
@pytest.mark.parametrize("name", ["tiny", "llama7b", "llama70b"])
def test_the_loss_of_any_number_of_tokens(name: str, vocab: int) -> None:
    """Logits of one chunk and their gradient, the gradient of the head, all in the wider dtype, and the hidden
    states."""
    model = load([f"model={name}", f"model.vocab={vocab}"]).model
    for dtype in DTYPES:
        b, w = element_bytes(dtype)
        for tokens in (1024, 10_000, 1_000_000):
            chunk = activations.loss_chunk(tokens, model.hidden, vocab)
            exact = tokens * model.hidden * b + (2 * chunk + model.hidden) * vocab * w
            formula = max(one.of(tokens) for one in losses_of(model, dtype))
            sum_is_over = 2 * 1024 * w < model.hidden * b < model.hidden * w
            assert exact <= formula and (sum_is_over or formula <= exact + 2 * vocab * w)


CHUNKS = {
    (0, 64, 258): 1,
    (10, 64, 258): 10,
    (1500, 64, 258): 1024,
    (5000, 64, 100): 5000,
    (10_000, 4096, 128_256): 1024,
    (65_536, 4096, 128_256): 4186,
    (65_536, 4096, 32_000): 16_778,
}


@pytest.mark.parametrize(("sizes", "chunk"), CHUNKS.items())
def test_chunks_of_the_loss(sizes: tuple[int, int, int], chunk: int) -> None:
    """For (tokens, hidden, vocabulary): logits as large as two hidden states per token, but at least 1,024 tokens."""
    assert activations.loss_chunk(*sizes) == chunk


def test_the_heads_gradient_is_there_in_both_dtypes_when_its_sum_is_over() -> None:
    """Then the logits are gone. Those of 1,024 tokens or fewer are larger, unless the model is wide."""
    gradient, logits = 300 * 64, 2 * 300
    for dtype, b, w in (("bf16", 2, 4), ("fp64", 8, 8)):
        few, _, over = losses_of(SMALL, dtype)
        assert few == Instant(gradient * w, 64 * b, 1024, logits * w)
        assert over == Instant(gradient * (w if b == w else b + w), 64 * b)


def test_the_gradient_of_a_tied_head_waits_for_that_of_the_embedding() -> None:
    """It comes last. Other gradients are added to those of the step as soon as they are there."""
    tied = shape(**vars(SMALL) | {"tied": True})
    for stage in STAGES:
        one, waiting = (instants_of(model, "bf16", stage)[0] for model in (SMALL, tied))
        assert (one.fixed, waiting.fixed, one.token) == (0, 2 * 64 * 300, waiting.token)


def test_the_loss_is_there_before_stage_2_has_its_bucket() -> None:
    one, two = (instants_of(SMALL, "fp32", stage) for stage in (1, 2))
    assert one[0] == two[0]
    assert [a.fixed - b.fixed for a, b in zip(one[1:4], two[1:4], strict=True)] == [4 * parameters(SMALL)] * 3


def test_a_parameter_larger_than_the_bucket_is_reduced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient, and in fp32 what is larger than the bucket. The head is reduced before the layers' backward passes,
    experts with theirs."""
    monkeypatch.setattr("engine.cost.sizes.BUCKET", 1000)
    head, experts = 64 * 300, SPARSE.experts * 64 * 160
    for stage in STAGES:
        layer, *_, reduced = instants_of(SPARSE, "bf16", stage)
        itself, copies = (0, 0) if stage == 1 else (2, 4)
        assert reduced.fixed == itself * head + copies * max(0, head - 1000)
        assert layer.fixed == itself * experts + copies * (experts - 1000)


@pytest.mark.parametrize("model", [SMALL, SPARSE], ids=["dense", "experts"])
@pytest.mark.parametrize("mode", MODES)
def test_a_tile_of_swiglu_is_there_for_so_many_tokens_only(mode: str, model: Model) -> None:
    """SwiGLU saves its input and what the router's losses need; the rest is recomputed, one tile at a time."""
    kept = [activations.saved_bytes(model, "bf16", mode, tile) for tile in (0, 64)]
    none, tile = (instants_of(model, "bf16", recompute=mode, mlp_tile=size)[0] for size in (0, 64))
    gradients, weights = 3 * model.top_k * 160 * 2, 3 * model.experts * 64 * 160 * (2 + 4)
    swiglu = tile.tiled - gradients
    router = (3 * 8 + 1) * 4 if model.experts > 1 else 0
    chosen = 4 * model.top_k if model.experts > 1 else 0  # kept for a second pass, which tiles do not have
    assert kept[0] - kept[1] == 3 * (swiglu - router if mode == "none" else chosen), "of each of three layers"
    assert none.token - tile.token > (0 if mode == "none" else swiglu - router)
    assert (tile.tile, tile.fixed - none.fixed) == (64, weights) and swiglu > router
    assert (none.tile, none.tiled) == (0, 0)


@given(st.integers(0, 999), st.integers(1, 50), st.integers(0, 300), st.integers(0, 50), st.integers(0, 40_000))
def test_no_more_of_a_tile_is_counted_than_there_are_tokens(
    fixed: int, token: int, tile: int, tiled: int, free: int
) -> None:
    one = Instant(fixed, token, tile, tiled)
    assert one.of(tile // 2) == fixed + (token + tiled) * (tile // 2)
    assert one.of(tile + 7) == fixed + token * (tile + 7) + tiled * tile
    most = one.most(free, 3)
    assert most < 0 or one.of(most) + 3 * most <= free
    assert one.of(max(0, most + 1)) + 3 * max(0, most + 1) > free


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_recomputing_keeps_the_entry_of_each_layer_and_attention_if_asked_to(dtype: str) -> None:
    """Three layers of hidden size 64; the last norm saves two rows and a number; cosines and sines."""
    b, w = element_bytes(dtype)
    norm, entry = 2 * 64 * b + w + 2 * 16 * w, 64 * b
    attention = (64 + 32 + 32 + 64) * b + 4 * w  # q, k, v, the output; a log-sum-exp a head
    assert activations.saved_bytes(SMALL, dtype, "layer") == 3 * entry + norm
    assert activations.saved_bytes(SMALL, dtype, "layer_keep_attention") == 3 * (entry + attention) + norm


def test_experts_a_token_goes_through_the_top_k_and_all_of_them_lie_in_memory() -> None:
    """SwiGLU keeps three rows of `ffn` for each expert, but not its input and output; the router adds a row of weights
    an expert, and keeps four numbers an expert and two more, and an index and two weights of each that is chosen."""
    router = (4 * 8 + 2) * 4 + 2 * (8 + 2 * 4)
    more = 3 * (3 * 160 * 2 + router)
    assert activations.saved_bytes(SPARSE, "bf16") - activations.saved_bytes(SMALL, "bf16") == more
    assert parameters(SPARSE) - parameters(SMALL) == 3 * (7 * 3 * 64 * 160 + 8 * 64)
    recomputed = activations.saved_bytes(SPARSE, "bf16", "layer") - activations.saved_bytes(SMALL, "bf16", "layer")
    assert recomputed == 3 * ((3 * 8 + 1) * 4 + 2 * 4), "what the losses of the router read, and the experts chosen"
    assert (activations.counts_bytes(SPARSE), activations.counts_bytes(SMALL)) == (8 * (3 * 8 + 1), 0)
