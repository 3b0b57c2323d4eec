"""Model states of a rank in bytes, from the memory table: on its devices and on the host."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import schema
from engine.cost.table import ALWAYS, END, HOST, letters, total


@dataclass(frozen=True)
class States:
    """Bytes of model states on each device of a rank; they do not depend on the micro-batch."""

    parameters: int
    gradients: int
    optimizer: int
    gather_buffers: int  # ZeRO's buffers: gathered layers, and gradients during their reduction
    host: int  # on the host
    closing: int  # copies for reduction and update at the end of a step, after activations are released

    @property
    def device(self) -> int:
        """Bytes on the device at every instant."""
        return self.parameters + self.gradients + self.optimizer + self.gather_buffers


def states(config: schema.Config, ranks: int, stage: int = 0) -> States:
    """The model states on each device of a rank's `stage`, if `ranks` HDP ranks share them."""
    values = letters(config, ranks, stage)
    return States(
        parameters=total(ALWAYS, values, item="parameters"),
        gradients=total(ALWAYS, values, item="gradients"),
        optimizer=total(ALWAYS, values, item="optimizer"),
        gather_buffers=total(ALWAYS, values, item="gather_buffers"),
        host=total(HOST, values),
        closing=max(0, total(END, values)),
    )
