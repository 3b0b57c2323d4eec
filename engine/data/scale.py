"""Chooses context, cluster and model for documents that are planned without a recipe.

Otherwise they would be planned for the quickstart: a tiny model on two CPU cores, which splits every document at 2K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.config import keys
from engine.config.load import load
from engine.config.named import named
from engine.config.schema import Config
from engine.config.sources import BUILT_IN
from engine.config.units import counted, format_count
from engine.data.lengths import document_lengths
from engine.data.scan import Documents, Progress
from engine.data.tokenizers.load import BYTES, open_tokenizer

SAMPLE = 10_000  # documents whose lengths decide, where not all are read anyway
_LEAST_CONTEXT = 1024
_RECIPES = (  # of one model, by the context that its cluster is for
    (64 << 10, "llama3-8b-64k-1node"),
    (128 << 10, "llama3-8b-128k-2nodes"),
    (256 << 10, "llama3-8b-256k-4nodes"),
    (1 << 20, "llama3-8b-1m-16nodes"),
)


def is_without_recipe(overrides: Sequence[str]) -> bool:
    """Return whether overrides of `load` name documents to plan for, but no recipe, weights, model or cluster."""
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    sections = {key.partition(".")[0] for key in given}
    if {"recipe", "run.weights"} & {*given} or {"model", "cluster", "parallel"} & sections:
        return False
    documents = any(key == "data.path" or key.startswith(keys.SOURCES) for key in given)
    return documents and given.get("data.path") not in BUILT_IN and bool(named(overrides).implied)


def scaled(
    overrides: Sequence[str],
    sample: int | None = SAMPLE,
    progress: Progress = lambda done: None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Config, dict[str, Documents]]:
    """Return the config for documents named without a recipe (`is_without_recipe`), and the lengths that decide it.

    The recipe is that of the smallest cluster whose context holds the longest document; the context is the power of two
    that does. Values that overrides set are kept. `say` gets the lines of `document_lengths`, and one that reports the
    choice. Raises ConfigError and DataError as `load` and `document_lengths`.
    """
    given = {text.partition("=")[0] for text in overrides}
    # Loaded twice: first only for the values on the command line, because the recipe is not known yet.
    typed = load(overrides, rules=False)
    own: dict[str, object] = {"run.weights": "null", "data.tokenizer": typed.data.tokenizer}  # the recipe's are others
    if typed.data.tokenizer != BYTES:
        own["model.vocab"] = open_tokenizer(typed.data.tokenizer).vocabulary

    def with_recipe(recipe: str, **more: object) -> list[str]:
        chosen = {"recipe": recipe, **own, **more}
        return [*(f"{key}={value}" for key, value in chosen.items() if key not in given), *overrides]

    # Lengths depend on the tokenizer, but not on the recipe, so they can be read with any recipe.
    found = document_lengths(load(with_recipe(_RECIPES[0][1])), sample, progress, say)
    longest = max(int(one.lengths.max()) for one in found.values())
    most = _RECIPES[-1][0]
    context = min(most, max(_LEAST_CONTEXT, 1 << (longest - 1).bit_length()))
    if "context" in given:
        context = typed.context
    # Recipes are in the order of their contexts, and larger contexts have larger clusters: the first that fits is the
    # smallest.
    recipe = next((name for size, name in _RECIPES if context <= size), _RECIPES[-1][1])
    config = load(with_recipe(recipe, context=context))
    of = "" if all(one.fraction == 1 for one in found.values()) else " that was read"
    cluster = f"{counted(config.cluster.nodes, 'node')} of {config.cluster.name}"
    say(
        f"no recipe is named: planned for {config.model.name} with context={format_count(config.context)} on {cluster} "
        f"(recipe={recipe}), because the longest document{of} has {counted(longest, 'token')}; "
        "for another model or cluster, set recipe=NAME"
    )
    return config, found


def planned_for(config: Config) -> dict[str, Any]:
    """Return the recipe, the context and the cluster that documents are planned for, as JSON."""
    cluster = config.cluster
    return {
        "recipe": config.recipe,
        "model": config.model.name,
        "context": config.context,
        "cluster": cluster.name,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
    }
