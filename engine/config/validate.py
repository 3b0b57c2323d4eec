"""From plain values to the typed Config, with every mistake told in plain English."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from engine.config import keys
from engine.config.not_built import not_built
from engine.config.schema import Config, Section
from engine.config.spelling import did_you_mean
from engine.errors import Problem

MISSING = "???"
_SHORT = 1e15

_SENTENCES = {
    "missing": "is not set",
    "extra_forbidden": "there is no such key",
    "int_type": "is not a whole number: {value}",
    "float_type": "is not a number: {value}",
    "string_type": "is not text: {value}",
    "bool_type": "is not true or false: {value}",
    "finite_number": "is not a finite number: {value}",
    "tuple_type": "is not a list: {value}",
    "too_short": "has too few values: {value}",
    "too_long": "has too many values: {value}",
    "string_too_short": "is empty",
    "greater_than": "must be more than {gt}, not {value}",
    "greater_than_equal": "must be at least {ge}, not {value}",
    "less_than": "must be less than {lt}, not {value}",
    "less_than_equal": "must be at most {le}, not {value}",
    "literal_error": "must be {expected}, not {value}",
    "value_error": "{error}",
}


_BOUNDS = {
    "greater_than": "set {key} above {gt}",
    "greater_than_equal": "set {key}={ge} or more",
    "less_than": "set {key} below {lt}",
    "less_than_equal": "set {key}={le} or less",
}


def validate(values: Mapping[str, Any]) -> tuple[Config | None, list[Problem]]:
    """Return the config, or None and all that is wrong with `values`, one problem a key."""
    try:
        # Through JSON, because only there are lists taken for tuples while types stay strict: true is no number.
        return Config.model_validate_json(json.dumps(_without_missing(values)), strict=True), []
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for detail in error.errors(include_url=False):
            key = _key(detail["loc"])
            problems.setdefault(key, _problem(key, _beyond(key, detail) or detail))
        return None, list(problems.values())


def right_part(values: Mapping[str, Any], wrong: Sequence[Problem]) -> Config:
    """Return what is right of `values` that have `wrong` ones: whoever reads one of those gets an AttributeError."""
    part = _class_without({str(problem.key) for problem in wrong}, Config, "")
    return cast(Config, part.model_validate_json(json.dumps(_without_missing(values)), strict=True))


def _class_without(wrong: Collection[str], section: type[Section], prefix: str) -> type[BaseModel]:
    """Return a section's class that has no field for the wrong keys, and passes over their values."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        key, inner = f"{prefix}{name}", keys.section_of(field)
        if key not in wrong:
            fields[name] = (_class_without(wrong, inner, f"{key}.") if inner else field.annotation, field)
    return create_model(section.__name__, __config__=ConfigDict(extra="ignore"), **fields)


def _without_missing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those that are `???`, so that the schema finds them missing."""
    return {
        key: _without_missing(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value != MISSING
    }


def _key(location: tuple[int | str, ...]) -> str:
    """Return the key of a location; pydantic goes on into list items and the members of a union, people do not."""
    leaves = keys.leaves()
    for end in range(1, len(location) + 1):
        key = ".".join(str(part) for part in location[:end])
        if key in leaves:
            return key
    return ".".join(str(part) for part in location)


def _beyond(key: str, detail: Any) -> Any:
    """Return what is wrong with 1e9 once it is written as the whole number that it is, or None."""
    field, value = keys.leaves().get(key), _short(detail["input"])
    if field is None or detail["type"] != "int_type" or type(value) is not int:
        return None
    try:
        create_model("Whole", number=(int, field)).model_validate({"number": value})
    except ValidationError as error:
        return error.errors(include_url=False)[0] | {"loc": detail["loc"]}
    return None


def _problem(key: str, detail: Any) -> Problem:
    """Return one of pydantic's details as a problem."""
    value, context = detail["input"], detail.get("ctx", {})
    expected = str(context.get("expected", "")).replace("'", "")
    if detail["type"] == "literal_error" and ".".join(map(str, detail["loc"])) != key:  # a member of a union
        expected += " or a number"
    facts = {name: _short(fact) for name, fact in {**context, "value": value, "expected": expected}.items()}
    kind = "too_short" if detail["type"] == "missing" and isinstance(detail["loc"][-1], int) else detail["type"]
    message = _SENTENCES.get(kind, "cannot be {value}").format(**facts)
    return not_built(key, value, expected) or Problem(message, key, _hint(key, kind, facts))


def _short(fact: object) -> object:
    """Return 1 for 1.0, as a person writes it; 1e+300 stays."""
    return int(fact) if isinstance(fact, float) and fact.is_integer() and abs(fact) < _SHORT else fact


def _hint(key: str, kind: str, facts: Mapping[str, object]) -> str | None:
    """Return the way out: the nearest name or a bound, else what the key means."""
    field = keys.leaves().get(key)
    if field is None:
        return did_you_mean(key, keys.leaves())
    means = f"{key}: {field.description}" if field.description else None
    example = _example(field, kind, facts)
    if example is not None:
        means = f"for example {key}={example}" + (f": {field.description}" if field.description else "")
    if kind == "missing":
        return f"set {key}=..., {field.description}" if field.description else f"set {key}=..."
    if kind == "int_type" and isinstance(facts["value"], int) and not isinstance(facts["value"], bool):
        return f"write {key}={facts['value']}"  # it was 1e3 or 1.0
    if kind == "literal_error":
        return did_you_mean(str(facts["value"]), _options(facts), means)
    if kind in _BOUNDS:
        bound = _BOUNDS[kind].format(key=key, **facts)
        return f"{bound}: {field.description}" if field.description else bound
    if kind == "string_type":
        return f"quote it, twice: '{key}=\"{facts['value']}\"'"
    return means


def _example(field: FieldInfo, kind: str, facts: Mapping[str, object]) -> object | None:
    """Return a value that the key takes, if its type tells one."""
    if kind == "literal_error":
        return _options(facts)[0]
    if kind == "bool_type":
        return "true"
    if kind == "int_type":
        return next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    return field.examples[0] if field.examples else None


def _options(facts: Mapping[str, object]) -> list[str]:
    """Return the values of a literal: `1, 2 or 3` as three."""
    return str(facts["expected"]).replace(" or ", ", ").split(", ")
