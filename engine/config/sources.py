"""The sources of documents that a config names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from engine.config.schema import FORMATS, Data, Source
from engine.errors import BytescaleError
from engine.tables import imported

# Values of data.path that are no paths: the source files of Python's standard library, a document each, or most of them
# line by line
BUILT_IN = ("stdlib", "stdlib-lines")
ONLY = "data"  # name of the source of a config without data.sources
# In messages: data=jsonl, data.path
_FORMAT = re.compile(r"(?<![\w./-])data=(?=\w)")
_KEY = re.compile(rf"(?<![\w./-])data\.(?=({'|'.join(Source.model_fields)})\b)")


def pattern_of(format: str) -> str:
    """Return data.pattern of a source with another format than data.format, and of recipes/data."""
    return "**/*" if format == "tokens" else imported(FORMATS)[format].pattern


def source_configs(data: Data) -> dict[str, Data]:
    """Return the complete section of each source, by name. Without `data.sources`, `data` is the only source."""
    if not data.sources:
        return {ONLY: data}
    found = {}
    for name, source in data.sources.items():
        own = source.model_dump(exclude_none=True)
        if own.get("format", data.format) != data.format:
            own = {"pattern": pattern_of(own["format"]), "separator": None, **own}
        if own.get("format", data.format) == "tokens":  # that of `data` is for texts
            own = {"transform": (), **own}
        found[name] = data.model_copy(update={**own, "name": name, "sources": {}, "mix": ()})
    return found


@contextmanager
def of_source(data: Data, name: str) -> Iterator[None]:
    """Name the keys of a source in errors about its section, where code that reads it alone names those of `data`.

    `data.path` becomes `data.sources.web.path`, and `data=jsonl` `data.sources.web.format=jsonl`.
    """
    try:
        yield
    except BytescaleError as error:
        if data.sources:
            section = f"data.sources.{name}"

            def named(text: str) -> str:
                return _KEY.sub(f"{section}.", _FORMAT.sub(f"{section}.format=", text))

            error.problems = tuple(
                replace(one, message=named(one.message), hint=one.hint and named(one.hint)) for one in error.problems
            )
            error.args = (error.problems[0].message,)
        raise
