from __future__ import annotations

import pytest

from engine.config import keys, tree
from engine.config.explain.describe import describe, json_schema, overview
from engine.config.load import load
from engine.config.validate import validate


def test_every_key_has_one_description() -> None:
    """Sections and the overview together have each key of the schema once, with its default in the quickstart."""
    found = [key for name in keys.sections() for key in describe(name).keys] + overview().keys
    assert sorted(key.key for key in found) == sorted(keys.leaves())
    values = load([]).model_dump(mode="json")
    for key in found:
        value = values
        for part in key.key.split("."):
            value = value[part]
        assert key.default == value
        assert key.type and (key.allowed is None or value in key.allowed or key.key == "offload.ratio")


@pytest.mark.parametrize(
    ("name", "type_", "unit", "bounds", "default"),
    [
        ("context", "whole number", "tokens", ["at least 1", "at most 4G"], "2K"),
        ("data.spool", "whole number", "bytes", ["more than 0"], "64GiB"),
        ("mlp_tile", "whole number", "tokens", ["at least 0"], "0"),
        ("optimizer.name", "adamw or sgd", None, [], "adamw"),
        ("parallel.ep", "whole number", None, ["at least 1", "at most 65,536"], "1"),
        ("offload.ratio", "auto or number", None, [], "auto"),
        ("data.path", "path or list", None, [], "stdlib-lines"),
        ("run.weights", "path or null", None, [], "null"),
        ("data.sources", "mapping", None, [], "{}"),
        ("model.tied", "true or false", None, [], "false"),
        ("run.steps", "whole number", None, ["at least 1", "at most 99,999,999"], "600"),
    ],
)
def test_a_key(name: str, type_: str, unit: str | None, bounds: list[str], default: str) -> None:
    (key,) = describe(name).keys
    assert (key.key, key.type, key.unit, key.bounds, key.default_text) == (name, type_, unit, bounds, default)


def test_a_length_that_may_be_null() -> None:
    (key,) = describe("model.rope.original_max_position_embeddings").keys
    assert (key.type, key.unit, key.default_text) == ("whole number or null", "tokens", "null")
    assert key.bounds == ["at least 1", "at most 4G"]


def test_bounds_are_those_that_are_enforced() -> None:
    """A value just outside a bound is refused, and the bound itself is not."""
    values = load([]).model_dump(mode="json")
    (key,) = describe("planner.max_peers").keys
    assert key.bounds == ["at least 1", f"at most {2**20:,}"]
    for peers, good in ((0, False), (1, True), (2**20, True), (2**20 + 1, False)):
        config, _ = validate(values | {"planner": values["planner"] | {"max_peers": peers}})
        assert (config is not None) == good


def test_a_group() -> None:
    found = describe("optimizer")
    assert list(found.options) == tree.groups()["optimizer"]
    assert found.options["sgd"].startswith("SGD with momentum")
    assert found.about == "The update rule, its learning rate and its schedule."
    assert {key.key for key in found.keys} == {key for key in keys.leaves() if key.startswith("optimizer.")}
    assert [*describe("model").inner, *describe("data").inner] == ["model.rope", "data.ray"]
    assert describe("data.sources.web.path").name == "data.sources"
    assert describe("memory").keys == [] and "zero3" in describe("memory").options
    assert {*tree.groups(), *keys.sections()} - {"model.rope", "data.ray", "recipe"} == set(overview().inner)


def test_the_json_schema_has_every_key_and_only_standard_bounds() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/") and schema["additionalProperties"] is False
    assert set(schema["required"]) == set(load([]).model_dump())
    text = str(schema)
    assert all(f"'{bound}':" not in text for bound in ("ge", "gt", "le", "lt"))
    tokens = schema["$defs"]["Segment"]["properties"]["tokens"]["anyOf"][0]
    assert (tokens["minimum"], tokens["exclusiveMaximum"]) == (0, 2**63)
