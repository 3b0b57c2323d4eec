"""Creates the model that a config describes. New model families are added here."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.config.schema import Config
from engine.models.common.part import Part
from engine.models.llama.model import Llama
from engine.models.mixtral.model import Mixtral

Transformer = Llama | Mixtral


def build_model(config: Config, part: Part | None = None) -> Transformer:
    """Create the single-device model of a config, or a part of it: Mixtral if it has several experts, else Llama.

    Its weights are uninitialised.
    """
    if config.model.experts > 1:
        return Mixtral(config.model, config.balance, part)
    return Llama(config.model, part)


def end_step(
    model: Transformer, sum_over_ranks: Callable[[Tensor], Tensor], loss_tokens: int, updated: bool = True
) -> dict[str, float]:
    """Run `Mixtral.end_step` after an optimizer step and return its metrics; for LLaMA there are none.

    Collective: all ranks must call it. `sum_over_ranks` all-reduces a tensor; `loss_tokens` is the step's total;
    `updated` says whether the optimizer applied the step.
    """
    return model.end_step(sum_over_ranks, loss_tokens, updated) if isinstance(model, Mixtral) else {}
