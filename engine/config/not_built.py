"""Values that this version does not support yet. The errors say so, because the values are not typing mistakes."""

from __future__ import annotations

from engine.config.schema import Config
from engine.errors import Problem


def not_built(key: str, value: object, available: str) -> Problem | None:
    """Return the problem with a value that only a later version will accept; None for any other value.

    `available` lists the values that can be chosen today.
    """
    key_or_group = key.removesuffix(".name")
    expert_parallel = key_or_group == "parallel.ep" and type(value) is int and value > 1  # `true` is no degree
    if (key_or_group, value) == ("data.runtime", "ray") or expert_parallel:
        return Problem(f"{value} is not implemented yet", key, f"available: {available}")
    return None


def not_trained(config: Config) -> list[Problem]:
    """Return the problems with what can be configured or planned, but not trained."""
    tp, pp, stage = config.parallel.tp, config.parallel.pp, config.zero.stage
    found = []
    if config.model.experts > 1:
        for key, degree in {"parallel.tp": tp, "parallel.pp": pp}.items():
            if degree > 1:
                message = f"{degree} is supported for planning models with experts, but not for training them yet"
                found.append(Problem(message, key, f"train with {key}=1; `bytescale plan` accepts {key}={degree}"))
    if stage > 1 and tp > 1:
        message = f"ZeRO-{stage} with parallel.tp={tp} is supported for planning, but not for training yet"
        found.append(Problem(message, "zero.stage", "train with zero.stage=1 or parallel.tp=1"))
    return found
