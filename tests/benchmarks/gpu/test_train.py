"""What a GPU will be asked for is a config that loads, and a tiny one of it runs here."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import on_gpu, train
from engine.config.load import load
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world


@pytest.mark.parametrize("case", train.CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_case_is_a_config(case: tuple[str, int, str, tuple[str, ...]]) -> None:
    config = train.config_of(*case)
    assert (config.context, config.recompute, config.model.vocab) == (case[1], case[2], train.VOCAB)


def test_rows_say_which_case_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, object]] = []
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(on_gpu, "alone", lambda case, work, *rest: case | {"error": "no room"})
    monkeypatch.setattr(on_gpu, "write", lambda path, device, rows: found.extend(rows[-1:]))
    with pytest.raises(SystemExit, match="True"):
        train.main()
    assert found == [
        {"model": model, "tokens": tokens, "recompute": recompute, "error": "no room"}
        for model, tokens, recompute, _ in train.CASES
    ]


def tiny() -> dict[str, str | float]:
    return train.measure(load(["recipe=quickstart", "context=64", "capacity=64", "batch_tokens=64"]), alone())


@pytest.mark.world
def test_a_tiny_model_is_measured() -> None:
    (found,) = run_world(1, tiny)
    assert found["tokens_per_s"] > 0 and 0 < found["mfu"] < 1 and found["kernel"] == "fused_cpu"
