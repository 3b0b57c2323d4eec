"""Mixtral: LLaMA with a mixture-of-experts feed-forward layer, and what keeps its experts equally busy.

Letters: T tokens, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.meeting import Meeting
from engine.config.schema import Balance, Model
from engine.models.llama.model import Llama
from engine.models.mixtral.balance import balance_loss, expert_slots, z_loss
from engine.models.mixtral.experts import Experts


@dataclass
class Tally:
    """What a rank's micro-batches of a step add up to."""

    cross_entropy: Tensor | float = 0.0
    slots: Tensor | int = 0  # [L,E] tokens that each expert got


class Mixtral(Llama):
    """The model of a shape with experts (Jiang et al. 2024). Without `balance` its loss is the cross-entropy alone."""

    def __init__(self, shape: Model, balance: Balance | None = None, *, mode: str = "none", tile: int = 0) -> None:
        super().__init__(shape, mode=mode, ffn=lambda: Experts(shape, balance, tile))
        self.balance, self._tally = balance, Tally()

    def forward(self, tokens: Tensor, positions: Tensor, meeting: Meeting, labels: Tensor | None = None) -> Tensor:
        """Return what `Llama` does; in training the loss holds the terms that balance the experts.

        Scaled as it is, so that the sum over ranks and micro-batches, divided by the step's loss tokens, is

            cross-entropy + loss_weight * balance loss + z_weight * z-loss

        as means over loss tokens.
        """
        x, routed = self.hidden(tokens, positions, meeting)
        loss = self.predict(x, labels)
        if labels is None or self.balance is None or not self.training:
            return loss
        slots = expert_slots(routed, meeting)
        self._tally = Tally(self._tally.cross_entropy + loss.detach().double(), self._tally.slots + slots.sum(0))
        loss = loss + self.balance.z_weight * z_loss(routed, labels)
        if self.balance.by == "loss":
            loss = loss + self.balance.loss_weight * balance_loss(routed, slots, labels, meeting)
        return loss

    @torch.no_grad()
    def end_step(self, total: Callable[[Tensor], Tensor], loss_tokens: int) -> dict[str, float]:
        """Move the biases by the step's counts; return the mean cross-entropy, and how busy the busiest expert was.

        `total` adds a tensor up over all ranks, which all call this, each having run at least one micro-batch. The
        bias of an expert with more than the mean load falls by one step of the rate, of one with less it rises.
        """
        cross_entropy, slots = self._tally.cross_entropy, self._tally.slots
        self._tally = Tally()
        if not isinstance(slots, Tensor) or not isinstance(cross_entropy, Tensor):
            return {}
        # float64 holds whole numbers up to 2^53, and so one sum serves both.
        totals = total(torch.cat((slots.flatten().double(), cross_entropy[None])))
        over = totals[:-1].view(slots.shape) * self.shape.experts / totals[:-1].view(slots.shape).sum(-1, keepdim=True)
        for experts, load in zip(self._experts(), over, strict=True):
            if experts.bias is not None:
                experts.bias += torch.sign(1 - load).long()
        return {"cross_entropy": float(totals[-1]) / loss_tokens, "busiest_expert": float(over.max())}

    def _experts(self) -> list[Experts]:
        return [module for module in self.modules() if isinstance(module, Experts)]
