"""Which models are built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.load import load
from engine.family.families import FAMILIES
from engine.family.layers import LayerKind
from engine.models.build import build_model


def test_layers_are_those_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of several kinds: here one dense layer, and two with experts."""
    kinds = (LayerKind(1, None, experts=False), LayerKind(2, None, experts=True))
    monkeypatch.setitem(FAMILIES, "mixtral", replace(FAMILIES["mixtral"], layers=lambda model: kinds))
    model = build_model(load(["model.family=mixtral", "model.experts=4", "model.top_k=2", "model.layers=3"]))
    names = {name for name, _ in model.named_parameters()}
    assert model.routed_layers == [1, 2] and len(model.experts()) == 2
    assert {"layers.0.ffn.gate.weight", "layers.1.ffn.gate", "layers.2.ffn.router.weight"} < names
