"""Leaves out documents that are too short or too long."""

from __future__ import annotations

from pydantic import Field, model_validator

from engine.config.schema import Section
from engine.config.units import Tokens
from engine.data.transforms.piece import Piece


class Drop(Section):
    """The lengths of the documents that are left out, in inputs."""

    shorter: Tokens | None = Field(default=None, ge=1, le=2**32, description="fewer tokens than this")
    longer: Tokens | None = Field(default=None, ge=1, le=2**32, description="more tokens than this")

    @model_validator(mode="after")
    def _some_are_kept(self) -> Drop:
        if self.shorter is None and self.longer is None:
            raise ValueError("needs `shorter` or `longer`")
        if self.shorter is not None and self.longer is not None and self.shorter > self.longer:
            raise ValueError(f"drops all documents: shorter={self.shorter} is more than longer={self.longer}")
        return self


def drop(piece: Piece, options: Drop) -> list[Piece]:
    """Return nothing for a piece that is too short or too long."""
    short = options.shorter is not None and piece.inputs < options.shorter
    long = options.longer is not None and piece.inputs > options.longer
    return [] if short or long else [piece]
