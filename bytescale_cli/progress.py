"""How a run shows itself while it goes: a live line on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bytescale_cli import output

OnStep = Callable[[Mapping[str, Any]], None]


@contextmanager
def progress(steps: int) -> Iterator[tuple[Callable[[str], None], OnStep]]:
    """Give `say` and `on_step` (called with each line of metrics.jsonl) for a run of `steps` steps."""
    if sys.stderr.isatty():
        with _live(steps) as functions:
            yield functions
    else:
        yield output.say, lambda line: output.say(f"step {line['step']}/{steps}  {describe(line)}")


def describe(line: Mapping[str, Any]) -> str:
    """Return what a person wants to know of a step."""
    text = (
        f"loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s  "
        f"balance {line['balance']:.2f}  largest ring {line['max_degree']}"
    )
    if line.get("validation_loss") is not None:
        text += f"  validation loss {line['validation_loss']:.3f}"
    return text


@contextmanager
def _live(steps: int) -> Iterator[tuple[Callable[[str], None], OnStep]]:
    """Give the functions of one live bar; what is said meanwhile is printed above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting the ranks", total=steps)

        def on_step(line: Mapping[str, Any]) -> None:
            bar.update(task, completed=line["step"], description=describe(line))

        yield lambda text: bar.console.print(Text(text)), on_step
