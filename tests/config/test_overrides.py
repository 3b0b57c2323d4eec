"""Every mistake in an override has its place and its way out, before Hydra sees it."""

from __future__ import annotations

import pytest

from engine.config.load import load
from engine.config.overrides import check

MISTAKES = [
    ("+typo=1", "+typo=1", "+ is not used here", "write KEY=VALUE"),
    ("~run.steps", "~run.steps", "~ is not used here", "write KEY=VALUE"),
    ("run.steps", "run.steps", "is not KEY=VALUE", "for example"),
    ("quickstart", "quickstart", "is not KEY=VALUE", "write recipe=quickstart"),
    ("=3", "=3", "is not KEY=VALUE", "for example"),
    ("run.steps=", "run.steps=", "has no value", "run.steps=VALUE"),
    ("run.steps=1,2", "run.steps=1,2", "several values", "'run.steps=\"1,2\"'"),
    ("run.steps=range(1,3)", "run.steps=range(1,3)", "several values", "quote it"),
    ("data.pattern=a=b", "data.pattern=a=b", "cannot be read", "'data.pattern=\"a=b\"'"),
    ("data.pattern=[a", "data.pattern=[a", "cannot be read", "quotes"),
    ("recipe=quikstart", "recipe", "there is no recipe quikstart", "did you mean quickstart?"),
    ("model=tinny", "model", "there is no model tinny", "did you mean tiny?"),
    ("cluster=xyz", "cluster", "there is no cluster xyz", "there are a100x8, h100x8, h200x8, local"),
    ("planner=[static,naive]", "planner", "is a group", "adaptive, balanced, naive, static"),
    ("planner=null", "planner", "there is no planner None", "adaptive, balanced, naive, static"),
    ("planner=adaptiv", "planner", "there is no planner adaptiv", "did you mean adaptive?"),
    ("lengths=bytes", "lengths", "there is no lengths bytes", "did you mean byted?"),
    ("lengths=wiki", "lengths", "there is no lengths wiki", "byted, data, file, github, lognormal"),
    (
        "cluster=h800x8",
        "cluster",
        "there is no cluster h800x8",
        "did you mean h100x8 or h200x8? there are a100x8, h100x8, h200x8, local",
    ),
    ("memory=zero2", "memory", "there is no memory zero2", "there are zero1, zero1_recompute, zero3, zero3_recompute"),
    ("planner@x=static", "planner@x", "no such key", "did you mean planner"),
    ("run={steps: 3}", "run", "holds other keys", "run.steps"),
    ("model.rope=yarn", "model.rope", "holds other keys", "set model.rope.kind=yarn"),
    ("model/rope=yarn", "model/rope", "holds other keys", "set model.rope.kind=yarn"),
    ("model/rope=yam", "model/rope", "holds other keys", "set one of model.rope.kind, model.rope.factor"),
    ("run/steps=3", "run/steps", "no such key", "run.steps=..."),
    ("recipe=llama3-8b", "recipe", "there is no recipe llama3-8b", "llama3-8b-2m or llama3-8b-512k?"),
    ("run.step=3", "run.step", "no such key", "did you mean run.steps?"),
    ("lr=3", "lr", "no such key", "did you mean optimizer.lr?"),
    ("contxt=4K", "contxt", "no such key", "did you mean context?"),
    ("qqq=1", "qqq", "no such key", "config show"),
    ("hydra.run.dir=x", "hydra.run.dir", "no such key", "config show"),
    ("optimizer.nmae=sgd", "optimizer.nmae", "no such key", "did you mean optimizer.name?"),
    ("optimizer.foo=1", "optimizer.foo", "no such key", "optimizer holds name, lr, min_lr_ratio, "),
    ("zero.foo=1", "zero.foo", "no such key", "zero holds stage, weights_on_host"),
    ("offload.foo=1", "offload.foo", "no such key", "offload holds ratio"),
    ("model.foo=1", "model.foo", "no such key", "model holds name, layers, "),
    ("model.rope.foo=1", "model.rope.foo", "no such key", "model.rope holds kind, factor, "),
    ("optimzer.lr=1", "optimzer.lr", "no such key", "did you mean optimizer.lr?"),
    ("optimizer.steps=1", "optimizer.steps", "no such key", "did you mean run.steps?"),
    ("optimizer.betas.0=0.8", "optimizer.betas.0", "no such key", "did you mean optimizer.betas?"),
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


def test_a_path_may_start_at_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave the tilde of KEY=~/x alone."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(["data.path=~/texts"]).data.path == "/home/someone/texts"


def test_good_ones_are_kept_beside_bad_ones() -> None:
    good, problems = check(["run.steps=3", "run.stops=3", "context=8K", "+x=1"])
    assert good == ["run.steps=3", "context=8K"]
    assert len(problems) == 2


def test_what_comes_from_a_hostfile_is_not_set_beside_it() -> None:
    texts = ["cluster.hostfile=hosts", "cluster.nodes=2", "cluster.ranks_per_node=4"]
    assert [problem.key for problem in check(texts)[1]] == ["cluster.nodes", "cluster.ranks_per_node"]
    assert check(["cluster.hostfile=null", *texts[1:]])[1] == []
