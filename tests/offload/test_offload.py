"""Offload moves bytes and changes none: gradients to the last bit, what goes and what stays to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.config.load import load
from engine.config.schema import Model
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.models.parallelize import parallelize
from engine.models.recompute import MODES
from engine.offload.arena import Arena
from engine.offload.offload import Offload
from tests.allocations import allocated
from tests.attention.rings import unsplit
from tests.covering import covered, in_turn

CPU = torch.device("cpu")
LAYERS, TOKENS = 6, 200
RATIOS = (0.0, 0.3, 0.5, 1.0)
ROOM = 1 << 26


def shape(**changes: object) -> Model:
    size = {"layers": LAYERS, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 50}
    return load([]).model.model_copy(update=size | changes)


SHAPES = {"dense": shape(), "experts": shape(family="mixtral", experts=4, top_k=2)}


class Offloaded:
    """A model and the offload of its activations, or none."""

    def __init__(
        self,
        shape: Model,
        mode: str,
        offload: Offload | None,
        dtype: torch.dtype = torch.float32,
        tile: int = 0,
        device: torch.device = CPU,
    ) -> None:
        config = load([]).model_copy(update={"model": shape, "recompute": mode, "mlp_tile": tile, "compile": "never"})
        self.model, self.offload = build_model(config), offload
        initialise(self.model, 3)
        self.model.to(device, dtype)
        parallelize(self.model, config, device, offload)


def model(name: str, mode: str, dtype: torch.dtype = torch.float32, room: int = ROOM, tile: int = 0) -> Offloaded:
    offload = Offload(LAYERS, CPU, [Arena(CPU, room)], token_bytes=20_000)
    return Offloaded(SHAPES[name], mode, offload, dtype, tile)


def loss(of: Offloaded, ratio: float, tokens: int = TOKENS) -> Tensor:
    attention = AttentionContext(unsplit(tokens), None, choose(CPU, next(of.model.parameters()).dtype, 8))
    numbers = torch.randint(0, 50, (tokens + 1,), generator=torch.Generator().manual_seed(tokens))
    if of.offload is not None:
        of.offload.begin(ratio, tokens)
    return of.model(numbers[:-1], torch.arange(tokens), numbers[1:], attention)  # type: ignore[no-any-return]


def gradients(of: Offloaded, ratio: float, tokens: int = TOKENS) -> list[Tensor]:
    of.model.zero_grad()
    (loss(of, ratio, tokens) * 0.3).backward()
    return [parameter.grad.clone() for parameter in of.model.parameters() if parameter.grad is not None]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@covered(
    "mode, name, dtype, ratio, tokens",
    list(MODES),
    list(SHAPES),
    [torch.float32, torch.bfloat16],
    RATIOS,
    [TOKENS, 1, 0],
)
def test_gradients_are_the_same_to_the_last_bit(
    mode: str, name: str, dtype: torch.dtype, ratio: float, tokens: int
) -> None:
    plain, of = Offloaded(SHAPES[name], mode, None, dtype), model(name, mode, dtype)
    assert equal(gradients(of, ratio, tokens), gradients(plain, 0.0, tokens))


def growth(of: Offloaded, ratio: float) -> tuple[int, int, int]:
    """Return by how many bytes memory grew in a forward pass, what layers saved and what of it moved."""
    assert of.offload is not None
    gradients(of, ratio)  # the arena is there
    saved, moved = of.offload.saved_bytes, of.offload.moved_bytes
    bytes_ = allocated(lambda: loss(of, ratio)).left
    return bytes_, of.offload.saved_bytes - saved, of.offload.moved_bytes - moved


@in_turn("mode, name, ratio", list(MODES), list(SHAPES), RATIOS[1:])
def test_what_moves_is_the_ratio_of_all_layers_but_two_and_no_longer_here(name: str, mode: str, ratio: float) -> None:
    unmoved, _, _ = growth(model(name, mode), 0.0)
    found, saved, moved = growth(model(name, mode), ratio)
    assert moved == pytest.approx(ratio * (LAYERS - 2) / LAYERS * saved, rel=0.02)
    assert unmoved - found == pytest.approx(moved, rel=0.02)


@covered("mode, name, ratio", list(MODES), list(SHAPES), [0.5, 1.0])
def test_what_tiles_keep_moves_too(name: str, mode: str, ratio: float) -> None:
    expected, of = gradients(model(name, mode, tile=30), 0.0), model(name, mode, tile=30)
    assert equal(gradients(of, ratio), expected)
    assert of.offload is not None
    saved = of.offload.saved_bytes
    assert of.offload.moved_bytes == pytest.approx(ratio * (LAYERS - 2) / LAYERS * saved, rel=0.02)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_in_flight_at_once_have_their_own_host_memory(mode: str) -> None:
    """The order of the first of three stages: F0 F1 F2 B0 F3 B1 B2 B3."""
    sizes, order = (TOKENS, 5, TOKENS + 7, 30), ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
    plain = Offloaded(SHAPES["dense"], mode, None)
    expected = [sum(of_one) for of_one in zip(*(gradients(plain, 0.0, size) for size in sizes), strict=True)]
    arenas = [Arena(CPU, ROOM) for _ in range(3)]
    of = Offloaded(SHAPES["dense"], mode, Offload(LAYERS, CPU, arenas, token_bytes=20_000))
    assert of.offload is not None
    of.model.zero_grad()
    running: dict[str, Tensor] = {}
    for step in order:
        if step[0] == "F":
            running[step[1]] = loss(of, 0.7, sizes[int(step[1])]) * 0.3
        else:
            running.pop(step[1]).backward()
    assert equal([p.grad for p in of.model.parameters() if p.grad is not None], expected)
    assert all(arena.size for arena in arenas) and of.offload.moved_bytes > 0


@pytest.mark.parametrize("mode", MODES)
def test_after_an_exception_the_next_step_is_right(mode: str) -> None:
    of = model("dense", mode)
    expected = gradients(model("dense", mode), 0.5)
    for place in ("forward", "backward"):
        with pytest.raises(ZeroDivisionError):
            broken(of, place)
        assert equal(gradients(of, 0.5), expected), place


def broken(of: Offloaded, place: str) -> None:
    """Run a micro-batch that fails in the middle."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    layer = of.model.layers[str(LAYERS // 2)]
    assert isinstance(layer, nn.Module)
    if place == "forward":
        hook: Any = layer.ffn_norm.register_forward_hook(fail)  # type: ignore[union-attr]
    else:
        hook = layer.ffn_norm.register_full_backward_hook(fail)  # type: ignore[union-attr]
    try:
        gradients(of, 0.5)
    finally:
        hook.remove()


def test_what_finds_no_room_on_the_host_stays() -> None:
    of = model("dense", "none", room=100_000)
    assert equal(gradients(of, 1.0), gradients(model("dense", "none"), 0.0))
    assert of.offload is not None
    assert 50_000 < of.offload.moved_bytes <= 100_000


def test_nothing_is_kept_of_parameters_and_angles() -> None:
    of = model("dense", "none")
    gradients(of, 1.0)
    assert of.offload is not None
    held = sum(parameter.numel() * 4 for parameter in of.model.parameters())
    b = 4
    layer = 2 * (2 * 32 * b + 4) + (2 * 32 + 2 * 16) * b + 4 * 4 + 3 * 96 * b
    assert of.offload.saved_bytes == LAYERS * layer * TOKENS, held


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError):
        Offload(LAYERS, CPU, [Arena(CPU, 1)], 1).begin(ratio, 0)


def test_evaluation_moves_nothing() -> None:
    of = model("dense", "none")
    with torch.no_grad():
        loss(of, 1.0)
    assert of.offload is not None and of.offload.moved_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_gradients_are_the_same_and_memory_is_less(mode: str) -> None:
    """The plain kernel adds up in one order, so that the last bit can be compared; copies run beside it."""
    device = torch.device("cuda")
    wide = SHAPES["dense"].model_copy(update={"hidden": 256, "ffn": 1024, "layers": 8})
    numbers = torch.randint(0, 50, (2049,), generator=torch.Generator().manual_seed(0)).to(device)
    attention = AttentionContext(unsplit(2048), None, choose(device, torch.float32, 64, prefer="reference"))
    found: dict[float, list[Tensor]] = {}
    kept: dict[float, int] = {}
    for ratio in (0.0, 0.4, 1.0):
        offload = Offload(8, device, [Arena(device, 1 << 30)], token_bytes=200_000)
        made = Offloaded(wide, mode, offload, device=device).model
        for _ in range(3):  # buffers of one micro-batch are used by the next
            made.zero_grad()
            offload.begin(ratio, 2048)
            before = torch.cuda.memory_allocated()
            value = made(numbers[:-1], torch.arange(2048, device=device), numbers[1:], attention)
            torch.cuda.synchronize()
            kept[ratio] = torch.cuda.memory_allocated() - before
            value.backward()
        found[ratio] = [parameter.grad.clone() for parameter in made.parameters() if parameter.grad is not None]
        assert equal(found[ratio], found[0.0]), ratio
    assert kept[1.0] < kept[0.4] < kept[0.0]
