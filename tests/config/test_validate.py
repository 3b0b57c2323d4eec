"""The typed layer: wrong types and bounds, unknown and missing keys. What it says is in tests/mistakes/values.yaml."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from engine.config.compose import compose
from engine.config.validate import validate

VALUES = compose([])

# Values just outside their bounds, or of another type. tests/mistakes/values.yaml has what is said, once per kind.
REFUSED: list[tuple[str, Any]] = [
    *(("run.steps", value) for value in (0, 1.5, 10**8, 1e12, 1e300, True, None, "three", "1G")),
    *((key, 10**8) for key in ("run.keep_checkpoints", "optimizer.warmup_steps", "cluster.nodes")),
    *(
        ("model.hidden", 2**31 + 1),
        ("model.vocab", 2**31 + 1),
        ("model.layers", 2**20 + 1),
        ("model.experts", 2**20 + 1),
    ),
    *(
        ("model.rope_theta", 1e12 + 1e3),
        ("model.rope_theta", 1),
        ("model.rope.factor", 1e6 + 1),
        ("model.rope.factor", 0.5),
    ),
    *(("lengths.mean", 2**32 + 2), ("lengths.sigma", 10.5), ("lengths.sigma", 0), ("model.norm_eps", 1e-13)),
    *(("capacity", 2**32 + 1), ("lengths.max", "8T"), ("batch_tokens", 2**40), ("context", 0), ("model.window", 0)),
    *(("cluster.device_memory", "1025T"), ("cluster.ranks_per_node", 65), ("run.seed", 2**63)),
    *(("planner.max_peers", 2**20 + 1), ("parallel.tp", 2**16 + 1)),
    *((key, 0) for key in ("model.experts", "model.top_k", "model.rope.original_max_position_embeddings")),
    *((key, 0) for key in ("parallel.tp", "parallel.pp", "parallel.ep", "optimizer.lr", "zero.stage")),
    *(("optimizer.lr", value) for value in ("fast", float("nan"), float("inf"))),
    *(("optimizer.min_lr_ratio", 1.1), ("data.validation_share", 1), ("offload.ratio", float("nan"))),
    *(("optimizer.betas", value) for value in ([0.9], [0.9, 0.9, 0.9], [0.9, "x"], 0.9)),
    *(("run.out", 3), ("run.out", ""), ("lengths.path", 3), ("cluster.calibration", 3), ("slurm.extra", [3])),
]


def changed(key: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = copy.deepcopy(VALUES)
    *path, last = key.split(".")
    inner = values
    for part in path:
        inner = inner[part]
    inner[last] = value
    return values


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_a_value_is_refused_at_its_key(key: str, value: Any) -> None:
    config, (problem,) = validate(changed(key, value))
    assert config is None
    assert (problem.key, bool(problem.hint)) == (key, True)


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
    assert problem.key == "zero"


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
