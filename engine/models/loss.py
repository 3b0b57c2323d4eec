"""The token loss: summed, so that any split of a batch over ranks and micro-batches adds up to the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a label that is no loss token


def token_loss(logits: Tensor, labels: Tensor, ignore: int = IGNORE) -> Tensor:
    """Return the summed cross-entropy in nats of logits [T, vocab] and labels [T], without those equal to `ignore`.

    At least float32 inside. With no token, or none that counts, it is a zero that is still connected to the graph.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, ignore_index=ignore, reduction="sum")
