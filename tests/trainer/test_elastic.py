"""A run goes on with other numbers of ranks, capacities, planners and ZeRO stages, by the same command.

Its losses are those of a run that no one touched. If this fails, a run that loses a machine is lost with it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data.overview import tokenizer_facts
from engine.launch.run import train
from engine.run.checkpoints import newest_first, read
from tests.helpers import family
from tests.trainer.worlds import in_worlds, texts

pytestmark = pytest.mark.world

STEPS = 8
CHAIN = (2, 1, 3, 2)  # numbers of ranks; each trains two steps
SMALL = [
    *("recipe=quickstart", "context=192", "batch_tokens=384", "dtype=fp32", f"run.steps={STEPS}"),
    *("model.layers=2", "model.hidden=36", "model.heads=2", "model.kv_heads=1", "model.ffn=50"),
    *("data.validation_share=0.2", "data.validation_tokens=256", "run.validate_every=4", "optimizer.warmup_steps=2"),
]
EXPERTS = ["model.experts=3", "model.top_k=2", "balance.by=bias", "model.tied=true", *family(True, qwen3=True)]


def config_of(out: Path, data: Path, ranks: int, *more: str) -> Config:
    """The capacity is what a context needs, so rings are as large as the world."""
    sizes = [
        f"cluster.ranks_per_node={ranks}",
        f"capacity={192 // ranks}",
        f"run.out={out}",
        f"data.path={data}",
        "data.pattern=*.txt",
    ]
    return load([*SMALL, *sizes, *more])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("data"), 160)


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "each step once"
    return [line[key] for line in lines for key in ("loss", "validation_loss") if key in line]


CHAINS = {  # what each part of a run adds to the command
    "stage 1": [["zero.stage=1"]] * 4,
    "stage 3": [["zero.stage=3"]] * 4,
    "experts, through all stages": [
        [*EXPERTS, *part]
        for part in (
            ["zero.stage=3"],
            ["zero.stage=2", "planner=naive", "recompute=layer"],
            ["zero.stage=1", "planner=static"],
            ["zero.stage=3", "recompute=layer_keep_attention"],
        )
    ],
}


*ONE_STAGE, ALL_STAGES = CHAINS


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ONE_STAGE), ALL_STAGES])
def test_other_ranks_and_stages_change_no_loss(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    said = list[str]()
    in_worlds(monkeypatch, STEPS)
    train(config_of(tmp_path / "whole", data, 1, *CHAINS[name][0], "zero.stage=1"), say=said.append)
    for part, (ranks, more) in enumerate(zip(CHAIN, CHAINS[name], strict=True), start=1):
        in_worlds(monkeypatch, 2 * part)
        train(config_of(tmp_path / "run", data, ranks, *more), say=said.append)
    expected = losses(tmp_path / "whole")
    assert len(expected) == STEPS + 2 and len(set(expected)) == len(expected)
    worst = max(abs(one - other) for one, other in zip(losses(tmp_path / "run"), expected, strict=True))
    assert worst < 1e-6
    assert [line for line in said if "wrote the checkpoint" in line] == [
        f"{before} rank{'s' * (before > 1)} wrote the checkpoint; its states are divided among {now} now"
        for before, now in pairwise(CHAIN)
    ]
    ledgers = [tmp_path / name / "ledger" / "documents-00000000.bin" for name in ("whole", "run")]
    assert ledgers[0].read_bytes() == ledgers[1].read_bytes(), "each document in the same step"
    last = read(newest_first(tmp_path / "run" / "checkpoints")[0])
    assert last.ranks == 2 and last.tokenizer == tokenizer_facts(load(SMALL).data) is not None
