"""Validates plain values into the typed Config and explains every error in plain English."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from engine.config import keys, versions
from engine.config.explain.spelling import did_you_mean
from engine.config.schema import ADDRESS, DNS_LABEL, DNS_NAME, IMAGE, SOURCE_NAME, WORD, Config, Section
from engine.config.units import format_of
from engine.errors import Problem

MISSING = "???"
_MAX_PLAIN = 1e15  # larger floats are written with an exponent
_SHORT_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT])", re.IGNORECASE)

NAME_RULE = "must be at most 32 ASCII letters, digits, - and _, and begin with a letter or _"

NOT_SET = "is not set"

# pydantic's error types as sentences; other types get "cannot be {value}"
_SENTENCES = {
    "missing": NOT_SET,
    "extra_forbidden": "unknown key",
    "int_type": "must be a whole number, not {value}",
    "float_type": "must be a number, not {value}",
    "string_type": "must be text, not {value}",
    "bool_type": "must be true or false, not {value}",
    "finite_number": "must be a finite number, not {value}",
    "tuple_type": "must be a list, not {value}",
    "too_short": "has too few values: {value}",
    "too_long": "has too many values: {value}",
    "string_too_short": "must not be empty",
    "greater_than": "must be more than {gt}, not {value}",
    "greater_than_equal": "must be at least {ge}, not {value}",
    "less_than": "must be less than {lt}, not {value}",
    "less_than_equal": "must be at most {le}, not {value}",
    "literal_error": "must be {expected}, not {value}",
    "model_type": "must have keys, not {value}",
    "dict_type": "must have keys, not {value}",
    "value_error": "{error}",
}


# What a pattern allows; with other patterns a value "cannot be {value}"
_PATTERNS = {
    SOURCE_NAME: NAME_RULE,
    WORD: "may have letters, digits and _ . , : @ + - only, not '{value}'",
    IMAGE: "may have letters, digits and . _ / : @ - only, not '{value}'",
    DNS_NAME: "must be lower-case letters, digits, - and ., and begin and end with a letter or digit, not '{value}'",
    ADDRESS: "must be HOST:PORT, not '{value}'",
    DNS_LABEL: "must be at most 63 lower-case letters, digits and -, not '{value}'",
}


_BOUNDS = {
    "greater_than": "set {key} above {gt}",
    "greater_than_equal": "set {key}={ge} or more",
    "less_than": "set {key} below {lt}",
    "less_than_equal": "set {key}={le} or less",
}


def validate(values: Mapping[str, Any], typed: Mapping[str, str] = {}) -> tuple[Config | None, list[Problem]]:
    """Validate a nested dict of plain values. Returns the config and [], or None and one problem per wrong key.

    `typed` has the texts of values as the user wrote them, by key, such as 1e3 for 1000.0; problems quote these.
    """
    try:
        # Through JSON: only there does pydantic accept lists as tuples and stay strict otherwise (true is not 1).
        return Config.model_validate_json(json.dumps(_given(values)), strict=True), []
    except ValidationError as error:
        leaves = keys.leaves()
        problems: dict[str, Problem] = {}
        for detail in error.errors(include_url=False):
            # The location may extend below the key: to an item of a list or a member of a union.
            location = [str(part) for part in detail["loc"]]
            above = [".".join(location[:end]) for end in range(1, len(location) + 1)]
            key = next((name for name in above if name in leaves), ".".join(location))
            place = _place(key, location)
            problems.setdefault(place, _problem(key, place, detail, typed))
        return None, list(problems.values())


def right_part(values: Mapping[str, Any], wrong: Sequence[Problem]) -> Config:
    """Build a config from the valid keys only: reading a wrong key raises AttributeError.

    `wrong` are the problems that `validate` returned for `values`. `checks.check_part` uses this to run the rules that
    read valid keys only.
    """
    wrong_keys: Collection[str] = {keys.leaf_of(str(problem.key)) for problem in wrong}

    def without_wrong(section: type[Section], prefix: str) -> type[BaseModel]:
        fields: dict[str, Any] = {}
        for name, field in section.model_fields.items():
            key, inner = f"{prefix}{name}", keys.section_of(field)
            if key not in wrong_keys:
                fields[name] = (without_wrong(inner, f"{key}.") if inner else field.annotation, field)
        return create_model(section.__name__, __config__=ConfigDict(extra="ignore"), **fields)

    part = without_wrong(Config, "")
    return cast(Config, part.model_validate_json(json.dumps(_given(values)), strict=True))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop values that are `???`, and write short forms of run.trackers, data.sources and data.mix in full.

    One tracker is a list of it. Weights alone are one segment, null is none. `data.path` is an empty list if only
    sources have paths. Segments of an earlier version become those of this one.
    """
    given = _without_missing(values)
    run = given.get("run")
    if isinstance(run, dict) and isinstance(run.get("trackers"), str):
        given["run"] = {**run, "trackers": [run["trackers"]]}
    data = given.get("data")
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if value is not None or key not in ("sources", "mix")}
        if isinstance(data.get("mix"), Mapping):
            data["mix"] = [{"weights": data["mix"]}]
        if isinstance(data.get("mix"), list):
            data["mix"] = [versions.segment(one) for one in data["mix"]]
        own: dict[str, Any] = {"path": []} if data.get("sources") else {}
        given["data"] = {"sources": {}, "mix": [], **own, **data}
    return given


def _without_missing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop values that are `???`, so that the schema reports them as missing."""
    return {
        key: _without_missing(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value != MISSING
    }


def _place(key: str, location: Sequence[str]) -> str:
    """Return the place of an error: below data.sources and data.mix that of the value, else the key itself."""
    if key not in keys.NESTED:
        return key
    deepest = 4 if key == keys.SOURCES else 5  # below are items of lists and members of unions
    return ".".join(part for part in location[:deepest] if part != "[key]")


def _problem(key: str, place: str, detail: Any, typed: Mapping[str, str]) -> Problem:
    """Turn one of pydantic's errors into a Problem. `place` is below `key`, or `key` itself; see `validate`."""
    field = keys.field_at(place)
    original = detail["input"]
    whole = _whole(original)
    if field is not None and detail["type"] == "int_type" and whole is not None:
        # 1e9 is rejected as a float; if the whole number is out of bounds, that is the error to report.
        try:
            create_model("Whole", number=(int, field)).model_validate({"number": whole})
        except ValidationError as error:
            detail = error.errors(include_url=False)[0] | {"loc": detail["loc"]}
    # The message shows a value as the user typed it. pydantic's is parsed: it would show 1e-4 as 0.0001.
    value, context = detail["input"], detail.get("ctx", {})
    expected = str(context.get("expected", "")).replace("'", "")
    in_list = isinstance(detail["loc"][-1], int)
    if detail["type"] == "literal_error" and ".".join(map(str, detail["loc"])) != place and not in_list:  # in a union
        expected += f" or a list such as {field.examples[0]}" if field and field.examples else " or a number"
    facts = {name: _shown(fact) for name, fact in {**context, "value": value, "expected": expected}.items()}
    if isinstance(original, str):
        facts["value"] = original
    elif isinstance(original, float) and _is_number(typed.get(place, ""), original):
        facts["value"] = typed[place]
    if field is not None and detail["type"] in _BOUNDS:
        facts = {name: format_of(field, fact) if type(fact) is int else fact for name, fact in facts.items()}
    kind = "too_short" if detail["type"] == "missing" and isinstance(detail["loc"][-1], int) else detail["type"]
    sentence = _SENTENCES.get(kind, "cannot be {value}")
    if kind == "string_pattern_mismatch":
        sentence = _PATTERNS.get(context["pattern"], "cannot be '{value}'")
    elif kind == "tuple_type" and place == keys.MIX:
        sentence = "must be a list or {{NAME: WEIGHT}}, not {value}"
    elif key == keys.MIX and kind in ("tuple_type", "too_short", "too_long"):
        sentence = "must be [LEAST, MOST], not {value}"
    message = sentence.format(**facts)
    # The most specific hint: a name that was meant, an example, or a value within the bounds.
    if kind == "extra_forbidden" and key in keys.NESTED:
        names = list(keys.NESTED[key].model_fields)
        hint = did_you_mean(place.rpartition(".")[2], names, f"keys: {', '.join(names)}")
    elif field is None:
        hint = did_you_mean(key, keys.leaves())
    elif detail["type"] in _BOUNDS and in_list and key not in keys.NESTED and field.examples:  # of an item
        hint = f"for example {keys.in_shell(f'{key}={field.examples[0]}')}: {field.description}"
    elif key == keys.MIX:  # overrides cannot set its parts
        inner = place.split(".")[3:]  # of a segment: data.mix.0.weights
        meant = f"for example {inner[0]}: {field.examples[0]}" if inner and field.examples else None
        hint = meant or f"for example {keys.example(key)}"
        if kind == "literal_error":
            hint = did_you_mean(str(facts["value"]), str(facts["expected"]).replace(" or ", ", ").split(", "), hint)
    else:
        hint = _hint(key if field is keys.leaves().get(key) else place, field, kind, facts, whole)
    return Problem(message, place, hint)


def _shown(fact: object) -> object:
    """Turn a value into what a user writes for it: null, true or false instead of Python's names."""
    return json.dumps(fact) if fact is None or isinstance(fact, bool) else _short(fact)


def _short(fact: object) -> object:
    """Turn a whole float into an int, so that a message shows 1 for 1.0; very large floats such as 1e+300 stay."""
    return int(fact) if isinstance(fact, float) and fact.is_integer() and abs(fact) < _MAX_PLAIN else fact


def _whole(value: object) -> int | None:
    """Return the whole number that is meant by 1e3, 1000.0 or `100k`; None for other values."""
    match = _SHORT_NUMBER.fullmatch(value) if isinstance(value, str) else None
    if match:
        number = Fraction(match[1]) * 1000 ** (1 + "KMGT".index(match[2].upper()))
        return int(number) if number.denominator == 1 else None
    short = _short(value)
    return short if type(short) is int else None


def _is_number(text: str, number: float) -> bool:
    """Return whether a text is another way to write a number, as 1e3 is one for 1000.0."""
    try:
        return float(text) == number
    except ValueError:
        return False


def _hint(key: str, field: FieldInfo, kind: str, facts: Mapping[str, object], whole: int | None) -> str | None:
    """Build the hint for a wrong value: the nearest option, a bound or an example, with the key's description."""
    options = str(facts["expected"]).replace(" or ", ", ").split(", ")  # of a literal
    example: object | None = None
    if kind == "literal_error":
        example = options[0]
    elif kind == "bool_type" and not keys.is_list(key):
        example = "true"
    elif kind == "int_type":
        example = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    elif field.examples:
        example = field.examples[0]

    about = f": {field.description}" if field.description else ""
    means = f"{key}{about}" if about else None
    if example is not None:
        means = f"for example {keys.in_shell(f'{key}={example}')}{about}"
    if kind == "missing":
        return f"set {key}=...{about}"
    if kind == "int_type" and whole is not None:
        short = _SHORT_NUMBER.fullmatch(str(facts["value"]))
        return f"write {key}={whole}" + ("; this key accepts no K, M or G" if short else "")
    if kind == "literal_error":
        return did_you_mean(str(facts["value"]), options, means)
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(key=key, **facts) + about
    if kind == "string_type" and facts["value"] != "null" and not keys.is_list(key):
        return f"quote it twice: '{key}=\"{facts['value']}\"'"
    return means
