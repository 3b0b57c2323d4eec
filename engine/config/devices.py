"""The kind of device of a config's cluster."""

from __future__ import annotations

from engine.config.schema import Config


def uses_gpus(config: Config) -> bool:
    """Return whether ranks run on GPUs. The cluster `local`, and only it, runs them as CPU processes."""
    return config.cluster.name != "local"
