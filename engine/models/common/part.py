"""The part of a model that one device stores, and the places in a layer where tensor parallelism communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.config.schema import Model


@dataclass(frozen=True)
class Part:
    """Some consecutive layers of a model, and of each of their matrices one of `tp` slices, or of each layer's experts
    one of `ep` equal shares.

    The first layers come with the embedding, the last ones with the final norm and the head.
    """

    layers: range  # numbers of layers in the whole model
    first: bool = True
    last: bool = True
    tp: int = 1
    tp_rank: int = 0  # which of the slices
    ep: int = 1
    ep_rank: int = 0  # which of the shares

    @classmethod
    def whole(cls, shape: Model) -> Part:
        """The part of a device that stores the whole model."""
        return cls(range(shape.layers))

    def vocab_rows(self, shape: Model) -> int:
        """Return the rows of a slice of the embedding or the head, with the padding at the end of the vocabulary."""
        return -(-shape.vocab // self.tp)


class Between(NamedTuple):
    """The result of a part without the head."""

    stream: Tensor  # the residual stream [R,C], of T tokens or the rows of one device under tensor parallelism
    loss: Tensor | None = None  # what the part's own layers add to the loss of the micro-batch, a scalar


class Rows:
    """Which rows of the residual stream a device has: without tensor parallelism, those of all tokens."""

    def own(self, tokens: int) -> slice:
        """Return the tokens, of `tokens`, whose rows this device has."""
        return slice(0, tokens)

    def sum(self, counts: Tensor) -> Tensor:
        """Sum integers over the devices that share the rows."""
        return counts

    def total(self, share: Tensor) -> Tensor:
        """Sum a scalar over these devices. The gradient of a device's share is that of the sum."""
        return share


class Enter(Protocol):
    """Called before products with matrices that are split by their outputs."""

    def __call__(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """Return the first `tokens` rows of all devices from this device's rows x; None for all rows, with padding."""


def as_it_is(x: Tensor, tokens: int | None = None) -> Tensor:
    """Return x: without tensor parallelism a device has all rows. Also for `leave`, after products with matrices that
    are split by their inputs."""
    return x
