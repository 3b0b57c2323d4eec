"""Rules between keys, each with a config that breaks it and one at its edge."""

from __future__ import annotations

import pytest

from engine.config import checks
from engine.config.checks import check
from engine.config.compose import compose
from engine.config.schema import Config
from engine.config.validate import right_part, validate
from engine.errors import Problem

BASE = ("context=4K", "capacity=2K", "model.heads=4", "model.kv_heads=2", "model.hidden=128")
WIDE = ("cluster.ranks_per_node=8",)
MANY = ("model.heads=24", "model.kv_heads=24", "model.hidden=192")  # heads
LLAMA3 = ("model=1b", "model.hidden=2048", "model.heads=32", "model.kv_heads=8")
YARN = ("model.rope.kind=yarn", "model.rope.factor=4", "model.rope.original_max_position_embeddings=8K")


def config(*overrides: str) -> Config:
    found, problems = validate(compose([*BASE, *overrides]))
    assert found is not None, problems
    return found


EXPERTS = ["model.family=mixtral", "model.experts=4", "model.top_k=2", "cluster.ranks_per_node=8"]
MISTAKES = [
    (["cluster.nodes=65536", *WIDE], "cluster.nodes", "524,288 HDP ranks exceed the maximum of 65,536", "parallel.tp"),
    (
        ["model.hidden=2147483648", "model.ffn=1"],
        "model.hidden",
        "2147483648 gives, with these layers, experts and vocabulary, more weights than ByteScale supports",
        "a smaller model",
    ),
    (["model.kv_heads=3"], "model.kv_heads", "3 does not divide model.heads=4", "4"),
    (["model.hidden=132"], "model.hidden", "132 is not a multiple of 2 x model.heads=4", "136"),
    (["optimizer.betas=[0.9,1]"], "optimizer.betas", "less than 1", "0.95"),
    (["optimizer.betas=[-0.1,0.9]"], "optimizer.betas", "at least 0", "0.95"),
    (
        ["zero.weights_on_host=true", "zero.stage=2"],
        "zero.weights_on_host",
        "needs zero.stage=3, not 2",
        "zero.stage=3",
    ),
    (
        [*WIDE, "parallel.pp=2", "zero.weights_on_host=true", "zero.stage=3"],
        "zero.stage",
        "ZeRO-3 cannot be combined with parallel.pp=2",
        "zero.stage=1 zero.weights_on_host=false, or parallel.pp=1",
    ),
    (
        [*WIDE, "parallel.pp=2", "zero.weights_on_host=true", "zero.stage=1"],
        "zero.weights_on_host",
        "needs zero.stage=3, not 1",
        "zero.weights_on_host=false",
    ),
    (
        ["offload.ratio=2"],
        "offload.ratio",
        "must be auto or from 0 to 1, not 2",
        "offload.ratio=auto, or a fraction",
    ),
    (["offload.ratio=1.5"], "offload.ratio", "from 0 to 1", "auto"),
    (["offload.ratio=-0.1"], "offload.ratio", "must be auto or from 0 to 1, not -0.1", "auto"),
    (
        ["model.family=mixtral", "model.experts=4", "model.top_k=5"],
        "model.top_k",
        "5 is more than model.experts=4",
        "model.top_k=4 or less",
    ),
    (
        [*WIDE, "context=2K", "model.layers=3", "parallel.tp=2", "parallel.pp=3"],
        "parallel.pp",
        "= 6 does not divide 8 devices",
        "cluster.nodes, cluster.ranks_per_node; or parallel.tp=2 parallel.pp=2, the nearest that divides them",
    ),
    (
        [*WIDE, "parallel.pp=2", "planner.mode=free"],
        "planner.mode",
        "parallel.pp=2 needs pipeline mode, not free",
        "auto",
    ),
    (
        ["model.rope.kind=yarn"],
        "model.rope.kind",
        "yarn needs parameters that are not set: factor, original_max_position_embeddings",
        "for example model.rope.factor=8 model.rope.original_max_position_embeddings=8K",
    ),
    (
        ["model.rope.kind=llama3", "model.rope.factor=8", "model.rope.original_max_position_embeddings=8K"],
        "model.rope.kind",
        "llama3 needs parameters that are not set: low_freq_factor, high_freq_factor",
        "for example model.rope.low_freq_factor=1 model.rope.high_freq_factor=4",
    ),
    (["model.rope.kind=linear"], "model.rope.kind", "needs parameters that are not set: factor", "model.rope.factor=8"),
    (
        ["model.rope.factor=8"],
        "model.rope.factor",
        "is not a parameter of model.rope.kind=none",
        "linear or llama3 or yarn",
    ),
    (
        ["model.rope.mscale=1"],
        "model.rope.mscale",
        "is not a parameter of model.rope.kind=none",
        "model.rope.kind=yarn,",
    ),
    (
        [*LLAMA3, "model.rope.beta_fast=16"],
        "model.rope.beta_fast",
        "is not a parameter of model.rope.kind=llama3",
        "remove it",
    ),
    (
        [*LLAMA3, "model.rope.low_freq_factor=4"],
        "model.rope.high_freq_factor",
        "must be more than model.rope.low_freq_factor=4, not 4",
        "1 and 4",
    ),
    (
        [*YARN, "model.rope.beta_slow=32"],
        "model.rope.beta_fast",
        "more than model.rope.beta_slow=32, not 32",
        "32 and 1",
    ),
    ([*YARN, "model.rope.mscale=1"], "model.rope.mscale_all_dim", "is not set", "set both mscale"),
    ([*YARN, "model.rope.mscale_all_dim=1"], "model.rope.mscale", "is not set", "set both mscale"),
    (["model.experts=4"], "model.experts", "llama has no experts, not 4", "set model.experts=1"),
    (["model.family=mixtral"], "model.experts", "mixtral has experts, so at least 2", "model.family=llama"),
    (["model.top_k=2"], "model.top_k", "2 is more than model.experts=1", "model.top_k=1 or less"),
    (["lengths.path=my.txt"], "lengths.path", "is not used with lengths=", "lengths=file"),
    (["lengths.name=file"], "lengths.path", "is not set", "one length per line"),
    (
        [*MANY, "parallel.tp=3", "context=1K", "cluster.ranks_per_node=4"],
        "parallel.tp",
        "= 3 does not divide 4 devices",
        "nodes",
    ),
    (
        [*MANY, "cluster.nodes=2", "cluster.ranks_per_node=6", "parallel.tp=4"],
        "parallel.tp",
        "4 is neither a divisor nor a multiple of a node's 6 devices, so a rank would span parts of two nodes",
        "a divisor of 6",
    ),
    (
        [*MANY, "cluster.nodes=3", "cluster.ranks_per_node=4", "parallel.tp=6"],
        "parallel.tp",
        "6 is neither a divisor nor a multiple of a node's 4 devices",
        "a divisor of 4",
    ),
    (
        ["cluster.name=mine"],
        "cluster.name",
        "mine has no data sheet, so its speed is unknown; presets: a100x8, b200x8",
        "cluster.calibration=FILE",
    ),
    (
        ["cluster.device_memory=80"],
        "cluster.device_memory",
        "must be at least 1 MiB, not 80 bytes",
        "give it a unit, for example cluster.device_memory=80GiB",
    ),
    (["cluster.device_memory=1023K"], "cluster.device_memory", "not 1,047,552 bytes", "cluster.device_memory=80GiB"),
    (
        ["cluster.host_memory=192"],
        "cluster.host_memory",
        "must be 0 or at least 1 MiB, not 192 bytes",
        "give it a unit, for example cluster.host_memory=192GiB",
    ),
    (
        ["slurm.time='00:01:00'"],
        "slurm.time",
        "must be longer than slurm.grace=120 seconds, not 00:01:00",
        "slurm.time=24:00:00, or a smaller slurm.grace",
    ),
    (["slurm.time='2'"], "slurm.time", "must be longer than slurm.grace=120 seconds", "slurm.grace"),
    (["slurm.time='1:59'"], "slurm.time", "must be longer than slurm.grace=120 seconds", "slurm.grace"),
    (["slurm.time='0-0:02'"], "slurm.time", "must be longer than slurm.grace=120 seconds", "slurm.grace"),
    (["planner.mode=pipeline"], "planner.mode", "pipeline mode needs parallel.pp=2", "parallel.pp"),
    (
        ["run.keep_best=1", "data.validation_tokens=0"],
        "run.keep_best",
        "needs a validation loss, and data.validation_tokens is 0",
        "set data.validation_tokens, or run.keep_best=0",
    ),
    (["run.remote=bucket/run"], "run.remote", "is not the URL of a folder", "s3://bucket/run"),
    (
        ["run.remote='s3://key:word@bucket/run'"],
        "run.remote",
        "is a URL with a password, a token or a signature, which the run folder would show",
        "fsspec also finds it in the environment",
    ),
    (["data.path='s3://AKIA1:s3cret@bucket/a'"], "data.path", "a URL with a password", "AWS_PROFILE"),
    (["data.path='https://a.b/c.jsonl?x=1&X-Amz-Signature=s3cret'"], "data.path", "or a signature", "the environment"),
    (["++data.sources={web: {path: [a, 'az://b/c?sig=s3cret']}}"], "data.sources.web.path", "signature", "its config"),
    (["run.weights='simplecache::ftp://me:s3cret@host/a'"], "run.weights", "the run folder would show", "fsspec"),
    (["planner.mode=free", "zero.stage=3"], "planner.mode", "ZeRO-3 needs lockstep mode", "planner.mode=auto"),
    (["parallel.ep=2"], "parallel.ep", "2 ranks cannot share experts, because the model has none", "parallel.ep=1"),
    ([*EXPERTS, "parallel.ep=3"], "parallel.ep", "3 does not divide model.experts=4 or 8 HDP ranks", "parallel.ep=2"),
    ([*EXPERTS, "parallel.ep=8"], "parallel.ep", "8 does not divide model.experts=4", "parallel.ep=4"),
    ([*EXPERTS, "parallel.ep=2", "parallel.tp=2"], "parallel.ep", "combined with parallel.tp=2", "parallel.tp=1"),
    ([*EXPERTS, "parallel.ep=2", "parallel.pp=2"], "parallel.ep", "combined with parallel.pp=2", "parallel.pp=1"),
    ([*EXPERTS, "parallel.ep=2", "mlp_tile=64"], "parallel.ep", "combined with mlp_tile=64", "mlp_tile=0"),
    ([*EXPERTS, "parallel.ep=2", "optimizer.on_host=true"], "parallel.ep", "optimizer.on_host=true", "on_host=false"),
    (
        [*EXPERTS, "parallel.ep=2", "zero.stage=3"],
        "parallel.ep",
        "cannot be combined with zero.stage=3",
        "zero.stage=2",
    ),
    (
        [*EXPERTS, "parallel.ep=2", "zero.stage=3", "mlp_tile=64"],
        "parallel.ep",
        "2 cannot be combined with mlp_tile=64 or zero.stage=3",
        "set mlp_tile=0 zero.stage=2, or parallel.ep=1",
    ),
    ([*EXPERTS, "parallel.ep=2", "planner.mode=free"], "planner.mode", "needs lockstep mode", "planner.mode=auto"),
    (
        ["planner.mode=lockstep", "parallel.pp=2", "context=1K"],
        "planner.mode",
        "parallel.pp=2 needs pipeline mode",
        "auto",
    ),
    (
        [*WIDE, "parallel.tp=8"],
        "parallel.tp",
        "8 does not divide model.heads=4 or model.kv_heads=2",
        "the nearest that works is parallel.tp=2",
    ),
    ([*WIDE, "model.ffn=97", "parallel.tp=2"], "parallel.tp", "2 does not divide model.ffn=97", "parallel.tp=1"),
    (
        [*WIDE, "context=2K", "parallel.pp=4"],
        "parallel.pp",
        "4 stages cannot share the 2 layers of the model",
        "the nearest that works is parallel.pp=2",
    ),
    (
        [*WIDE, "parallel.pp=2", "parallel.stages=[2,1]"],
        "parallel.stages",
        "2 stages of 3 layers together, not 2 of 2",
        "write 2 numbers whose sum is 2, or parallel.stages=auto",
    ),
    (["parallel.stages=[1,1]"], "parallel.stages", "2 stages of 2 layers together, not 1 of 2", "set parallel.pp=2"),
    (
        ["zero.stage=2", "parallel.pp=2", "context=1K"],
        "zero.stage",
        "cannot be combined with parallel.pp=2",
        "zero.stage=1",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "message", "hint"), MISTAKES)
def test_mistakes(overrides: list[str], key: str, message: str, hint: str) -> None:
    (problem,) = check(config(*overrides))
    assert problem.key == key
    assert message in problem.message
    assert hint in (problem.hint or "")
    assert "s3cret" not in str(problem)


@pytest.mark.parametrize(
    "overrides",
    [
        ["context=4096"],
        ["context=8K", "cluster.ranks_per_node=4"],
        ["context=8K", "cluster.nodes=2"],
        ["cluster.nodes=65536", *WIDE, *MANY, "parallel.tp=8"],
        ["model.hidden=1048576", "model.layers=64", "model.ffn=2097152"],
        ["context=8K", "cluster.hostfile=hosts"],
        ["cluster.device_memory=1MiB", "cluster.host_memory=1MiB"],
        ["cluster.host_memory=0"],
        ["slurm.time='0'"],  # no limit
        ["slurm.time='3'"],
        ["slurm.time='2:01'"],
        ["slurm.time='00:02:01'"],
        ["slurm.time='0-1'"],
        ["slurm.time='0-0:03'"],
        ["slurm.time='0-0:02:01'"],
        ["slurm.time='1-0'", "slurm.grace=65535"],
        ["model.kv_heads=1"],
        ["model.hidden=136"],
        ["optimizer.betas=[0,0.9]"],
        ["offload.ratio=0"],
        ["offload.ratio=1"],
        ["zero.stage=3"],
        ["parallel.pp=2", "context=2K"],
        [*MANY, "cluster.nodes=2", "cluster.ranks_per_node=6", "parallel.tp=3"],
        [*MANY, "cluster.nodes=4", "cluster.ranks_per_node=6", "parallel.tp=12"],
        [*WIDE, "parallel.pp=2", "parallel.stages=[1,1]"],
        ["model.family=mixtral", "model.experts=8", "model.top_k=2"],
        ["model.family=mixtral", "model.experts=8", "model.top_k=8"],
        ["offload.ratio=0.5"],
        ["lengths.name=file", "lengths.path=lengths.txt"],
        [*WIDE, "parallel.tp=2", "parallel.pp=2"],
        [*WIDE, *MANY, "parallel.tp=3", "cluster.hostfile=hosts"],
        [*WIDE, "parallel.pp=2", "planner.mode=pipeline"],
        ["zero.stage=2", "planner.mode=lockstep"],
        ["cluster.name=mine", "cluster.calibration=mine.json"],
        ["dtype=fp64"],
        ["data.path=[s3://bucket/a@b:c, github://owner:name@main/a, sftp://me@host:22/a]"],
        ["data.path='https://a.b/c.jsonl?version=2&page=token'"],
        ["model.rope.kind=linear", "model.rope.factor=1"],
        LLAMA3,
        YARN,
        [*YARN, "model.rope.beta_fast=1.5", "model.rope.mscale=1", "model.rope.mscale_all_dim=0.5"],
        [*YARN, "model.rope.attention_factor=1"],
    ],
)
def test_edges_pass(overrides: list[str]) -> None:
    """With a hostfile the number of ranks is not known here."""
    assert check(config(*overrides)) == []


def test_a_context_that_does_not_fit_breaks_no_rule() -> None:
    """engine/fit/check.py refuses it, with what would fit."""
    assert check(config("context=8K")) == []


def test_several_rules_are_reported_together() -> None:
    assert len(check(config("model.top_k=2", "model.kv_heads=3", "offload.ratio=2"))) == 3


def test_a_rule_is_silent_where_another_mistake_makes_its_numbers_senseless() -> None:
    """0 ranks hold no context, and context=0 is no way out."""
    (problem,) = check(config(*MANY, "parallel.tp=3"))
    assert problem.key == "parallel.tp"


def test_a_rule_that_reads_a_wrong_key_is_skipped_and_a_mistake_in_a_rule_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, wrong = config(), Problem("must be at least 1, not 0", "parallel.tp")
    part = right_part(whole.model_dump(mode="json"), [wrong])
    monkeypatch.setattr(checks, "_RULES", [lambda config: config.parallel.tp])
    assert checks.check_part(part, [wrong]) == []
    monkeypatch.setattr(checks, "_RULES", [lambda config: config.parallel.tq])
    with pytest.raises(AttributeError, match="tq"):
        checks.check_part(part, [wrong])


def test_rules_read_values_only() -> None:
    """A rule that reads a property would fall silent beside a wrong value: the class that it gets then has none."""
    whole = config()
    part = right_part(whole.model_dump(mode="json"), [])
    assert [rule(part) for rule in checks._RULES] == [rule(whole) for rule in checks._RULES]
