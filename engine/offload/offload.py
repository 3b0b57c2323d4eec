"""Activation offload: moves tensors saved for the backward pass to the host (ByteScale, selective offloading).

                 forward                            backward
 compute   | L0 | L1 | L2 | L3 | ... | L(l-1) | L(l-1) | ... | L2 | L1 | L0 |
 to host        | L0 | L1 | L2 | ...                            while the next layer computes
 to device                                ... | L2 | L1 | L0 |  one layer before its use

A fraction r (the offload ratio) of each layer's saved bytes is offloaded, except for the last two layers, whose
backward pass comes first. Whole storages are chosen, largest first, then a part of one further storage. Saved-tensor
hooks intercept the tensors that autograd saves. Parameters, which are recognised by their storage, and tensors that all
layers share (the rotary embedding) are not offloaded. Offload changes no bytes, so gradients are bitwise equal.

Lifetime of storages. A storage that is being copied to the host is referenced here until the copy is complete and the
next layer has been computed; then its memory is freed. After the copy back has started, only the autograd graph
references the storage, and the computation waits for the copy before it reads the storage. The part of a storage that
stays on the device is a copy, because a view would keep the whole storage alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from engine.offload.arena import Arena
from engine.offload.copy_stream import CopyStream

_LAYERS_KEPT = 2  # the last layers, whose backward pass comes first
_SPLIT_ALIGNMENT = 512  # bytes
GAPS = 1 << 14  # bytes per layer: upper bound of the padding that aligns tensors in the arena


@dataclass(eq=False)
class _Piece:
    """A storage of `size` bytes that a layer saved. If offloaded, its first bytes are in `host`, the rest in `kept`."""

    size: int
    here: Tensor | None  # uint8 [size], on the device; None while offloaded
    views: dict[tuple[int, int], int] = field(default_factory=dict)  # (offset, elements) of saved tensors -> bytes
    host: Tensor | None = None  # uint8
    kept: Tensor | None = None  # uint8
    back: Any = None  # event of the copy to the device, to wait for before reading `here` or freeing `kept`

    @property
    def movable(self) -> bool:
        """Whether the saved tensors cover the whole storage, so that it is freed once they are moved."""
        return sum(self.views.values()) >= self.size


@dataclass(frozen=True)
class _View:
    """A saved tensor, described as a view of a storage or of a parameter.

    The storage may be on the host, and ZeRO-3 may replace the storage of a parameter.
    """

    of: _Piece | nn.Parameter
    layer: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements from the start of the storage or parameter

    @classmethod
    def make(cls, tensor: Tensor, of: _Piece | nn.Parameter, layer: int) -> _View:
        """Describe a tensor of layer `layer` as a view of `of`."""
        start = of.storage_offset() if isinstance(of, nn.Parameter) else 0
        return cls(of, layer, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset() - start))

    def on(self, base: Tensor) -> Tensor:
        """Recreate the tensor as a view of `base`, the current storage or parameter."""
        start = base.storage_offset() if isinstance(self.of, nn.Parameter) else 0
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), start + self.offset, self.size, self.stride)


@dataclass
class _Layer:
    """The storages that one layer saved."""

    pieces: dict[int, _Piece] = field(default_factory=dict)  # by address
    sent: Any = None  # event of the copy to the host
    leaving: list[Tensor] = field(default_factory=list)  # sources of this copy, referenced until it is complete


class Offload:
    """Offloads the activations of one rank.

    For each micro-batch: call `begin`, run the forward pass of each layer in order in the context `layer`, then run the
    backward pass. `layers` is the number of layers of the device, `token_bytes` the bytes that one layer saves per
    token. Each micro-batch takes one of `arenas` until its backward pass is complete; if all are taken, another one is
    created. After an exception, `make_room` discards the old state.
    """

    def __init__(self, layers: int, device: torch.device, arenas: Sequence[Arena], token_bytes: int) -> None:
        self._last, self._device, self._token_bytes = layers - _LAYERS_KEPT, device, token_bytes
        self.arenas = list(arenas)
        self._out, self._back = CopyStream(device), CopyStream(device)
        # By arena: the layers of the micro-batch that took it; a backward pass removes them.
        self._taken: list[list[_Layer]] = [[] for _ in arenas]
        self._arena = self.arenas[0]  # of the current micro-batch, as the next two
        self._layers: list[_Layer] = []
        self._ratio = 0.0
        self.saved_bytes = self.moved_bytes = 0  # totals over all micro-batches: saved by layers, and offloaded

    def make_room(self, ratio: float, tokens: int, micro_batches: int = 1) -> None:
        """Allocate the host memory to offload `ratio` of the activations of `tokens` tokens, as often as
        `micro_batches` are in flight at once.

        The last two layers need none. Call it only between steps. Raises MemoryFitError as `Arena.reset` does.
        """
        while len(self.arenas) < micro_batches:
            self.arenas.append(self.arenas[0].another())
        self._taken = [[] for _ in self.arenas]
        for arena in self.arenas[:micro_batches]:
            arena.reset(self._need(ratio, tokens))

    def _need(self, ratio: float, tokens: int) -> int:
        layer_bytes = ratio * tokens * self._token_bytes + GAPS
        return math.ceil(max(0, self._last) * layer_bytes) if ratio else 0

    def pop_short(self) -> int:
        """Most bytes that the host could not allocate for a micro-batch since the last call of this method."""
        return max(arena.pop_short() for arena in self.arenas)

    def begin(self, ratio: float, tokens: int) -> None:
        """Start a micro-batch of `tokens` tokens. The fraction `ratio` of the bytes that each layer saves will be
        offloaded, except for the last two layers.

        Raises ValueError if the ratio is not within 0 .. 1, and MemoryFitError as `Arena.reset` does.
        """
        if not 0 <= ratio <= 1:
            raise ValueError(f"offload ratio {ratio} is not within 0 .. 1")
        # After an exception, copies may still be in progress.
        self._out.computing_waits()
        self._back.computing_waits()
        self._layers, self._ratio = [], ratio
        if not ratio:
            return
        # In a pipeline several micro-batches are in flight. The first arena whose backward pass is complete is free.
        turn = next((number for number, layers in enumerate(self._taken) if not layers), len(self.arenas))
        if turn == len(self.arenas):
            self.arenas.append(self.arenas[0].another())
            self._taken.append([])
        self._taken[turn], self._arena = self._layers, self.arenas[turn]
        self._arena.reset(self._need(ratio, tokens))

    @contextmanager
    def layer(self, module: nn.Module, shared: Iterable[Tensor] = ()) -> Iterator[None]:
        """Run the forward pass of the next layer in this context to offload the tensors that it saves.

        `module` is the layer, whose parameters stay on the device, as do the tensors `shared`, which all layers save.
        Nothing is offloaded if the ratio is 0 or gradients are disabled.
        """
        if not self._ratio or not torch.is_grad_enabled():
            yield
            return
        layers, number, layer = self._layers, len(self._layers), _Layer()
        layers.append(layer)
        fixed = {tensor.untyped_storage().data_ptr() for tensor in shared}

        def pack(tensor: Tensor) -> _View | Tensor:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in fixed or not address:
                return tensor
            # Under ZeRO-3, a view of a gathered parameter would keep its memory until the backward pass, which gathers
            # it again. Gathered parameters may share a storage, so offsets are compared too.
            for one in module.parameters():
                same_storage = one.untyped_storage().data_ptr() == address
                if same_storage and 0 <= tensor.storage_offset() - one.storage_offset() < max(1, one.numel()):
                    return _View.make(tensor, one, number)
            # Look the layer up by number: the graph keeps this hook, which must not keep the layer's storages alive.
            pieces = layers[number].pieces
            if address not in pieces:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                pieces[address] = _Piece(len(flat), flat)
            piece = pieces[address]
            piece.views[int(tensor.storage_offset()), tensor.numel()] = tensor.numel() * tensor.element_size()
            return _View.make(tensor, piece, number)

        with saved_tensors_hooks(pack, partial(self._unpack, layers)):
            yield
        self.saved_bytes += sum(piece.size for piece in layer.pieces.values())
        if number:
            # The previous layer has been copied while this one was computed: free its memory.
            previous = layers[number - 1]
            self._out.computing_waits(previous.sent)
            previous.leaving = []
        if number < self._last:
            self._send(layer)

    def _send(self, layer: _Layer) -> None:
        """Start to copy the micro-batch's offload ratio of a layer's bytes to the host.

        These are the largest storages that fit within that fraction, then part of one more. What does not fit in the
        arena stays on the device.
        """
        pieces = sorted(layer.pieces.values(), key=lambda piece: -piece.size)
        left = round(self._ratio * sum(piece.size for piece in pieces))
        pairs = []
        # Only storages that the saved tensors cover completely: others would stay on the device all the same.
        for piece in (piece for piece in pieces if piece.movable and piece.size <= left):
            if (pair := self._part(piece, piece.size)) is not None:
                left -= piece.size
                pairs.append(pair)
        rest = next((piece for piece in pieces if piece.movable and piece.host is None), None)
        part = min(left, rest.size) // _SPLIT_ALIGNMENT * _SPLIT_ALIGNMENT if rest else 0
        if rest is not None and part and (pair := self._part(rest, part)) is not None:
            pairs.append(pair)
        layer.leaving = [source for _, source in pairs]
        layer.sent = self._out.copy(pairs)
        self.moved_bytes += sum(len(source) for source in layer.leaving)

    def _part(self, piece: _Piece, size: int) -> tuple[Tensor, Tensor] | None:
        """Reserve host memory for the first `size` bytes of a piece. Returns (target, source) of the copy, or None if
        the arena is full."""
        storage, piece.host = piece.here, self._arena.take(size)
        if piece.host is None or storage is None:
            return None
        piece.here, piece.kept = None, storage[size:].clone() if size < len(storage) else None
        return piece.host, storage[:size]

    def _unpack(self, layers: list[_Layer], packed: _View | Tensor) -> Tensor:
        """Return the saved tensor that `pack` replaced by `packed`; starts to copy it back first if necessary.

        `layers` are those of its micro-batch.
        """
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed.of, nn.Parameter):
            return packed.on(packed.of)
        # The backward pass has reached this layer: start to copy it and the previous layer back, if not done yet. From
        # then on only the graph references their storages.
        ahead = max(0, packed.layer - 1)
        for layer in reversed(layers[ahead:]):
            away = [piece for piece in layer.pieces.values() if piece.here is None]
            pairs = []
            for piece in away:
                piece.here = torch.empty(piece.size, dtype=torch.uint8, device=self._device)
                parts = [part for part in (piece.host, piece.kept) if part is not None]
                pairs += list(zip(piece.here.split([len(part) for part in parts]), parts, strict=True))
            done = self._back.copy(pairs) if away else None
            for piece in away:
                piece.back = done
        del layers[ahead:]
        piece = packed.of
        if piece.back is not None:
            self._back.computing_waits(piece.back)
        piece.back = piece.host = piece.kept = None
        assert piece.here is not None
        return packed.on(piece.here)
