"""The typed layer in plain English: wrong types and bounds, unknown and missing keys."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from engine.config.compose import compose
from engine.config.validate import not_built, validate

VALUES = compose([])

MISTAKES: list[tuple[str, Any, str, str]] = [
    ("run.steps", 0, "must be at least 1, not 0", "optimizer updates"),
    ("run.steps", 1.5, "must be a whole number, not 1.5", ""),
    ("run.steps", 1e3, "must be a whole number, not 1000", "write run.steps=1000"),
    ("run.steps", "100k", "must be a whole number, not 100k", "write run.steps=100000; this key takes no K, M or G"),
    ("run.steps", "1.5 M", "must be a whole number, not 1.5 M", "write run.steps=1500000; this key"),
    ("run.steps", "0.0001k", "must be a whole number, not 0.0001k", "for example run.steps=1: optimizer"),
    ("run.steps", "1G", "must be at most 99999999, not 1G", "set run.steps=99999999 or less"),
    ("run.steps", 1e12, "must be at most 99999999, not 1000000000000", "set run.steps=99999999 or less"),
    ("cluster.nodes", 1e9, "must be at most 65536, not 1000000000", "set cluster.nodes=65536 or less"),
    ("cluster.nodes", "many", "must be a whole number, not many", "for example cluster.nodes=1: number of machines"),
    ("optimizer.name", "foo", "must be adamw or sgd, not foo", "for example optimizer.name=adamw"),
    ("optimizer.name", "SGD", "must be adamw or sgd, not SGD", "did you mean sgd?"),
    ("capacity", -5, "-5 is not a length; write 4096, 16K or 2M", "for example capacity=16K: maximum tokens"),
    ("cluster.host_memory", -1, "-1 is not a size", "for example cluster.host_memory=80GiB: host memory"),
    ("run.steps", 1e300, "must be a whole number, not 1e+300", "optimizer updates"),
    ("run.steps", 10**8, "must be at most 99999999, not 100000000", "set run.steps=99999999 or less"),
    ("run.keep_checkpoints", 10**30, "must be at most 99999999", ""),
    ("optimizer.warmup_steps", 10**30, "must be at most 99999999", ""),
    ("model.hidden", 10**24, "must be at most 2147483648, not 1000000000000000000000000", "residual stream"),
    ("model.layers", 2**20 + 1, "must be at most 1048576", ""),
    ("model.vocab", 10**30, "must be at most 2147483648", ""),
    ("model.experts", 10**30, "must be at most 1048576", ""),
    ("model.rope_theta", 1e300, "must be at most 1000000000000, not 1e+300", ""),
    ("model.rope.factor", 1e7, "must be at most 1000000, not 10000000", ""),
    ("model.norm_eps", 1e-300, "must be at least 1e-12, not 1e-300", "set model.norm_eps=1e-12 or more"),
    ("lengths.sigma", 1e300, "must be at most 10, not 1e+300", "sigma of"),
    ("lengths.mean", 1e300, "must be at most 4294967296, not 1e+300", ""),
    ("lengths.max", "8T", "must be at most 4G, not 8T", "set lengths.max=4G or less"),
    ("capacity", "8T", "must be at most 4G, not 8T", "set capacity=4G or less"),
    ("cluster.device_memory", "1025T", "must be at most 1024TiB, not 1025TiB", "cluster.device_memory=1024TiB or less"),
    ("parallel.tp", 10**20, "must be at most 65536", ""),
    ("planner.max_peers", 10**30, "must be at most 1048576", ""),
    ("run.steps", True, "must be a whole number, not true", ""),
    ("run.steps", "three", "must be a whole number, not three", ""),
    ("run.steps", None, "must be a whole number, not null", ""),
    ("run.out", None, "must be text, not null", ""),
    ("run.seed", 2**63, "must be less than 9223372036854775808", ""),
    ("run.out", "", "must not be empty", "run folder"),
    ("run.out", 3, "must be text, not 3", "'run.out=\"3\"'"),
    ("model.tied", 1, "must be true or false, not 1", "for example model.tied=true"),
    ("model.window", 0, "must be at least 1, not 0", "set model.window=1 or more"),
    ("model.window", "4KiB", "is not a length in tokens", "for example model.window=4K"),
    ("model.windowed", [True, 0], "must be true or false, not 0", "for example model.windowed=[true,false]"),
    ("model.windowed", True, "must be a list, not true", "for example model.windowed=[true,false]"),
    ("model.windowed", [], "has too few values", "for example model.windowed=[true,false]"),
    ("optimizer.lr", 0, "must be more than 0, not 0", ""),
    ("optimizer.lr", "fast", "must be a number, not fast", ""),
    ("optimizer.lr", math.nan, "must be a finite number, not nan", ""),
    ("optimizer.lr", math.inf, "must be a finite number, not inf", ""),
    ("optimizer.min_lr_ratio", 1.1, "must be at most 1, not 1.1", ""),
    ("optimizer.betas", 0.9, "must be a list, not 0.9", "for example optimizer.betas=[0.9,0.95]"),
    ("slurm.extra", "[--mem=0]", "must be a list, not [--mem=0]", """for example 'slurm.extra=["--mem=0"]'"""),
    ("slurm.extra", [3], "must be text, not 3", """for example 'slurm.extra=["--mem=0"]'"""),
    ("optimizer.betas", [0.9], "has too few values", ""),
    ("optimizer.betas", [0.9, 0.9, 0.9], "has too many values", ""),
    ("optimizer.betas", [0.9, "x"], "must be a number, not x", ""),
    ("data.validation_share", 1, "must be less than 1, not 1", ""),
    ("context", "4X", "'4X' is not a length; write 4096, 16K or 2M", "maximum length"),
    ("context", "0.3K", "0.3K is not a whole number of tokens", ""),
    ("context", 0, "must be at least 1, not 0", ""),
    ("cluster.nodes", 10**8, "must be at most 65536, not 100000000", "number of machines"),
    ("cluster.ranks_per_node", 65, "must be at most 64, not 65", ""),
    ("batch_tokens", 2**40, "must be at most 4G, not 1T", ""),
    ("cluster.device_memory", "80Gb/s", "is not a size; write 80GiB or 512M", ""),
    ("dtype", "fp23", "must be bf16, fp32 or fp64, not fp23", "did you mean fp32?"),
    ("dtype", "fp16", "must be bf16, fp32 or fp64, not fp16", "did you mean bf16 or fp64?"),
    ("dtype", "fp16x8", "must be bf16, fp32 or fp64", ""),
    ("data.path", "???", "is not set", "set data.path=..."),
    ("model.layerz", 3, "unknown key", "did you mean model.layers?"),
    ("offload.ratio", "some", "must be auto or a number, not some", "offloaded to the host"),
    ("cluster.speeds", "fast", "must be hostfile or measured or a list such as [100,80], not fast", "percent of full"),
    ("offload.ratio", float("nan"), "must be auto or a number, not nan", "0 to 1"),
    ("zero.stage", 4, "must be 1, 2 or 3, not 4", "for example zero.stage=1: ZeRO-1 shards"),
    ("zero.stage", 0, "must be 1, 2 or 3, not 0", ""),
    ("recompute", "layers", "must be none, layer or layer_keep_attention, not layers", "did you mean layer?"),
    ("planner.name", "adaptiv", "must be static, naive, balanced or adaptive, not adaptiv", "did you mean adaptive?"),
    ("planner.mode", "pipelines", "must be auto, free, lockstep or pipeline", "did you mean pipeline?"),
    ("lengths.name", "wiki", "must be data, github, byted, lognormal or file, not wiki", ""),
    ("lengths.sigma", 0, "must be more than 0, not 0", ""),
    ("lengths.path", 3, "must be text, not 3", ""),
    ("cluster.calibration", 3, "must be text, not 3", ""),
    ("cluster.host_memory", "many", "is not a size; write 80GiB or 512M", ""),
    ("model.experts", 0, "must be at least 1, not 0", ""),
    ("model.top_k", 0, "must be at least 1, not 0", ""),
    ("model.rope_theta", 1, "must be more than 1, not 1", "model.rope_theta"),
    ("model.rope.kind", "yarm", "must be none, linear, yarn or llama3, not yarm", "did you mean yarn?"),
    ("model.rope.factor", 0.5, "must be at least 1, not 0.5", "model.rope.factor"),
    ("model.rope.original_max_position_embeddings", 0, "must be at least 1, not 0", ""),
    ("parallel.tp", 0, "must be at least 1, not 0", ""),
    ("parallel.ep", 0, "must be at least 1, not 0", ""),
    ("data.runtime", "ray", "ray is not implemented yet", "available: local"),
    ("parallel.pp", 0, "must be at least 1, not 0", ""),
    ("slurm.time", "tomorrow", "cannot be 'tomorrow'", "for example slurm.time=24:00:00: time limit"),
    ("slurm.extra", "--mem=0", "must be a list, not --mem=0", "for example 'slurm.extra=[\"--mem=0\"]': more options"),
    ("slurm.partition", "x y", "may have letters, digits and _ . , : @ + - only, not 'x y'", "slurm.partition"),
    ("k8s.mount", "shared", "cannot be 'shared'", "for example k8s.mount=/shared: where pods see k8s.claim"),
    ("k8s.image", "a b", "may have letters, digits and . _ / : @ - only, not 'a b'", "k8s.image=registry/bytescale:1"),
    ("k8s.claim", "X_y", "must be lower-case letters, digits, - and .", "for example k8s.claim=training"),
    ("k8s.claim", "training-", "begin and end with a letter or digit, not 'training-'", ""),
    ("k8s.namespace", "a.b", "must be at most 63 lower-case letters, digits and -, not 'a.b'", ""),
]


def changed(key: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = copy.deepcopy(VALUES)
    *path, last = key.split(".")
    inner = values
    for part in path:
        inner = inner[part]
    inner[last] = value
    return values


@pytest.mark.parametrize(("key", "value", "message", "hint"), MISTAKES)
def test_mistakes(key: str, value: Any, message: str, hint: str) -> None:
    config, (problem,) = validate(changed(key, value))
    assert config is None
    assert problem.key == key
    assert message in problem.message
    assert hint in (problem.hint or "")
    assert "nput should" not in problem.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slurm.time", "2-12"),
        ("slurm.partition", "gpu,cpu"),
        ("k8s.image", "localhost:5000/ml/bytescale:1.2@sha256:0123456789abcdef"),
        ("k8s.claim", "team.training-2"),
        ("k8s.namespace", "ml"),
    ],
)
def test_what_slurm_and_kubernetes_accept_is_right(key: str, value: str) -> None:
    assert validate(changed(key, value))[1] == []


def test_a_section_that_is_missing_is_named() -> None:
    config, (problem,) = validate({key: value for key, value in VALUES.items() if key != "zero"})
    assert config is None
    assert (problem.key, problem.message) == ("zero", "is not set")


def test_a_section_that_is_no_mapping_is_refused() -> None:
    config, problems = validate(VALUES | {"zero": 1})
    assert config is None
    assert [problem.key for problem in problems] == ["zero"]


def test_what_is_right_becomes_a_frozen_config() -> None:
    config, problems = validate(VALUES)
    assert config is not None
    assert problems == []
    with pytest.raises(ValueError, match="frozen"):
        config.context = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("data.runtime", "ray", True),
        ("data.runtime", "rya", False),
        ("data.format", "ray", False),
    ],
)
def test_a_mistake_is_not_taken_for_a_value_to_come(key: str, value: object, refused: bool) -> None:
    problem = not_built(key, value, "local")
    assert (problem is not None) is refused
    assert problem is None or problem.message == f"{value} is not implemented yet"
