"""Several sources and their mixture: every way to write them. Mistakes in them are in tests/mistakes/mixtures.yaml."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from engine.config.choices import values_of
from engine.config.load import load
from engine.config.resolved import diff, read_resolved, resolved_yaml
from engine.config.schema import Config, Data, Segment, Source
from engine.config.sources import pattern_of, source_configs
from engine.config.validate import validate
from engine.errors import ConfigError
from tests.refusals import refused

WEB, CODE = "data.sources.web.path=web", "data.sources.code.path=code"
TWO = (WEB, CODE)
HALF = "data.mix={web: 1, code: 1}"
LINEAR = {True: "linear", False: "constant"}


def data(*overrides: str) -> Data:
    return load(["data=jsonl", *overrides]).data


def test_without_sources_the_data_is_the_only_source() -> None:
    alone = data("data.path=a.jsonl")
    assert (alone.sources, alone.mix, alone.paths) == ({}, (), ("a.jsonl",))
    assert source_configs(alone) == {"data": alone}


@pytest.mark.parametrize(
    "overrides",
    [
        [WEB, CODE, "data.sources.code.format=parquet"],
        ["data.sources={web: {path: web}, code: {path: code, format: parquet, exhausted: drop}}"],
        ["data.sources.web={path: web}", "data.sources.code={path: no, format: parquet}", CODE],
        ["data.sources.old.path=old", "data.sources={web: {path: web}}", CODE, "data.sources.code.format=parquet"],
    ],
)
def test_sources_are_written_key_by_key_or_as_a_mapping(overrides: list[str]) -> None:
    """A mapping replaces the sources before it. Each source has all keys of data, and no data.path is needed."""
    mixed = data(*overrides, "data.sources.code.exhausted=stop", HALF, "data.tokenizer=t.json")
    assert mixed.sources == {"web": Source(path="web"), "code": Source(path="code", format="parquet", exhausted="stop")}
    web, code = source_configs(mixed).values()
    assert (web.name, web.path, web.format, web.pattern, web.exhausted) == (
        *("web", "web", "jsonl", mixed.pattern, "repeat"),
    )
    assert (code.name, code.path, code.format, code.exhausted) == ("code", "code", "parquet", "stop")
    assert web.tokenizer == code.tokenizer == "t.json"
    assert web.sources == {} and web.mix == ()
    assert source_configs(web) == {"data": web}


def test_a_mixture_may_be_in_a_file_of_a_recipe(tmp_path: Path) -> None:
    values = load(["data=jsonl", *TWO, HALF]).model_dump(mode="json")
    values["data"] |= {"sources": {"web": {"path": ["a", "b"]}, "code": {"path": "c"}}, "mix": {"web": 3, "code": 0.5}}
    config, problems = validate(values)
    assert config is not None, problems
    assert config.data.sources["web"].path == ("a", "b")
    assert config.data.mix == (Segment(weights={"web": 3, "code": 0.5}),)
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert read_resolved(tmp_path / "resolved.yaml") == config


def test_a_mixture_of_weights_is_one_segment_and_replaces_the_one_before() -> None:
    mixed = data(*TWO, "data.mix={web: 3}", "data.mix={code: 2, web: 0}")
    assert mixed.mix == (Segment(weights={"code": 2, "web": 0}),)
    assert data("data.path=a", HALF, "data.mix=null").mix == ()
    assert data(*TWO, "data.sources=null", "data.path=a").sources == {}


def test_segments_start_at_steps_or_tokens() -> None:
    later = "{tokens: 4K, weights: {code: 1}, schedule: cosine}"
    mixed = data(*TWO, f"data.mix=[{{tokens: 0, weights: {{web: 1}}}}, {later}]")
    assert [(segment.start, segment.schedule) for segment in mixed.mix] == [(0, "constant"), (4096, "cosine")]
    mixed = data(*TWO, "data.mix=[{weights: {web: 1}}, {step: 1, weights: {code: 1}}, {step: 2, weights: {web: 1}}]")
    assert [segment.start for segment in mixed.mix] == [0, 1, 2]


@pytest.mark.parametrize("was", [True, False])
def test_segments_of_version_0_1_0_are_read(was: bool, tmp_path: Path) -> None:
    """It wrote `linear: true` where `schedule: linear` is written now: in saved configs, files and commands."""
    new = mixed(
        f"data.mix=[{{weights: {{web: 1, code: 1}}}}, {{step: 3, weights: {{web: 1}}, schedule: {LINEAR[was]}}}]"
    )
    values = yaml.safe_load(resolved_yaml(new))
    assert "linear" not in values["data"]["mix"][1]
    for segment, linear in zip(values["data"]["mix"], (False, was), strict=True):
        segment["linear"] = linear
        del segment["schedule"]
    del values["format"]
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values))
    assert read_resolved(tmp_path / "resolved.yaml") == new
    own = {"defaults": ["quickstart", {"override /data": "jsonl"}], "data": {"mix": values["data"]["mix"]}}
    own["data"] |= {"sources": {"web": {"path": "web"}, "code": {"path": "code"}}}  # type: ignore[operator]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    assert load([f"recipe={tmp_path / 'own.yaml'}"]).data.mix == new.data.mix
    old = f"data.mix=[{{weights: {{web: 1, code: 1}}}}, {{step: 3, weights: {{web: 1}}, linear: {str(was).lower()}}}]"
    assert mixed(old) == new


def test_one_source_needs_no_mix_and_a_source_may_share_the_path() -> None:
    assert data(WEB).mix == ()
    shared = data(
        "data.path=all", "data.sources.py.pattern='*.py'", "data.sources.c.pattern='*.c'", "data.mix={py: 1, c: 1}"
    )
    assert {name: (one.path, one.pattern) for name, one in source_configs(shared).items()} == {
        "py": ("all", "*.py"),
        "c": ("all", "*.c"),
    }


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("[a]", ("a",)),
        ("[a/*.jsonl, b c.jsonl,d=e]", ("a/*.jsonl", "b c.jsonl", "d=e")),
        ("['a,b', c]", ("a,b", "c")),
        ("[~/a,b]", (str(Path("~/a").expanduser()), "b")),
        ("[ab", ("[ab",)),
        ("a]", ("a]",)),
        ("'[ab]'", ("[ab]",)),
    ],
)
def test_a_path_may_be_a_list(text: str, paths: tuple[str, ...]) -> None:
    assert data(f"data.path={text}").paths == paths
    mixed = data(f"data.sources.web.path={text}")
    assert source_configs(mixed)["web"].paths == paths
    assert mixed.paths == ()


def test_only_documents_may_have_lists_of_paths() -> None:
    assert load(["run.out=[a,b]"]).run.out == "[a,b]"


def test_a_mistake_in_a_source_is_reported_beside_others() -> None:
    keys = ("run.steps", "data.sources.web.pth", "data.sources.code.path", "model.top_k")
    with refused(ConfigError, *keys, hint=False):
        data("data.sources={web: {pth: a}, code: {path: 3}}", "model.top_k=9", "run.steps=0")


def mixed(*overrides: str) -> Config:
    return load(["data=jsonl", *TWO, *overrides])


def test_what_changed_in_a_mixture_is_named() -> None:
    old = mixed(HALF)
    assert diff(old, mixed(HALF, f"data.sources.web.path={os.path.realpath('web')}")) == []
    lines = diff(old, mixed("data.sources.old.path=[a]", "data.mix={web: 1, code: 1, old: 0}"))
    assert "data.sources.old.path: not set -> ['a']" in lines
    assert [line.partition(":")[0] for line in lines] == ["data.mix", "data.sources.old.path"]
    (line,) = diff(old, mixed("data.mix={web: 1, code: 2}"))
    assert line.startswith("data.mix: ")


def test_the_place_names_the_documents_as_a_user_wrote_them() -> None:
    assert data("data.path=a").place == "data.path=a"
    assert data("data.path=[a, b]").place == "data.path=[a,b]"
    assert data(*TWO, HALF).place == "data.sources=web, code"


def test_a_source_of_another_format_has_its_pattern() -> None:
    for name in values_of(Data.model_fields["format"]):
        pattern = pattern_of(name)
        assert load([f"data={name}", "data.path=a"]).data.pattern == pattern
        other = "jsonl" if name != "jsonl" else "folder"
        one = f"data.sources={{a: {{path: a, format: {name}}}}}"
        assert source_configs(load([f"data={other}", one, "data.mix={a: 1}"]).data)["a"].pattern == pattern
    own = "data.sources={a: {path: a, format: folder, pattern: '*.md'}}"
    assert source_configs(load(["data=jsonl", own, "data.mix={a: 1}"]).data)["a"].pattern == "*.md"


def test_a_file_may_have_weights_alone_and_its_mistakes_have_a_line(tmp_path: Path) -> None:
    """Hydra could not merge the weights with the empty list of the recipe below it."""
    own = tmp_path / "own.yaml"

    def written(mix: str, more: str = "") -> Config:
        own.write_text(f"defaults: [quickstart]\ndata:\n  sources: {{web: {{path: a}}}}\n  mix: {mix}\n{more}")
        return load([f"recipe={own}"])

    assert written("{web: 3}").data.mix == written("[{weights: {web: 3}}]").data.mix
    for mix in ("{web: -1}", "[{weights: {web: -1}}]", "[{weights: {web: 1}, lengths: 2K}]", "3"):
        with refused(ConfigError, f"{own}:4") as problems:
            written(mix)
        assert "{NAME: WEIGHT}" not in problems[0].message or mix == "3"
    for more in ("  transform: {drop: {shorter: 64}}", "  ray: {loaders: {a: 1}}"):
        with refused(ConfigError, f"{own}:5"):
            written("{web: 1}", more)
    own.write_text("defaults: [quickstart]\ndata:\n  sources: [a, b]\n")
    with refused(ConfigError, f"{own}:3"):
        load([f"recipe={own}"])
