"""Every mistake in an override has its place and its way out, before Hydra sees it."""

from __future__ import annotations

import shlex
from itertools import pairwise

import pytest

from engine.config.load import load
from engine.config.overrides import check
from engine.errors import ConfigError

MISTAKES = [
    ("+typo=1", "+typo=1", "a leading + is not supported", "write KEY=VALUE"),
    ("~run.steps", "~run.steps", "a leading ~ is not supported", "write KEY=VALUE"),
    ("run.steps", "run.steps", "is not KEY=VALUE", "for example"),
    ("quickstart", "quickstart", "is not KEY=VALUE", "write recipe=quickstart"),
    ("mine.yaml", "mine.yaml", "is not KEY=VALUE", "write recipe=mine.yaml"),
    ("=3", "=3", "is not KEY=VALUE", "for example"),
    ("run.steps=", "run.steps=", "has no value", "run.steps=VALUE"),
    ("run.steps=1,2", "run.steps=1,2", "several values", "give one value"),
    ("data.pattern=1,2", "data.pattern=1,2", "several values", "quote it twice: 'data.pattern=\"1,2\"'"),
    (
        "run.trackers=tensorboard,wandb",
        "run.trackers=tensorboard,wandb",
        "without brackets",
        "write run.trackers=[tensorboard,wandb]",
    ),
    ("cluster.speeds=100,100", "cluster.speeds=100,100", "without brackets", "write cluster.speeds=[100,100]"),
    ("+run.stepz=1", "+run.stepz=1", "a leading + is not supported", "did you mean run.steps?"),
    ("+planner=static", "+planner=static", "a leading + is not supported", "write KEY=VALUE"),
    ("batch_tokens=1,000,000", "batch_tokens=1,000,000", "has commas", "write batch_tokens=1000000"),
    ("run.steps=range(1,3)", "run.steps=range(1,3)", "several values", "give one value"),
    ("data.pattern=a=b", "data.pattern=a=b", "cannot be parsed", "'data.pattern=\"a=b\"'"),
    ("data.pattern=[a", "data.pattern=[a", "cannot be parsed", "quote it twice"),
    ("data.sources.web.pattern=[a", "data.sources.web.pattern=[a", "cannot be parsed", "quote it twice"),
    ("data.mix={a: 1", "data.mix={a: 1", "lacks } at its end", "write 'data.mix={a: 1}'"),
    ("data.mix=[{weights: {a: 1", "data.mix=[{weights: {a: 1", "lacks }}] at its end", "{a: 1}}]'"),
    ("data.mix={a: 1, b", "data.mix={a: 1, b", "lacks } at its end", "`bytescale config help data.mix`"),
    (
        "data.sources.web={path: 'a",
        "data.sources.web={path: 'a",
        "lacks '} at its end",
        "write \"data.sources.web={path: 'a'}\"",
    ),
    ("optimizer.betas=[0.9,0.95", "optimizer.betas=[0.9,0.95", "lacks ]", "write optimizer.betas=[0.9,0.95]"),
    ("run.steps=3=4", "run.steps=3=4", "cannot be parsed", "`bytescale config help run.steps` shows what it takes"),
    ("run.stepz=3=4", "run.stepz", "unknown key", "did you mean run.steps?"),
    ("planner=static=x", "planner=static=x", "cannot be parsed", "`bytescale config help planner`"),
    ("slurm.extra=[--mem=0]", "slurm.extra=[--mem=0]", "cannot be parsed", "'slurm.extra=[\"--mem=0\"]'"),
    ("slurm.extra=--mem=0", "slurm.extra=--mem=0", "cannot be parsed", "'slurm.extra=[\"--mem=0\"]'"),
    ('slurm.extra=["-a",--b=1', 'slurm.extra=["-a",--b=1', "cannot be parsed", '\'slurm.extra=["-a","--b=1"]\''),
    ("recipe=quikstart", "recipe", "unknown name: quikstart", "did you mean quickstart?"),
    ("model=tinny", "model", "unknown name: tinny", "did you mean tiny?"),
    ("cluster=xyz", "cluster", "unknown name: xyz", "choose one of a100x8, b200x8, gb200x4, h100x8, h200x8, local"),
    ("planner=[static,naive]", "planner", "is a group", "adaptive, balanced, naive, static"),
    ("planner=null", "planner", "unknown name: None", "adaptive, balanced, naive, static"),
    ("planner=adaptiv", "planner", "unknown name: adaptiv", "did you mean adaptive?"),
    ("lengths=bytes", "lengths", "unknown name: bytes", "did you mean byted?"),
    ("lengths=wiki", "lengths", "unknown name: wiki", "byted, data, file, github, lognormal"),
    (
        "cluster=h800x8",
        "cluster",
        "unknown name: h800x8",
        "did you mean h100x8 or h200x8? choose one of a100x8, b200x8, gb200x4, h100x8, h200x8, local",
    ),
    ("memory=zero2", "memory", "unknown name: zero2", "choose one of zero1, zero1_recompute, zero3, zero3_recompute"),
    ("planner@x=static", "planner@x", "unknown key", "did you mean planner"),
    ("run={steps: 3}", "run", "is a section", "run.steps"),
    ("model.rope=yarn", "model.rope", "is a section", "set model.rope.kind=yarn"),
    ("model/rope=yarn", "model/rope", "is a section", "set model.rope.kind=yarn"),
    ("model/rope=yam", "model/rope", "is a section", "set one of model.rope.kind, model.rope.factor"),
    ("run/steps=3", "run/steps", "unknown key", "run.steps=..."),
    ("recipe=llama3-8b", "recipe", "unknown name: llama3-8b", "llama3-8b-2m, llama3-8b-512k"),
    ("run.step=3", "run.step", "unknown key", "did you mean run.steps?"),
    ("lr=3", "lr", "unknown key", "did you mean optimizer.lr?"),
    ("contxt=4K", "contxt", "unknown key", "did you mean context?"),
    ("qqq=1", "qqq", "unknown key", "config show"),
    ("hydra.run.dir=x", "hydra.run.dir", "unknown key", "config show"),
    ("optimizer.nmae=sgd", "optimizer.nmae", "unknown key", "did you mean optimizer.name?"),
    ("optimizer.foo=1", "optimizer.foo", "unknown key", "keys of optimizer: name, lr, min_lr_ratio, "),
    ("parallel.stage=4", "parallel.stage", "unknown key", "did you mean parallel.stages?"),
    ("zero.foo=1", "zero.foo", "unknown key", "keys of zero: stage, weights_on_host"),
    ("offload.foo=1", "offload.foo", "unknown key", "keys of offload: ratio"),
    ("model.foo=1", "model.foo", "unknown key", "keys of model: name, family, "),
    ("model.rope.foo=1", "model.rope.foo", "unknown key", "keys of model.rope: kind, factor, "),
    ("optimzer.lr=1", "optimzer.lr", "unknown key", "did you mean optimizer.lr?"),
    ("optimizer.steps=1", "optimizer.steps", "unknown key", "did you mean run.steps?"),
    ("optimizer.betas.0=0.8", "optimizer.betas.0", "unknown key", "did you mean optimizer.betas?"),
]


@pytest.mark.parametrize(("text", "key", "message", "hint"), MISTAKES)
def test_mistakes(text: str, key: str, message: str, hint: str) -> None:
    good, (problem,) = check([text])
    assert good == []
    assert problem.key == key
    assert message in problem.message
    assert hint in (problem.hint or "")
    assert "ydra" not in problem.message + (problem.hint or "").replace(text, "")


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
    with pytest.raises(ConfigError) as caught:
        load([text])
    (problem,) = caught.value.problems
    assert problem.key and problem.hint and len(problem.message) < 100


def test_references_that_multiply_a_text_are_refused() -> None:
    """100 references to a text of 100 references, four times: 10^9 characters."""
    keys = ("data.path", "run.weights", "run.notice_file", "data.cache", "run.out")
    chain = [f"{key}={f'${{{before}}}' * 100}" for before, key in pairwise(keys)]
    with pytest.raises(ConfigError) as caught:
        load(["data=folder", "data.path=0123456789", *chain])
    assert caught.value.problems[0].key in keys
    config = load(["data=folder", "data.path=0123456789", "run.out=${data.path}/${data.path}"])
    assert config.run.out == "0123456789/0123456789"
