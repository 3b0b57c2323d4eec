"""The sources of documents that a config names."""

from __future__ import annotations

from engine.config.schema import Data

# Values of data.path that are no paths: the source files of Python's standard library, a document each, or most of them
# line by line
BUILT_IN = ("stdlib", "stdlib-lines")
ONLY = "data"  # name of the source of a config without data.sources
PATTERNS = {  # of a source with another format than data.format; those of recipes/data
    "folder": "**/*",
    "jsonl": "**/*.jsonl*",
    "parquet": "**/*.parquet",
    "arrow": "**/*.arrow",
    "tokens": "**/*",
}


def source_configs(data: Data) -> dict[str, Data]:
    """Return the complete section of each source, by name. Without `data.sources`, `data` is the only source."""
    if not data.sources:
        return {ONLY: data}
    found = {}
    for name, source in data.sources.items():
        own = source.model_dump(exclude_none=True)
        if own.get("format", data.format) != data.format:
            own = {"pattern": PATTERNS[own["format"]], "separator": None, **own}
        found[name] = data.model_copy(update={**own, "name": name, "sources": {}, "mix": ()})
    return found
