"""Activation offload: what layers save for their backward pass waits on the host (ByteScale, selective offloading).

                 forward                            backward
 compute   | L0 | L1 | L2 | L3 | ... | L(l-1) | L(l-1) | ... | L2 | L1 | L0 |
 to host        | L0 | L1 | L2 | ...                            while the next layer computes
 back                                     ... | L2 | L1 | L0 |  one layer ahead of its use

A share r of each layer's bytes goes, but for the last two layers', which are needed first: whole tensors first, then a
part of one more. Hooks of saved tensors see what autograd keeps; parameters are told by their storage and stay what
they are, and so does what other layers share (angles). It moves bytes and changes none.

Who owns a buffer: a storage that goes out is held here until the copy is done and the next layer is computed; what
comes back is held from the start of its copy until the graph lets go of it. The part that stays is a copy: a view would
keep the whole storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from engine.memory.arena import Arena
from engine.memory.lane import Lane

_STAY = 2  # the last layers, whose backward pass comes first
_BLOCK = 512  # bytes: a tensor is parted at a multiple of it
GAPS = 1 << 14  # bytes of a layer: each of its tensors begins at a multiple of the arena's


@dataclass(eq=False)
class _Piece:
    """A storage of `size` bytes that a layer saved. What is away has its first bytes on the host, others in `kept`."""

    size: int
    here: Tensor | None  # uint8 [size]
    views: dict[tuple[int, int], int] = field(default_factory=dict)  # bytes of saved tensors, by place and number
    host: Tensor | None = None  # uint8
    kept: Tensor | None = None  # uint8
    back: Any = None  # the copy to wait for before `here` is read, and `kept` is let go of

    @property
    def movable(self) -> bool:
        """Return whether saved tensors fill it, so that moving it sets it free."""
        return sum(self.views.values()) >= self.size


@dataclass(frozen=True)
class _View:
    """A saved tensor: how it lies in its storage, or from the start of a parameter, which may lie elsewhere by then."""

    of: _Piece | nn.Parameter
    layer: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def make(cls, tensor: Tensor, of: _Piece | nn.Parameter, layer: int) -> _View:
        """Return how a tensor lies in what it is of."""
        start = of.storage_offset() if isinstance(of, nn.Parameter) else 0
        return cls(of, layer, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset() - start))

    def on(self, base: Tensor) -> Tensor:
        """Return the tensor, `base` being what it is of."""
        start = base.storage_offset() if isinstance(self.of, nn.Parameter) else 0
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), start + self.offset, self.size, self.stride)


@dataclass
class _Layer:
    """What one layer saved, by the address of its storage."""

    pieces: dict[int, _Piece] = field(default_factory=dict)
    sent: Any = None  # the copy to the host
    leaving: list[Tensor] = field(default_factory=list)  # what it reads


class Offload:
    """The activations of one rank's micro-batches, `token_bytes` a token in each of `layers` layers. `begin`, then one
    `layer` after another, then backward; so again, also after an exception in between."""

    def __init__(self, layers: int, device: torch.device, arena: Arena, token_bytes: int) -> None:
        self._last, self._device, self.arena, self._token_bytes = layers - _STAY, device, arena, token_bytes
        self._out, self._back = Lane(device), Lane(device)
        self._layers: list[_Layer] = []
        self._ratio = 0.0
        self.saved_bytes = self.moved_bytes = 0  # by the layers, and of that to the host; of all micro-batches

    def make_room(self, ratio: float, tokens: int) -> None:
        """Let the arena hold what such a micro-batch sends to it. Between micro-batches only; raises what
        `Arena.reset` raises."""
        going = ratio * tokens * self._token_bytes + GAPS
        self.arena.reset(math.ceil(max(0, self._last) * going) if ratio else 0)

    def begin(self, ratio: float, tokens: int) -> None:
        """Start a micro-batch of `tokens`, of whose layers' bytes `ratio` go to the host, but for the last two layers'.

        Raises ValueError for a ratio outside 0 .. 1, and what `Arena.reset` raises.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"an offload ratio of {ratio}")
        # After an exception copies may be under way that nobody waited for.
        self._out.computing_waits()
        self._back.computing_waits()
        self._layers, self._ratio = [], ratio
        self.make_room(ratio, tokens)

    @contextmanager
    def layer(self, module: nn.Module, shared: Iterable[Tensor] = ()) -> Iterator[None]:
        """Watch what the forward pass of the next layer saves; `shared` are tensors that others keep anyway."""
        if not self._ratio or not torch.is_grad_enabled():
            yield
            return
        number, layer = len(self._layers), _Layer()
        self._layers.append(layer)
        fixed = {tensor.untyped_storage().data_ptr() for tensor in shared}

        def pack(tensor: Tensor) -> _View | Tensor:
            return self._packed(tensor, module, number, fixed)

        with saved_tensors_hooks(pack, self._unpacked):
            yield
        self.saved_bytes += sum(piece.size for piece in layer.pieces.values())
        if number:
            self._let_go(self._layers[number - 1])
        if number < self._last:
            self._send(layer)

    def _packed(self, tensor: Tensor, module: nn.Module, number: int, fixed: set[int]) -> _View | Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address in fixed or not address:
            return tensor
        # A view would keep a gathered parameter (ZeRO-3) until the backward pass, which gathers it anew.
        parameter = next((one for one in module.parameters() if _lies_in(tensor, one)), None)
        if parameter is not None:
            return _View.make(tensor, parameter, number)
        pieces, storage = self._layers[number].pieces, tensor.untyped_storage()
        if address not in pieces:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            pieces[address] = _Piece(len(flat), flat)
        piece = pieces[address]
        piece.views[int(tensor.storage_offset()), tensor.numel()] = tensor.numel() * tensor.element_size()
        return _View.make(tensor, piece, number)

    def _send(self, layer: _Layer) -> None:
        """Start to copy the layer's share to the host: the largest that fit into it whole, then a part of another."""
        pieces = sorted(layer.pieces.values(), key=lambda piece: -piece.size)
        left = round(self._ratio * sum(piece.size for piece in pieces))
        pairs = []
        for piece in (piece for piece in pieces if piece.movable and piece.size <= left):
            if (pair := self._part(piece, piece.size)) is not None:
                left -= piece.size
                pairs.append(pair)
        rest = next((piece for piece in pieces if piece.movable and piece.host is None), None)
        part = min(left, rest.size) // _BLOCK * _BLOCK if rest else 0
        if rest is not None and part and (pair := self._part(rest, part)) is not None:
            pairs.append(pair)
        layer.leaving = [source for _, source in pairs]
        layer.sent = self._out.copy(pairs)
        self.moved_bytes += sum(len(source) for source in layer.leaving)

    def _part(self, piece: _Piece, size: int) -> tuple[Tensor, Tensor] | None:
        """Give the first `size` bytes of a piece a place on the host; return it and what to copy. None without room."""
        whole, piece.host = piece.here, self.arena.take(size)
        if piece.host is None or whole is None:
            return None
        piece.here, piece.kept = None, whole[size:].clone() if size < len(whole) else None
        return piece.host, whole[:size]

    def _let_go(self, layer: _Layer) -> None:
        """Let go of what has left, after the copy and after what is computed by now."""
        self._out.computing_waits(layer.sent)
        layer.leaving = []

    def _unpacked(self, packed: _View | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed.of, nn.Parameter):
            return packed.on(packed.of)
        self._reach(packed.layer)
        piece = packed.of
        if piece.back is not None:
            self._back.computing_waits(piece.back)
        piece.back = piece.host = piece.kept = None
        assert piece.here is not None
        return packed.on(piece.here)

    def _reach(self, number: int) -> None:
        """Let a layer and the one before it come back, if they have not yet; then they are the graph's alone."""
        ahead = max(0, number - 1)
        for layer in reversed(self._layers[ahead:]):
            self._fetch(layer)
        del self._layers[ahead:]

    def _fetch(self, layer: _Layer) -> None:
        away = [piece for piece in layer.pieces.values() if piece.here is None]
        pairs = []
        for piece in away:
            piece.here = torch.empty(piece.size, dtype=torch.uint8, device=self._device)
            parts = [part for part in (piece.host, piece.kept) if part is not None]
            pairs += list(zip(piece.here.split([len(part) for part in parts]), parts, strict=True))
        done = self._back.copy(pairs) if away else None
        for piece in away:
            piece.back = done


def _lies_in(tensor: Tensor, parameter: nn.Parameter) -> bool:
    """Whether a tensor is a parameter or a view of it; gathered ones may share a storage."""
    if tensor.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        return False
    return 0 <= tensor.storage_offset() - parameter.storage_offset() < max(1, parameter.numel())
