"""Keeps the beginning of documents."""

from __future__ import annotations

from pydantic import Field

from engine.config.schema import Section
from engine.config.units import Tokens
from engine.data.transforms.piece import Piece


class Truncate(Section):
    """How long documents may be, in inputs."""

    tokens: Tokens = Field(ge=1, le=2**32, description="most tokens that are kept")


def truncate(piece: Piece, options: Truncate) -> list[Piece]:
    """Cut off what is beyond the length. The last token that is kept is only a label, so such a piece has no EOS."""
    return [piece.first(options.tokens) if piece.inputs > options.tokens else piece]
