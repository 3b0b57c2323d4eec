"""Slices of parameters under tensor parallelism."""

from __future__ import annotations

import pytest
import torch

from engine.config.schema import Model
from engine.family.families import parameters_of
from engine.models.common import initialise as initialising
from engine.models.common.initialise import initialise
from engine.models.common.part import Part
from engine.models.decoder import Decoder
from tests.cost.shapes import shape
from tests.slices import slice_of

MODEL = shape(layers=2, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=301)
EXPERTS = MODEL.model_copy(update={"family": "mixtral", "experts": 3, "top_k": 2})
KINDS = pytest.mark.parametrize("shape_", [MODEL, EXPERTS], ids=["dense", "experts"])


def model_of(shape_: Model, part: Part | None = None) -> Decoder:
    return Decoder(shape_, part=part)


@KINDS
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_have_the_shapes_of_a_part_and_make_up_the_whole(tp: int, shape_: Model) -> None:
    whole, table = model_of(shape_), parameters_of(shape_)
    part = dict(model_of(shape_, Part(range(MODEL.layers), tp=tp)).named_parameters())
    assert set(part) == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        value = torch.randn(parameter.shape)
        slices = [slice_of(table[name], value, tp, rank) for rank in range(tp)]
        assert all(one.shape == part[name].shape for one in slices), name
        dim = table[name].split
        if dim is None:
            assert name.endswith(("norm.weight", "router.weight")) and all(torch.equal(one, value) for one in slices)
        else:
            joined = torch.cat(slices, dim)
            assert torch.equal(joined[: len(value)], value) and not joined[len(value) :].any(), name


@KINDS
def test_a_stage_has_its_layers_and_what_is_at_its_end(shape_: Model) -> None:
    parts = [Part(range(0, 1), last=False), Part(range(1, 2), first=False)]
    names = [{name for name, _ in model_of(shape_, part).named_parameters()} for part in parts]
    assert names[0] | names[1] == {name for name, _ in model_of(shape_).named_parameters()} and not names[0] & names[1]
    assert "embedding.weight" in names[0] and {"norm.weight", "head.weight"} < names[1]
    assert all(name.startswith("layers.1.") for name in names[1] - {"norm.weight", "head.weight"})


@KINDS
def test_a_tied_weight_has_a_copy_on_the_last_stage(shape_: Model) -> None:
    tied = shape_.model_copy(update={"tied": True})
    assert "head.weight" not in dict(model_of(tied).named_parameters())
    assert "head.weight" in dict(model_of(tied, Part(range(1, 2), first=False)).named_parameters())


@KINDS
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_parts_are_initialised_with_slices_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, tp: int, tied: bool, shape_: Model
) -> None:
    """On two stages; blocks end inside rows and inside slices."""
    monkeypatch.setattr(initialising, "BLOCK", 1000)
    shape_ = shape_.model_copy(update={"tied": tied})
    whole, table = model_of(shape_), parameters_of(shape_)
    initialise(whole, 7)
    expected = dict(whole.named_parameters())
    if tied:
        expected["head.weight"] = expected["embedding.weight"]
    for rank in range(tp):
        for layers, first, last in ((range(0, 1), True, False), (range(1, 2), False, True)):
            part = Part(layers, first, last, tp, rank)
            model = model_of(shape_, part).bfloat16()
            initialise(model, 7)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, slice_of(table[name], expected[name], tp, rank).bfloat16()), (name, rank)
