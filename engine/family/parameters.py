"""The parameters of a model as a table: names, shapes, and how tensor and expert parallelism divide them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from engine.family.layers import LayerKind
from engine.family.shape import Shape

EMBEDDING, HEAD = "embedding.weight", "head.weight"

# Kinds of matrices that tokens are multiplied with, whose arithmetic, and so the rate, may differ. `projection`: before
# and after attention. `ffn`: of dense layers. `head`: routers too, which like the head need their precision.
LinearKind = Literal["projection", "ffn", "expert", "head"]
LINEAR_KINDS: tuple[LinearKind, ...] = get_args(LinearKind)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model. Those with one dim are norms, all others matrices."""

    name: str  # in its layer, such as attention.q.weight; or in the model, such as head.weight
    shape: tuple[int, ...]  # [out,in]; of stacked experts [E,out,in]
    split: int | None = None  # the dim that tensor parallelism splits; None: every device has all of it
    stacked: bool = False  # the matrices of a layer's experts in dim 0, which expert parallelism shares
    linear: LinearKind | None = None  # the kind of a matrix that tokens are multiplied with

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


Parameters = Mapping[str, Parameter]  # by name in the model


def of_layer(model: Shape, kind: LayerKind, *, qk_norm: bool) -> tuple[Parameter, ...]:
    """The parameters of one layer. `qk_norm`: queries and keys of each head are normalised."""
    hidden, ffn = model.hidden, model.ffn
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms = ("attention.q_norm.weight", "attention.k_norm.weight") if qk_norm else ()
    attention = (
        Parameter("attention_norm.weight", (hidden,)),
        Parameter("attention.q.weight", (wide, hidden), 0, linear="projection"),
        Parameter("attention.k.weight", (narrow, hidden), 0, linear="projection"),
        Parameter("attention.v.weight", (narrow, hidden), 0, linear="projection"),
        Parameter("attention.out.weight", (hidden, wide), 1, linear="projection"),
        *(Parameter(name, (model.head_dim,)) for name in norms),
        Parameter("ffn_norm.weight", (hidden,)),
    )
    if not kind.experts:
        return (
            *attention,
            Parameter("ffn.gate.weight", (ffn, hidden), 0, linear="ffn"),
            Parameter("ffn.up.weight", (ffn, hidden), 0, linear="ffn"),
            Parameter("ffn.down.weight", (hidden, ffn), 1, linear="ffn"),
        )
    return (
        *attention,
        Parameter("ffn.gate", (model.experts, ffn, hidden), 1, stacked=True, linear="expert"),
        Parameter("ffn.up", (model.experts, ffn, hidden), 1, stacked=True, linear="expert"),
        Parameter("ffn.down", (model.experts, hidden, ffn), 2, stacked=True, linear="expert"),
        Parameter("ffn.router.weight", (model.experts, hidden), linear="head"),
    )


def of_ends(model: Shape) -> tuple[Parameter, ...]:
    """The embedding, the final norm and the head. A tied head is a copy of the embedding, or the embedding itself."""
    return (
        Parameter(EMBEDDING, (model.vocab, model.hidden), 0),
        Parameter("norm.weight", (model.hidden,)),
        Parameter(HEAD, (model.vocab, model.hidden), 0, linear="head"),
    )
