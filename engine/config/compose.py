"""Composes the recipes with Hydra. Only the launcher runs this file; ranks never import it.

Nothing outside this file sees a DictConfig, and Hydra's logging and run directories stay off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from engine.config import tree
from engine.config.own import OwnRecipe
from engine.config.resolved import flat
from engine.config.secret import is_secret, is_secret_value
from engine.errors import ConfigError

_REFERENCE = re.compile(r"\$\{\s*([\w.]+)")
_LONGEST = 1 << 16  # characters of a text with all that it refers to


def compose(overrides: Sequence[str], own: Sequence[OwnRecipe] = ()) -> dict[str, Any]:
    """Compose a recipe and overrides into a nested dict of plain values; `???` marks a value that must still be set.

    `overrides` are those returned by `engine.config.overrides.check`, `own` the files that take the place of `recipe=`
    (`engine.config.own.separate`). Raises ConfigError, with the override or the key, if they cannot be composed.
    """
    try:
        choices, others = _split(overrides)
        composed = _composed(choices, own) if own else deepcopy(_packaged(choices))
        for override in OverridesParser.create().parse_overrides(others):
            new = override.is_force_add()
            OmegaConf.update(composed, override.key_or_group, override.value(), merge=True, force_add=new)
        unresolved = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(unresolved, dict)
        _check_references(flat({str(key): value for key, value in unresolved.items()}))
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, ConfigError):
            inner = inner.__cause__ or inner.__context__
        if inner is not None:  # of `_variable`
            raise inner from None
        text = next((text for text in overrides if "${" in text), getattr(error, "full_key", None))
        raise ConfigError("cannot be resolved", key=text, hint="${...} must name another key of the recipe") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def layers(overrides: Sequence[str], own: Sequence[OwnRecipe] = ()) -> list[tuple[str, str]]:
    """List the files that are composed, the last of which wins: (path without .yaml, section that the file fills).

    The path is relative to the recipes folder, such as ("recipe/base/llama3-8b", "") or ("model/tiny", "model").
    """
    choices, _ = _split(overrides)
    with _recipes(own):
        loader = GlobalHydra.instance().config_loader()
        found = loader.compute_defaults_list("config", _all(choices, own), RunMode.RUN).defaults
    return [(str(one.config_path), one.package or "") for one in found if not str(one.config_path).startswith("hydra")]


def _split(overrides: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Separate the choices of options, such as `model=tiny`, from the values of keys.

    Choices alone decide which files are composed, and in which order. Values are applied to the result.
    """
    groups = tree.groups()
    choices = tuple(text for text in overrides if text.partition("=")[0] in groups)
    return choices, [text for text in overrides if text not in choices]


def _composed(choices: Sequence[str], own: Sequence[OwnRecipe]) -> DictConfig:
    """Compose the files of these choices. References are not resolved yet."""
    with _recipes(own):
        composed: DictConfig = hydra.compose("config", overrides=_all(choices, own))
    return composed


@cache  # reading and merging the files takes most of the .2 s of a composition
def _packaged(choices: tuple[str, ...]) -> DictConfig:
    """The same for packaged recipes only; a caller must copy the result before it changes it."""
    return _composed(choices, ())


def _variable(name: str, *default: Any) -> Any:
    """Resolve `${oc.env:NAME}`, but not for a secret: everyone who sees the run folder would see it."""
    if is_secret(name) or is_secret_value(os.environ.get(name, "")):
        message = "looks like a secret, which the run folder would show"
        hint = "use another variable; credentials stay in the environment, where libraries find them"
        raise ConfigError(message, key=f"${{oc.env:{name}}}", hint=hint)
    return oc.env(name, *default)


def _check_references(values: Mapping[str, Any]) -> None:
    """Raise ConfigError if the references of a text, such as `${run.out}`, make it too long: each may double another.

    `values` by dotted key, not resolved.
    """
    sizes = dict[str, int]()

    def size(key: str) -> int:
        if key not in sizes:
            sizes[key] = 0  # for a reference to itself, which OmegaConf rejects
            text = str(values[key])
            inner = [other for name in _REFERENCE.findall(text) for other in values if _names(name, other)]
            sizes[key] = len(text) + sum(map(size, inner))
            if sizes[key] > _LONGEST:
                message = f"its references expand to more than {_LONGEST:,} characters"
                raise ConfigError(message, key=key, hint="write the text itself")
        return sizes[key]

    for key in values:
        size(key)


def _names(reference: str, key: str) -> bool:
    """Return whether a reference may name a key, or a section around it. One that begins with dots is relative."""
    name = reference.lstrip(".")
    return f"{key}.".startswith(f"{name}.") or (name != reference and f".{name}." in f".{key}.")


def _refused(*_: Any) -> Any:
    """Refuse a resolver that parses a text, to any size and depth."""
    raise ConfigError("is not supported", key="${oc.create:...} or ${oc.decode:...}", hint="write the value itself")


OmegaConf.register_new_resolver("oc.env", _variable, replace=True)
OmegaConf.register_new_resolver("oc.create", _refused, replace=True)
OmegaConf.register_new_resolver("oc.decode", _refused, replace=True)


@contextmanager
def _recipes(own: Sequence[OwnRecipe]) -> Iterator[None]:
    """Initialise Hydra with the packaged recipes and `own`, which exist for Hydra only within this context."""
    store = ConfigStore.instance()
    for recipe in own:
        store.store(recipe.option, recipe.values, group="recipe", package="_global_")
    try:
        with hydra.initialize_config_dir(str(tree.folder()), version_base="1.3"):
            yield
    finally:
        store.repo.pop("recipe", None)


def _all(choices: Sequence[str], own: Sequence[OwnRecipe]) -> list[str]:
    return [*choices, *(f"recipe={recipe.option}" for recipe in own[:1])]
