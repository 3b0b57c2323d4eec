"""The `bytescale` command. Each command imports slow modules only when it runs, so `--help` stays fast."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from bytescale_cli import (
    ckpt,
    completion,
    config,
    data,
    doctor,
    estimate_memory,
    output,
    plan,
    profile_data,
    profile_hardware,
    recipes,
    report,
    runs,
    simulate,
    tune,
)
from bytescale_cli.chaos import chaos
from bytescale_cli.errors import report as report_error
from bytescale_cli.generate import generate
from bytescale_cli.train import train
from engine import interrupts
from engine.errors import ExitCode

_WARNINGS = "PYTHONWARNINGS"

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    """Print the version of the installed package and exit, if `--version` was given."""
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            output.show(f"bytescale {version('bytescale')}")
        except PackageNotFoundError:
            output.show("bytescale, not installed: run from its sources")
        raise typer.Exit


@app.callback()
def bytescale(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """ByteScale trains language models on long contexts with hybrid data parallelism."""


app.command()(train)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(tune.tune)
app.command("estimate-memory")(estimate_memory.estimate_memory)
app.command("profile-data")(profile_data.profile_data)
app.command("profile-hardware")(profile_hardware.profile_hardware)
app.command()(generate)
app.command()(doctor.doctor)
app.command()(report.report)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(runs.app, name="runs")
app.add_typer(data.app, name="data")
app.add_typer(recipes.app, name="recipes")
app.add_typer(config.app, name="config")
app.command()(chaos)
app.command()(completion.completion)
app.command("candidates", hidden=True)(completion.print_candidates)


def _show_warnings() -> None:
    """With `python -W error` or PYTHONWARNINGS=error, show the warnings of libraries: they must not end a run.

    Processes that are started later inherit these options.
    """

    def shown(option: str) -> str:
        action, colon, rest = option.partition(":")
        return f"default{colon}{rest}" if action and "error".startswith(action) else option

    if (options := [*map(shown, sys.warnoptions)]) == sys.warnoptions:
        return
    sys.warnoptions[:] = options
    if given := os.environ.get(_WARNINGS):
        os.environ[_WARNINGS] = ",".join(map(shown, given.split(",")))
    filters: list[Any] = [*warnings.filters]
    for action, message, category, module, line in filters:
        if action == "error":
            texts = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
            warnings.filterwarnings("default", texts[0], category, texts[1], line)


@cache  # tests run many command lines in one process
def built(*, outline: bool) -> Any:
    """Let Typer build the commands. It inspects all their parameters, which `bytescale --help` does not show: for that
    an `outline` of names and descriptions is enough."""
    if not outline:
        whole = typer.main.get_command(app)
        for one in _with_subcommands(whole):
            for parameter in one.params:  # next to KEY=VALUE, Python's type, `<list[str]>`, adds no information
                if parameter.param_type_name == "argument":
                    parameter.display_type_rich = lambda ctx: None
        return whole
    found = typer.Typer(add_completion=False, rich_markup_mode=None)
    found.registered_callback = app.registered_callback
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        found.command(name, help=inspect.getdoc(command.callback), hidden=command.hidden)(lambda: None)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        found.add_typer(typer.Typer(help=group.typer_instance.info.help), name=group.name)
    return typer.main.get_command(found)


def _with_subcommands(command: Any) -> Iterator[Any]:
    yield command
    for one in getattr(command, "commands", {}).values():
        yield from _with_subcommands(one)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default `sys.argv[1:]`; report any error and return the exit code."""
    output.open_closed()
    _show_warnings()
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with interrupts.raised():
            command = built(outline=words[0] == "--help")
            code = int(command.main(words, prog_name="bytescale", standalone_mode=False) or 0)
            if code == ExitCode.INTERRUPTED:  # Typer turns Ctrl-C into this code without a message
                raise KeyboardInterrupt
            return code
    except BaseException as error:
        # The outermost frame: every error is reported to the user, and none is swallowed.
        if isinstance(error, SystemExit):
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            if "--help" in words:  # not a failure: the reader has exited, as in `--help | true`
                return ExitCode.OK
            error = error.__context__
        return report_error(error, as_json="--json" in words, debug="--debug" in words)
    finally:
        interrupts.answered()
