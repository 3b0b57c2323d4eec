"""Rules between keys, each with a config at its edge. Configs that break them are in tests/mistakes/rules.yaml."""

from __future__ import annotations

import pytest

from engine.config import checks, tree
from engine.config.checks import check
from engine.config.compose import compose
from engine.config.schema import Config
from engine.config.validate import right_part, validate
from engine.errors import Problem

BASE = ("context=4K", "capacity=2K", "model.heads=4", "model.kv_heads=2", "model.hidden=128")
WIDE = ("cluster.ranks_per_node=8",)
MANY = ("model.heads=24", "model.kv_heads=24", "model.hidden=192")  # heads
LLAMA3 = ("model=1b", "model.hidden=2048", "model.heads=32", "model.kv_heads=8")
FP8 = ("linear_dtype=fp8", "dtype=bf16")
YARN = ("model.rope.kind=yarn", "model.rope.factor=4", "model.rope.original_max_position_embeddings=8K")


def config(*overrides: str) -> Config:
    found, problems = validate(compose([*BASE, *overrides]))
    assert found is not None, problems
    return found


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
        ["data.ray.loaders=[2,2]", "data.ray.address='[::1]:65535'"],
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
        [*FP8, "cluster=a100x8", "cluster.calibration=mine.json"],
        *([*FP8, f"cluster={name}"] for name in tree.groups()["cluster"] if name != "a100x8"),
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
