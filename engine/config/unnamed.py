"""User recipes from versions without `model.family`, in which the number of experts determined the family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.named import sets
from engine.config.own import OwnRecipe
from engine.family.families import FAMILIES, unnamed


def names_no_family(good: Sequence[str], own: Sequence[OwnRecipe]) -> bool:
    """Return whether a file sets `model.experts`, and nothing sets `model.family` explicitly."""
    return any("model.experts" in recipe.lines for recipe in own) and not sets("model.family", good, own)


def unnamed_family(values: Mapping[str, Any], good: Sequence[str], own: Sequence[OwnRecipe]) -> str | None:
    """Return the family that composed `values` mean, if a file sets `model.experts` for a model of another family.

    None if the family is named, or fits. `good` are the overrides that are composed with `own`.
    """
    family, experts = values["model"].get("family"), values["model"].get("experts")
    if not names_no_family(good, own) or type(experts) is not int or family not in FAMILIES:
        return None
    means = unnamed(experts)
    # Families that came later were never chosen by the number of experts.
    is_first = family == unnamed(FAMILIES[family].least_experts)
    return means if is_first and means != family else None
