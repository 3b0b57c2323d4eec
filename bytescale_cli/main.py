"""`bytescale`: parses, calls, prints. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from bytescale_cli import (
    ckpt,
    config,
    estimate_memory,
    output,
    plan,
    profile_data,
    profile_hardware,
    recipes,
    simulate,
)
from bytescale_cli.errors import report
from bytescale_cli.train import train
from engine.errors import ExitCode

app = typer.Typer(
    help="ByteScale trains language models on long contexts with hybrid data parallelism.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command("estimate-memory")(estimate_memory.estimate_memory)
app.command("profile-data")(profile_data.profile_data)
app.command("profile-hardware")(profile_hardware.profile_hardware)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(recipes.app, name="recipes")
app.add_typer(config.app, name="config")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (by default the process's own) and return its exit code; nothing but this catches errors."""
    output.open_closed()
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    command = typer.main.get_command(app)
    try:
        code = int(command.main(words, prog_name="bytescale", standalone_mode=False) or 0)
        if code == ExitCode.INTERRUPTED:  # Typer makes a code of Ctrl-C and says nothing
            raise KeyboardInterrupt
        return code
    except BaseException as error:
        # The process's edge: whatever comes out here is told to the user, and nothing is swallowed.
        if isinstance(error, SystemExit):
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            if "--help" in words:  # Typer ends so when nobody reads its help, as in `--help | true`: that is no failure
                return ExitCode.OK
            error = error.__context__
        return report(error, as_json="--json" in words, debug="--debug" in words)
