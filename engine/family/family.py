"""A model family: what distinguishes it from others, as data and small functions. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.family import parameters
from engine.family.layers import LayerKind
from engine.family.parameters import Parameter
from engine.family.shape import Shape


@dataclass(frozen=True)
class Family:
    """A model family, ours and the matching one of Hugging Face."""

    name: str  # in `model.family`, and Hugging Face's model_type
    architecture: str  # Hugging Face's class
    layers: Callable[[Shape], tuple[LayerKind, ...]]  # all layers of a model in order of depth
    # Our parameter -> the tensor of Hugging Face. In both, a first `{}` is the layer; in theirs a second is the expert.
    tensors: Mapping[str, str]
    keys: Mapping[str, str]  # our keys of `model` -> keys of config.json
    fixed: Mapping[str, Any]  # keys of config.json of which one value alone is supported, with that value
    rope_theta: float  # the default if config.json has none
    # Key of config.json, as in `keys` -> a second name under which newer versions of transformers write it.
    spellings: Mapping[str, str] = field(default_factory=dict)
    head_size: int | None = None  # the default if config.json has no head_dim; None: hidden size / heads
    experts: bool = False  # some layers have experts, so `model.experts` is above 1
    qk_norm: bool = False  # each head's queries and keys are normalised before the rotary embedding

    @property
    def least_experts(self) -> int:
        """The smallest value of `model.experts`; 1 is a dense layer."""
        return 2 if self.experts else 1

    def accepts(self, experts: int) -> bool:
        """Return whether a model of this family can have `experts` per layer."""
        return (experts > 1) == self.experts

    def of_layer(self, model: Shape, kind: LayerKind) -> tuple[Parameter, ...]:
        """Return the parameters of one layer of a kind."""
        return parameters.of_layer(model, kind, qk_norm=self.qk_norm)
