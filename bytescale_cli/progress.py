"""Shows progress on stderr: of a run while it trains, and of a search; a live line on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bytescale_cli import output
from bytescale_cli.terminal import harmless, is_live

OnStep = Callable[[Mapping[str, Any]], None]


@contextmanager
def progress(steps: int | None) -> Iterator[tuple[Callable[[str], None], OnStep]]:
    """Show the progress of a run of `steps` steps, None if it will make none; yield two functions for its duration.

    The first prints a message. The second shows the metrics of a finished step, a line of metrics.jsonl.
    """
    if steps is None or not is_live(sys.stderr):
        yield output.say, lambda line: output.say(f"step {line['step']}/{steps}  {describe(line)}")
        return

    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    console = Console(stderr=True)
    bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), console=console)
    task, below = bar.add_task("", total=steps), Text("starting the ranks")  # next to the bar it would be cut off
    with Live(Group(bar, below), console=console):

        def on_step(line: Mapping[str, Any]) -> None:
            bar.update(task, completed=line["step"])
            below.plain = describe(line)

        # As Text, so that [brackets] are not read as markup.
        yield lambda text: console.print(Text(harmless(text))), on_step


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show the activity of a slow command and its seconds, on a terminal only."""
    if not is_live(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task(text, total=None)
        yield


def describe(line: Mapping[str, Any]) -> str:
    """Format the metrics of a step as one line."""
    loss = "not finite" if line["loss"] is None else f"{line['loss']:.3f}"
    text = f"loss {loss}  {line['tokens_per_s']:,.0f} tokens/s"
    if line.get("mfu") is not None:
        text += f"  MFU {line['mfu']:.1%}"
    text += f"  plan balance {line['balance']:.2f}  largest ring {line['max_degree']}"
    if line.get("unsplit") is not None:
        text += f"  unsplit {line['unsplit']:.0%}"
    if line.get("skipped"):
        text += "  skipped"
    if line.get("validation_loss") is not None:
        text += f"  validation loss {line['validation_loss']:.3f}"
    return text
