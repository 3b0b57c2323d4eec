"""The sources of documents that a config names."""

from __future__ import annotations

from engine.config.schema import Data

ONLY = "data"  # name of the source of a config without data.sources


def source_configs(data: Data) -> dict[str, Data]:
    """Return the complete section of each source, by name. Without `data.sources`, `data` is the only source."""
    if not data.sources:
        return {ONLY: data}
    return {
        name: data.model_copy(update={**source.model_dump(exclude_none=True), "name": name, "sources": {}, "mix": ()})
        for name, source in data.sources.items()
    }
