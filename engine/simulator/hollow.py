"""Warnings about plans that waste most of the ranks or of the capacity, and about steps that exceed the corpus."""

from __future__ import annotations

from typing import NamedTuple

from engine.config.schema import BEST, Config
from engine.config.units import format_count

LEAST_BALANCE = 0.5
LEAST_FILL = 0.5  # of the capacity, in the largest micro-batch
_ROUND = 1024  # tokens


class Hollow(NamedTuple):
    """What is wrong, the key that decides it, and what to change."""

    code: str  # balance, empty_capacity or small_corpus
    key: str
    message: str
    hint: str

    def __str__(self) -> str:
        return f"warning: {self.key}: {self.message}; {self.hint}"


def low_balance(config: Config, balance: float) -> list[Hollow]:
    """A warning if ranks do useful work in less than half of the time. `balance` is the mean over several steps."""
    if balance >= LEAST_BALANCE:
        return []
    message = f"a rank does useful work in {balance:.0%} of a step; in the rest it waits, communicates or idles"
    planner = "" if config.planner.name == BEST else f", planner={BEST}"
    hint = f"try a larger batch_tokens, fewer ranks{planner}, or the fastest settings that `bytescale tune` finds"
    return [Hollow("balance", "batch_tokens", message, hint)]


def empty_capacity(config: Config, ranks: int, largest: int) -> list[Hollow]:
    """A warning if `largest`, the tokens of the largest micro-batch of all steps, fills less than half of the capacity.

    There is none if the capacity must be so large for `ranks` HDP ranks to hold the context.
    """
    enough = -(-max(largest, -(-config.context // ranks)) // _ROUND) * _ROUND
    if largest >= LEAST_FILL * config.capacity or enough >= config.capacity:
        return []
    message = f"the largest micro-batch has {largest:,} of {config.capacity:,} tokens"
    hint = f"capacity={format_count(enough)} is enough, and leaves memory, for example for recompute=none"
    return [Hollow("empty_capacity", "capacity", message, hint)]


def small_corpus(config: Config, tokens: int | None) -> list[Hollow]:
    """A warning if a step is larger than the corpus of so many tokens. None: they are unknown, or drawn without end."""
    if tokens is None or tokens >= config.batch_tokens:
        return []
    message = f"the corpus has {tokens:,} tokens, less than the {config.batch_tokens:,} of one step"
    return [Hollow("small_corpus", "batch_tokens", message, "use a smaller batch_tokens, or more documents")]
