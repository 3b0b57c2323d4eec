"""Act(s): the bytes that a forward pass keeps for its backward pass, counted storage by storage at a few lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.layout import whole
from engine.attention.meeting import Meeting
from engine.trainer.step import RankContext

_LENGTHS = (64, 256, 1024)  # tokens


def saved(model: nn.Module, context: RankContext, longest: int) -> tuple[tuple[int, int], ...]:
    """Return (tokens, bytes) of uncut sequences of at most `longest` tokens: model weights and the loss aside."""
    return tuple((tokens, _bytes(model, context, tokens)) for tokens in _LENGTHS if tokens <= longest)


def _bytes(model: nn.Module, context: RankContext, tokens: int) -> int:
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, or an address might be given to another

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    meeting = Meeting(whole(tokens), context.comm, context.kernel)
    positions = torch.arange(tokens, device=context.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(torch.zeros_like(positions), positions, meeting)
    count = sum(storage.nbytes() for storage in kept.values())
    del logits  # its graph held what was counted
    return count
