"""Flags and arguments shared by several commands, and flags that are aliases of config keys."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bytescale_cli import output
from engine.config.explain.spelling import nearest
from engine.errors import BytescaleError, ConfigError, Problem

if TYPE_CHECKING:
    from engine.config.explain.toys import Part
    from engine.config.schema import Config
    from engine.simulator.hollow import Hollow

_PAGES = (".html", ".htm")
_MAX_STEPS = 10_000  # planning more would take hours

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Config values to set, for example recipe=quickstart optimizer.lr=1e-4."),
]
ConfigFile = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="YAML file with a recipe; sets recipe.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

Plot = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Write an HTML page with charts, for example page.html.")
]

PlotOfPlan = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Write an HTML page with charts, for example page.html, or only a picture of the first step, plan.svg.",
    ),
]

Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Write a timeline for ui.perfetto.dev, for example trace.json."),
]


def trace_path(trace: str | None) -> Path | None:
    """Return the path of the `--trace` file, as `plot_path` does. Raises ConfigError unless its name ends in .json."""
    if trace is None:
        return None
    if Path(trace).suffix.lower() != ".json":
        raise ConfigError(f"{trace} is not a JSON file name", key="--trace", hint="for example --trace trace.json")
    return writable(trace, "--trace")


def plot_path(plot: str | None, flag: str = "--plot", kinds: Sequence[str] = _PAGES) -> Path | None:
    """Return the path of the page that `flag` names without symbolic links, or None if no page was requested.

    Raises ConfigError if the name does not end in one of `kinds`, or if the file cannot be written. Commands call this
    before they start their work.
    """
    if plot is None:
        return None
    if Path(plot).suffix.lower() not in kinds:
        or_svg = " or SVG" if ".svg" in kinds else ""
        raise ConfigError(f"{plot} is not an HTML{or_svg} file name", key=flag, hint=f"for example {flag} page.html")
    return writable(plot, flag)


def writable(
    name: str,
    flag: str | None,
    new_folder: bool = False,
    hint: str = "choose a file in a folder that you can write to",
) -> Path:
    """Return the path of the output file `name` without symbolic links.

    Raises ConfigError that names `flag`, if it was given, if the file cannot be written. Commands call this before they
    start their work. With `new_folder` its folder may be missing: the caller creates it later.
    """
    path = Path(os.path.realpath(name))
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is a folder or a device")
        if path.exists() and not os.access(path, os.W_OK):
            raise OSError(0, "it is read-only")
        # Permission bits do not decide this, least of all for root: create and remove a file in the same folder.
        folder = next(one for one in path.parents if one.exists()) if new_folder else path.parent
        handle, probe = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
        os.close(handle)
        Path(probe).unlink()
    except OSError as error:
        raise ConfigError(f"{name} cannot be written: {error.strerror}", key=flag, hint=hint) from error
    return path


def new_recipe(file: str, flag: str) -> Path:
    """Return the path of a recipe file to write. Raises ConfigError that names `flag` if it cannot be a new file."""
    path = Path(file).expanduser()
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"{file} is not a YAML file name", key=flag, hint=f"for example {file}.yaml")
    if path.exists():
        raise _exists(path, flag)
    writable(str(path), flag)
    return path


def write_recipe(path: Path, text: str, flag: str) -> None:
    """Write a recipe to a new file. Raises ConfigError if it exists."""
    try:
        with path.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise _exists(path, flag) from None


def _exists(path: Path, flag: str) -> ConfigError:
    return ConfigError(f"{path} exists", key=flag, hint="choose another name, or remove it first")


def check_at_least(least: int, number: int, flag: str) -> None:
    """Raise ConfigError that names `flag` unless `number` is at least `least`."""
    if number < least:
        raise ConfigError(
            f"must be at least {least}, not {number}", key=flag, hint=f"for example {flag} {max(least, 3)}"
        )


def whole_number(text: str) -> int:
    """Parse the whole number of a flag such as `--nproc 2`. Raises BadParameter with a clearer message than Typer's."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"must be a whole number, not {text}") from None


def say_toys(config: Config, *parts: Part) -> None:
    """Print one line if parts of the config are placeholder defaults; see `toys`."""
    from engine.config.explain.toys import toys

    if line := toys(config, *parts):
        output.say(line)


def say_warnings(found: Iterable[Hollow]) -> list[dict[str, str]]:
    """Print a line for each different warning; return them as JSON."""
    different = list(dict.fromkeys(found))
    for one in different:
        output.say(str(one))
    return [one._asdict() for one in different]


def check_named_once(runs: Sequence[Path]) -> None:
    """Raise ConfigError if two of these paths are those of the same run."""
    if len({path.resolve() for path in runs}) < len(runs):
        raise ConfigError("a run is named twice", key="RUN", hint="name each run once")


def check_steps(steps: int, flag: str) -> None:
    """Raise ConfigError that names `flag` unless `steps` is between 1 and _MAX_STEPS."""
    if not 1 <= steps <= _MAX_STEPS:
        bound = "at least 1" if steps < 1 else f"at most {_MAX_STEPS:,}"
        raise ConfigError(f"must be {bound}, not {steps}", key=flag, hint=f"for example {flag} 3")


def choice(*options: str) -> Callable[[str], str]:
    """Make the parser of a flag that accepts only these options. It raises BadParameter with the nearest option."""

    def parse(text: str) -> str:
        if text not in options:
            near = nearest(text, options)
            raise typer.BadParameter(
                f"must be {' or '.join(options)}, not {text}." + (f" Did you mean {near}?" if near else "")
            )
        return text

    return parse


def with_aliases(overrides: Sequence[str], flags: Mapping[tuple[str, str], str | int | None]) -> list[str]:
    """Append an override for each flag that was given: {("--out", "run.out"): "runs/a"} adds `run.out=runs/a`.

    `flags` maps (flag, key) to the value of the flag, or to None if it was not given. Raises ConfigError if an override
    sets the key of a flag to another value.
    """
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    added, problems = [], []
    for (flag, key), value in flags.items():
        if value is None:
            continue
        other = given.get(key)
        if other is None:
            added.append(f"{key}={value}")  # no quotes needed: paths are quoted later
        elif os.path.normpath(other.strip("'\"")) != os.path.normpath(str(value)):
            problems.append(Problem(f"{value} conflicts with {key}={other}", flag, "give only one"))
    if problems:
        raise ConfigError.of(problems)
    return [*overrides, *added]


def with_config(overrides: Sequence[str] | None, file: str | None) -> list[str]:
    """Append the override of `--config FILE`: recipe=FILE, written as a path."""
    from engine.config.tree import is_path

    path = file if file is None or is_path(file) else f"./{file}"
    return with_aliases(overrides or [], {("--config", "recipe"): path})


def chosen(given: list[str], quiet: bool = False, of_job: bool = False) -> list[str]:
    """Add the overrides for the format of documents that overrides do not name; see engine.data.choose.with_format.

    A line reports the choice, unless `quiet`.
    """
    from engine.config.named import names_path_alone

    if not names_path_alone(given):
        return given
    from engine.data.choose import with_format

    return with_format(given, (lambda line: None) if quiet else output.say, of_job)


def about_documents(given: Sequence[str], say: Callable[[str], None] = output.say) -> Callable[[str], None]:
    """Return a function that passes lines about documents to `say`.

    It passes the warning that tokens are bytes once, also for several sources, and not at all if the overrides `given`,
    or the user's own recipe, set `data.tokenizer`.
    """
    from engine.config.named import names_tokenizer
    from engine.data.sources.notes import AS_BYTES

    is_known = names_tokenizer(given)

    def pass_on(line: str) -> None:
        nonlocal is_known
        as_bytes = line.startswith(AS_BYTES)
        if not (as_bytes and is_known):
            say(line)
        is_known |= as_bytes

    return pass_on


def loaded(overrides: Sequence[str] | None, file: str | None, say: Callable[[str], None] = lambda line: None) -> Config:
    """Load the config of a command's overrides and its `--config FILE`; `say` as in engine.config.load.load."""
    with config_as_typed(file):
        return load_with_weights(chosen(with_config(overrides, file)), say)


def load_with_weights(
    overrides: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
    say_model: Callable[[str], None] = output.say,
    *,
    rules: bool = True,
    elsewhere: bool = False,
) -> Config:
    """Load the config of overrides, with the model of its `run.weights`; see engine.config.load.load."""
    from engine.config.load import load
    from engine.config.named import path_without_effect

    keys = {text.partition("=")[0] for text in overrides}
    # The quickstart begins without weights.
    if rules and not {"recipe", "run.weights"} & keys:
        config = load(overrides, say)
    else:
        from engine.weights.model import model_of

        config = load(overrides, say, rules=rules, model_of=model_of, say_model=say_model, elsewhere=elsewhere)
    if line := path_without_effect(overrides, config.data):
        say_model(line)
    if "recipe" not in keys and {"model", "cluster"} & keys:
        from engine.config.units import format_count

        sizes = {"context": config.context, "capacity": config.capacity, "batch_tokens": config.batch_tokens}
        kept = [f"{key}={format_count(size)}" for key, size in sizes.items() if key not in keys]
        which = f"{', '.join(kept)} and others" if kept else "other values"
        say_model(f"no recipe is named: {which} are those of recipe=quickstart; `bytescale recipes list` shows others")
    return config


@contextmanager
def config_as_typed(file: str | None) -> Iterator[None]:
    """Rewrite errors raised in this context that name the key `recipe`, if the user typed `--config FILE` for it."""
    try:
        yield
    except BytescaleError as error:
        if file is not None:
            # A name after --config is a file's; the nearest name that a hint has is that of a packaged recipe.
            error.problems = tuple(
                replace(one, key="--config", hint=(one.hint or "").replace("did you mean ", "did you mean recipe="))
                if one.key == "recipe"
                else one
                for one in error.problems
            )
        raise


@contextmanager
def named_as_typed(aliases: Mapping[tuple[str, str], str | int | None]) -> Iterator[None]:
    """Rewrite errors raised in this context so that they name the flags that the user typed.

    For example `--nproc 0` instead of `cluster.ranks_per_node=0`. `aliases` is the mapping for `with_aliases`.
    """
    flags = {key: flag for (flag, key), value in aliases.items() if value is not None}
    try:
        yield
    except BytescaleError as error:

        def typed(text: str | None) -> str:
            """Replace the config keys in a message by the flags that the user typed."""
            text = text or ""
            for key, flag in flags.items():
                name = rf"(?<![\w.]){re.escape(key)}"
                text = re.sub(rf"{name}=", f"{flag} ", text)
                text = re.sub(rf"{name}(?!\w|\.\w)", flag, text)
            return text.strip()

        error.problems = tuple(
            Problem(typed(one.message), typed(one.key).strip() or None, typed(one.hint) or None)
            for one in error.problems
        )
        raise
