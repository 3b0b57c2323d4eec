"""Overrides are checked before Hydra sees them. Their mistakes are in tests/mistakes/keys.yaml."""

from __future__ import annotations

import shlex
from itertools import pairwise

import pytest

from engine.config.load import load
from engine.config.overrides import check
from engine.errors import ConfigError
from tests.refusals import refused


@pytest.mark.parametrize(
    "text",
    [
        "context=4K",
        "recipe=quickstart",
        "optimizer.betas=[0.9,0.99]",
        'data.path="a=b, c"',
        "cluster.hostfile=null",
        "cluster.calibration=null",
        "run.weights=null",
        "planner=adaptive",
        "lengths=byted",
        "lengths=file",
        "cluster=h200x8",
        "offload.ratio=auto",
        "run.seed=-1",
    ],
)
def test_what_is_well_spelt_passes(text: str) -> None:
    assert check([text]) == ([text], [])


@pytest.mark.parametrize("path", ["a b", "a=b, c", "[x", 'say "hi"', "back\\slash\\", "ü", "a'b"])
def test_a_path_is_taken_as_it_is(path: str) -> None:
    assert load([f"run.out={path}", f"data.path={path}"]).run.out == path


@pytest.mark.parametrize("text", ["slurm.extra=[--mem=0]", "data.mix={a: 1", "data.pattern=a\"b'c", "context=1,2"])
def test_what_a_hint_says_to_write_can_be_parsed(text: str) -> None:
    """As a shell passes it on."""
    _, (problem,) = check([text])
    for word in shlex.split(str(problem.hint)):
        assert "=" not in word or check([word])[1] == []


def test_a_path_may_start_at_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave the tilde of KEY=~/x alone."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(["data.path=~/texts"]).data.path == "/home/someone/texts"


def test_sources_are_new_keys_and_a_mixture_replaces_the_one_before() -> None:
    assert check(["data.sources.web.path=a,b"]) == (['++data.sources.web.path="a,b"'], [])
    assert check(["data.mix={web: 3}"]) == (["data.mix=null", "++data.mix={web: 3}"], [])
    assert check(["data.mix=null"]) == (["data.mix=null"], [])


def test_good_ones_are_kept_beside_bad_ones() -> None:
    good, problems = check(["run.steps=3", "run.stops=3", "context=8K", "+x=1"])
    assert good == ["run.steps=3", "context=8K"]
    assert len(problems) == 2


def test_what_comes_from_a_hostfile_is_not_set_beside_it() -> None:
    texts = ["cluster.hostfile=hosts", "cluster.nodes=2", "cluster.ranks_per_node=4"]
    assert [problem.key for problem in check(texts)[1]] == ["cluster.nodes", "cluster.ranks_per_node"]
    assert check(["cluster.hostfile=null", *texts[1:]])[1] == []


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        *(f"context={DIGITS}", f"context={DIGITS}K", f"optimizer.lr={DIGITS}", f"run.steps=-{DIGITS}"),
        *("run.trackers=" + "[" * 3000, "run.trackers=" + "[" * 300 + "]" * 300, "data.mix={a: " + "[" * 300),
        *("run.out=${oc.create:'{a: &a [x, x], b: [*a, *a]}'}", "context=${oc.decode:'3'}"),
    ],
    ids=lambda text: text[:16],
)
def test_what_hydra_would_fail_on_is_refused(text: str) -> None:
    with refused(ConfigError) as problems:
        load([text])
    assert problems[0].key


def test_references_that_multiply_a_text_are_refused() -> None:
    """100 references to a text of 100 references, four times: 10^9 characters."""
    keys = ("data.path", "run.weights", "run.notice_file", "data.cache", "run.out")
    chain = [f"{key}={f'${{{before}}}' * 100}" for before, key in pairwise(keys)]
    with refused(ConfigError) as problems:
        load(["data=folder", "data.path=0123456789", *chain])
    assert problems[0].key in keys
    config = load(["data=folder", "data.path=0123456789", "run.out=${data.path}/${data.path}"])
    assert config.run.out == "0123456789/0123456789"
