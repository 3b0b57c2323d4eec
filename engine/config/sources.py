"""The sources of documents that a config names."""

from __future__ import annotations

from engine.config.schema import FORMATS, Data
from engine.tables import imported

# Values of data.path that are no paths: the source files of Python's standard library, a document each, or most of them
# line by line
BUILT_IN = ("stdlib", "stdlib-lines")
ONLY = "data"  # name of the source of a config without data.sources


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
