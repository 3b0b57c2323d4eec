"""The model against Hugging Face's LlamaForCausalLM, and what it must be able to do by itself.

If these fail, weights of LLaMA models mean something else here. Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from engine.attention.kernels import choose
from engine.attention.layout import whole
from engine.attention.ring import attend
from engine.config.schema import Model
from engine.models.llama.huggingface import from_huggingface, name_map, to_huggingface
from engine.models.llama.layers import RMSNorm, rotate, rotation
from engine.models.llama.model import Llama
from engine.models.loss import token_loss

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
    "norm_eps": 1e-5,
}
SHAPES = {
    "gqa": Model(**SIZE, heads=4, kv_heads=2, tied=False),
    "gqa tied": Model(**SIZE, heads=4, kv_heads=1, tied=True),
    "mha": Model(**SIZE, heads=4, kv_heads=4, tied=False),
    "mha tied, another base": Model(**SIZE | {"rope_theta": 5e5, "norm_eps": 1e-6}, heads=2, kv_heads=2, tied=True),
}
TOKENS = 67


def huggingface(shape: Model, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return their model of a shape, with weights large enough that every part of it shows."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def ours_of(theirs: LlamaForCausalLM, shape: Model, dtype: torch.dtype) -> Llama:
    model = Llama(shape).to(dtype)
    model.load_state_dict(from_huggingface(theirs.state_dict(), shape.layers))
    return model


def run(model: Llama, tokens: Tensor, kernel: str | None = None) -> Tensor:
    """Return the logits of one whole sequence."""
    dtype = model.embedding.weight.dtype
    chosen = choose(CPU, dtype, model.shape.head_dim, kernel)
    one = partial(attend, layout=whole(len(tokens)), comm=None, kernel=chosen)
    return model(tokens, torch.arange(len(tokens)), one)


def error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


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
    names = name_map(shape.layers)
    found = {name: error(p.grad, gradients[names[name]]) for name, p in ours.named_parameters()}
    assert len(found) == len(gradients)
    return {"logits": error(logits, expected.logits[0]), "loss": error(loss, expected.loss), **found}


@contextmanager
def float64_huggingface() -> Iterator[None]:
    """Patch out the casts to float32 inside Hugging Face's model: RMSNorm, rotary angles, eager softmax, loss."""

    def norm(self: modeling_llama.LlamaRMSNorm, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self: modeling_llama.LlamaRotaryEmbedding, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        size, base = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def eager(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, Tensor]:
        key, value = (modeling_llama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
        future = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(future, float("-inf"))
        weights = scores.softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return F.cross_entropy(logits[0, :-1], labels[0, 1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
        patch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)
        patch.setattr(modeling_llama, "eager_attention_forward", eager)
        patch.setattr(LlamaForCausalLM, "loss_function", property(lambda _: loss))
        yield


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float32_is_that_of_huggingface_as_it_is(shape: Model) -> None:
    found = compare(shape, torch.float32)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float64_is_that_of_huggingface_without_its_casts(shape: Model) -> None:
    with float64_huggingface():
        found = compare(shape, torch.float64)
    assert max(found.values()) < 1e-9, found


def test_names_go_there_and_back() -> None:
    shape = SHAPES["gqa"]
    ours = Llama(shape).state_dict()
    theirs = to_huggingface(ours, shape.layers)
    assert set(theirs) == set(huggingface(shape, torch.float32).state_dict())
    back = from_huggingface(theirs, shape.layers)
    assert back.keys() == ours.keys() and all(back[name] is ours[name] for name in ours)


def test_a_missing_weight_is_refused() -> None:
    state = to_huggingface(Llama(SHAPES["gqa"]).state_dict(), layers=2)
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(KeyError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        from_huggingface(state, layers=2)


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("position", [0, 1, 1 << 20, (1 << 21) - 2, 2_000_003])
def test_rotary_angles_are_exact_far_out(position: int, theta: float) -> None:
    """In float32 the angle between neighbours is off by 0.06 rad at 1M tokens: positions blur."""
    size = 16
    cos, sin = rotation(torch.tensor([position, position + 1]), size, theta, torch.float32)
    between = (torch.atan2(sin, cos).double()[1] - torch.atan2(sin, cos).double()[0])[0]
    with mpmath.workdps(50):
        for pair in range(size // 2):
            step = mpmath.mpf(theta) ** (-mpmath.mpf(2 * pair) / size)
            for column in (pair, pair + size // 2):
                assert abs(cos[0, 0, column].item() - mpmath.cos(position * step)) < 1e-7
                assert abs(sin[0, 0, column].item() - mpmath.sin(position * step)) < 1e-7
                off = mpmath.mpf(between[column].item()) - step
                assert abs(mpmath.sin(off / 2) * 2) < 1e-6, "rad between neighbours"


def test_only_the_distance_of_two_tokens_counts() -> None:
    q, k = torch.randn(2, 1, 1, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def scores(start: int) -> Tensor:
        by = rotation(torch.arange(start, start + 512), 128, 5e5, torch.float64)
        return rotate(q.expand(512, 1, 128), by)[:, 0] @ rotate(k.expand(512, 1, 128), by)[:, 0].T

    assert error(scores(2_000_000), scores(0)) < 1e-8


def nearly_all_rounded_once(found: Tensor, exact: Tensor) -> bool:
    """Whether bf16 values are the exact ones rounded; float32 inside may tip the scales once in a thousand."""
    assert found.dtype == torch.bfloat16
    return bool((found == exact.bfloat16()).double().mean() > 0.995)


def test_bf16_is_rotated_in_float32_and_rounded_once() -> None:
    """With cos and sin in bf16 the error of q.k was 1.5 to 2 times as large."""
    x = torch.randn(256, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(2_000_000, 2_000_256)
    exact = rotate(x.double(), rotation(positions, 64, 5e5, torch.float64))
    assert nearly_all_rounded_once(rotate(x, rotation(positions, 64, 5e5, torch.bfloat16)), exact)


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
