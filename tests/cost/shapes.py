"""Small models whose bytes can be counted by hand."""

from __future__ import annotations

from engine.config.load import load
from engine.config.schema import Model


def shape(**changes: object) -> Model:
    """The default model with other sizes."""
    return load([]).model.model_copy(update=changes)


GPU = "cluster.name=h100x8"
SMALL = shape(layers=3, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=300)
SPARSE = shape(**vars(SMALL) | {"family": "mixtral", "experts": 8, "top_k": 2})
