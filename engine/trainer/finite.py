"""Ends a run whose loss or gradients are not finite, before it can save a useless checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from engine.data.sequences import SequenceTable
from engine.errors import BytescaleError, ExitCode
from engine.planner.plan.step_plan import StepPlan
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder

_SHOWN = 3  # documents


class DivergedError(BytescaleError):
    """The loss or the gradient norm is not finite. The run is not retried, because it would diverge again."""

    code = ExitCode.USAGE


def diverged(step: int, folder: RunFolder, where: str = "", **values: float) -> DivergedError:
    """Return the error of a step some of whose `values` are not finite.

    `where` follows the values in the message. The hint names the newest checkpoint of the run.
    """
    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    kept = newest_first(folder.checkpoints)
    action = "start again: run.out=NEW"
    if kept:
        action = f"resume into a new folder: run.out=NEW --resume {shlex.quote(str(kept[0]))}"
    message = f"training diverged at step {step}: {shown}{where}"
    hint = f"lower it and {action}; or skip such steps: run.on_nan=skip"
    return DivergedError(message, key="optimizer.lr", hint=hint)


def documents_of(plan: StepPlan, table: SequenceTable, sources: Sequence[str], micro_batches: Sequence[int]) -> str:
    """Name the documents in micro-batches of a step: those whose loss is not finite, or all if there are none.

    Each is named as `data trace --document` expects it.
    """
    suspects = sorted(set(micro_batches))
    shards = [shard for index in suspects for shard in plan.micro_batch(index).shards]
    sequences = sorted({shard.sequence for shard in shards}) if suspects else range(len(table))
    places = dict.fromkeys(
        f"{sources[table.source[one]]}:{table.block[one]}:{table.document[one]}" for one in sequences
    )
    names = ", ".join(list(places)[:_SHOWN])
    more = f" and {len(places) - _SHOWN:,} more" if len(places) > _SHOWN else ""
    what = f"{len(suspects):,} of {plan.micro_batches:,} micro-batches" if suspects else "the gradients alone"
    return f", in {what}; documents {names}{more}"
