"""Several sources and their mixture: every way to write them, and every mistake in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config.choices import values_of
from engine.config.load import load
from engine.config.resolved import diff, read_resolved, resolved_yaml
from engine.config.schema import Config, Data, Segment, Source
from engine.config.sources import pattern_of, source_configs
from engine.config.validate import validate
from engine.errors import ConfigError

WEB, CODE = "data.sources.web.path=web", "data.sources.code.path=code"
TWO = (WEB, CODE)
HALF = "data.mix={web: 1, code: 1}"


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
    later = "{tokens: 4K, weights: {code: 1}, linear: true}"
    mixed = data(*TWO, f"data.mix=[{{tokens: 0, weights: {{web: 1}}}}, {later}]")
    assert [(segment.start, segment.linear) for segment in mixed.mix] == [(0, False), (4096, True)]
    mixed = data(*TWO, "data.mix=[{weights: {web: 1}}, {step: 1, weights: {code: 1}}, {step: 2, weights: {web: 1}}]")
    assert [segment.start for segment in mixed.mix] == [0, 1, 2]


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


MISTAKES = [
    (["data.path=[]"], "data.path", "is an empty list", "set data.path"),
    (["data=tokens", "data.path=[a,b]"], "data.path", "a token file is one PREFIX, not 2", "data.sources.NAME.path"),
    (["data.sources.web.path=[a,b]", "data.sources.web.format=tokens"], "data.sources.web.path", "not 2", "as sources"),
    (["data.sources.web.field=x"], "data.sources.web.path", "is not set", "data.sources.web.path=..."),
    (["data.path=a", "data.sources.web.field=x"], "data.sources.web.path", "is not set", "data.sources.web.path=..."),
    (["data.sources.web.path=[]"], "data.sources.web.path", "is not set", "a glob"),
    (["data.path=a", "data.sources.web.pth=a"], "data.sources.web.pth", "unknown key", "did you mean path?"),
    (["data.sources={web: {pth: a}}"], "data.sources.web.pth", "unknown key", "did you mean path?"),
    (
        ["data.path=a", "data.sources.web.qqq=a"],
        "data.sources.web.qqq",
        "unknown key",
        "path, format, pattern, separator, field, encoding",
    ),
    (["data.path=a", "data.sources.web.path.x=a"], "data.sources.web.path.x", "unknown key", "path"),
    (["data.path=a", "data.sources.2w.path=a"], "data.sources.2w", "letters, digits, - and _", "data.sources.web.path"),
    (["data.sources={2w: {path: a}}"], "data.sources.2w", "letters, digits, - and _", "web.jsonl"),
    (["data.path=a", f"data.sources.{'x' * 33}.path=a"], f"data.sources.{'x' * 33}", "at most 32 letters", ""),
    (["data.sources.web=3"], "data.sources.web", "must have keys, not 3", "{path: web.jsonl}"),
    (["data.sources=3"], "data.sources", "must have keys, not 3", "{path: web.jsonl}"),
    (
        [WEB, "data.sources.web.format=json"],
        "data.sources.web.format",
        "must be folder, jsonl, parquet, arrow or tokens, not json",
        "did you mean jsonl?",
    ),
    ([WEB, "data.sources.web.exhausted=halt"], "data.sources.web.exhausted", "must be repeat, drop or stop", "repeat"),
    (["data.path=a", "data.mix={web: 3}"], "data.mix", "needs data.sources", "data.sources.web.path=..."),
    ([*TWO], "data.mix", "is not set", "'data.mix={web: 1, code: 1}'"),
    ([*TWO, "data.mix={web: 1, cod: 1}"], "data.mix", "unknown source: cod", "did you mean code?"),
    ([*TWO, "data.mix={web: 1, code: 1, qqq: 0}"], "data.mix", "unknown source: qqq", "data.sources has web, code"),
    ([*TWO, "data.mix={web: 1}"], "data.mix", "has no weight for code", "add code: 1, or 0"),
    ([*TWO, "data.mix={web: 0, code: 0}"], "data.mix", "segment 1 has no weight above 0", "above 0"),
    ([*TWO, "data.mix={web: -1, code: 0}"], "data.mix.0.weights.web", "must be at least 0, not -1", "data.mix={web"),
    ([*TWO, "data.mix={web: x, code: 0}"], "data.mix.0.weights.web", "must be a number, not x", "data.mix={web"),
    ([*TWO, "data.mix={web: true, code: 0}"], "data.mix.0.weights.web", "must be a number, not true", "data.mix={web"),
    (
        [*TWO, "data.mix=3"],
        "data.mix",
        "must be a list or {NAME: WEIGHT}, not 3",
        "for example 'data.mix={web: 3, code: 1}'",
    ),
    ([*TWO, HALF, "data.mix.web=3"], "data.mix", "one by one", "'data.mix={web: 3, code: 1}'"),
    ([*TWO, "data.mix=[{wghts: {web: 1}, weights: {web: 1, code: 1}}]"], "data.mix.0.wghts", "unknown", "weights?"),
    ([*TWO, "data.mix=[{step: 0}]"], "data.mix.0.weights", "is not set", "data.mix={web"),
    (
        [*TWO, "data.mix=[{step: 3, weights: {web: 1, code: 1}}]"],
        "data.mix",
        "segment 1 is at 3, not at 0",
        "from the start",
    ),
    ([*TWO, "data.mix=[{linear: true, weights: {web: 1, code: 1}}]"], "data.mix", "no segment before it", "first"),
    (
        [*TWO, "data.mix=[{weights: {web: 1}}, {weights: {code: 1}}]"],
        "data.mix",
        "segment 2 has neither",
        "{step: 1000",
    ),
    (
        [*TWO, "data.mix=[{weights: {web: 1}}, {step: 1, tokens: 4K, weights: {code: 1}}]"],
        "data.mix",
        "segment 2 has both step and tokens",
        "remove one",
    ),
    (
        [*TWO, "data.mix=[{weights: {web: 1}}, {step: 9, weights: {code: 1}}, {tokens: 10K, weights: {code: 1}}]"],
        "data.mix",
        "segment 3 is at tokens, others are not",
        "use step in all segments",
    ),
    (
        [*TWO, "data.mix=[{weights: {web: 1}}, {step: 9, weights: {code: 1}}, {step: 9, weights: {web: 1}}]"],
        "data.mix",
        "segment 3 starts at 9, not after 9",
        "in the order",
    ),
    ([*TWO, "data.mix=[{weights: {web: 1}}, {step: 0, weights: {code: 1}}]"], "data.mix", "not after 0", "order"),
    (
        [*TWO, "data.mix=[{weights: {web: 1}}, {step: 1.5, weights: {code: 1}}]"],
        "data.mix.1.step",
        "whole number",
        "mix",
    ),
    (
        [*TWO, "data.mix=[{weights: {web: 1}}, {tokens: 4X, weights: {code: 1}}]"],
        "data.mix.1.tokens",
        "not a length",
        "",
    ),
    (["data.path=a", "data.exhausted=x"], "data.exhausted", "must be repeat, drop or stop, not x", "repeat"),
    (["data.path=a", "data.long=cut"], "data.long", "must be step or split, not cut", "step"),
    (["data.path=a", "data.loaders=0"], "data.loaders", "must be at least 1", "data.loaders=1 or more"),
    (["data.path=a", "data.spool=0"], "data.spool", "must be more than 0", "data.spool above 0"),
    (["data.path=a", "data.spool=many"], "data.spool", "is not a size", "data.spool=80GiB"),
    (["data.path=a", "data.quarantine_after=-1"], "data.quarantine_after", "must be at least 0", "or more"),
]


@pytest.mark.parametrize(("overrides", "key", "message", "hint"), MISTAKES)
def test_mistakes(overrides: list[str], key: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        data(*overrides)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert message in problem.message
    assert hint in (problem.hint or "")


def test_a_mistake_in_a_source_is_reported_beside_others() -> None:
    with pytest.raises(ConfigError) as caught:
        data("data.sources={web: {pth: a}, code: {path: 3}}", "model.top_k=9", "run.steps=0")
    assert {problem.key for problem in caught.value.problems} == {
        *("data.sources.web.pth", "data.sources.code.path", "model.top_k", "run.steps"),
    }


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
