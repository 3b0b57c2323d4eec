"""LLaMA: single-device code on packed tokens. How they meet those of other ranks is the caller's `meeting`.

Letters: T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from engine.attention.meeting import Meeting
from engine.config.schema import Model
from engine.memory import recompute
from engine.memory.offload import Offload
from engine.models.llama.layers import FeedForward, Layer, RMSNorm, Routed, norms_of
from engine.models.loss import Head
from engine.models.rope import rotation
from engine.models.undrawn import Embedding

_INIT_STD = 0.02  # LLaMA's initializer_range
Whole = Callable[[nn.Parameter], AbstractContextManager[bool]]  # gathers a parameter; whether this rank writes it


def all_of_it(parameter: nn.Parameter) -> AbstractContextManager[bool]:
    """Return a parameter's gathering where every rank has all of it."""
    return nullcontext(True)


class Llama(nn.Module):
    """The model of a shape (Touvron et al. 2023; grouped-query attention as in LLaMA 2).

    Its weights are not drawn yet: `initialise` does that. `mode` is the recompute mode; `ffn` makes the feed-forward
    layer of each layer, a `FeedForward` of this `tile` unless another is given.
    """

    def __init__(
        self, shape: Model, *, mode: str = "none", tile: int = 0, ffn: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.shape, self.run_layer = shape, recompute.MODES[mode]
        self.offload: Offload | None = None
        ffn = ffn or (lambda: FeedForward(shape, tile))
        self.embedding = Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, ffn()) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.head = Head(shape.hidden, shape.vocab)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor, meeting: Meeting, labels: Tensor | None = None) -> Tensor:
        """Return the summed loss of labels [T] after tokens [T] at positions [T] in their sequences; T may be 0.

        Without labels the logits [T, vocab]. The loss is the model's, as it needs the head's weights, which ZeRO-3
        gathers for a forward pass only.
        """
        x, _ = self.hidden(tokens, positions, meeting)
        return self.predict(x, labels)

    def hidden(self, tokens: Tensor, positions: Tensor, meeting: Meeting) -> tuple[Tensor, list[Routed]]:
        """Return the residual stream [T,C] after the last layer, and what each layer of experts routed."""
        x = self.embedding(tokens)
        by, routes = rotation(positions, self.shape, x.dtype), []
        for layer in self.layers:
            with self.offload.layer(layer, shared=by) if self.offload else nullcontext():
                x, routed = self.run_layer(layer, x, by, meeting)
            routes.append(routed)
        return x, [routed for routed in routes if routed is not None]

    def predict(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Return the summed cross-entropy of labels [T] after the residual stream [T,C]; without them the logits."""
        return self.head(self.norm(x), labels)  # type: ignore[no-any-return]

    def end_step(self, total: Callable[[Tensor], Tensor], loss_tokens: int) -> dict[str, float]:
        """Do what a model does after a step, with `total` for sums over all ranks; return what it has to tell of it."""
        return {}

    @torch.no_grad()
    def initialise(self, seed: int, whole: Whole = all_of_it) -> None:
        """Draw the weights as LLaMA does: matrices from N(0, 0.02), norms 1. The same on every rank and world size."""
        generator, norms = torch.Generator().manual_seed(seed), norms_of(self)
        for parameter in self.parameters():
            with whole(parameter) as writes:
                if not writes:
                    continue
                if parameter in norms:
                    parameter.fill_(1)
                else:
                    parameter.copy_(torch.empty(parameter.shape).normal_(0, _INIT_STD, generator=generator))
