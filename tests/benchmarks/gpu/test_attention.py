"""What a GPU will be asked for runs here, small and on the CPU: only the clock is another one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu import attention
from engine.attention.kernels.choice import choose

SIZES = {
    "HEADS": 4,
    "GROUPS": 2,
    "HEAD_DIM": 16,
    "LENGTHS": (64, 1024),
    "PACKED": 4,
    "OF": 64,
    "RANK_TOKENS": 32,
    "WARM_UPS": 1,
}


def milliseconds(run: Callable[[], None]) -> float:
    """Return the time of a run, which on this device ends when it returns."""
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def test_every_group_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(attention, "milliseconds", milliseconds)
    device = torch.device("cpu")
    chosen = choose(device, attention.DTYPE, attention.HEAD_DIM)
    parts = (attention.raw_and_seam, attention.packing, attention.ring)
    rows = [row for part in parts for row in part(device, chosen)]
    lengths = {row["lengths"] for row in rows}
    assert lengths == {"0K", "1K", "4 of 64", "4 unequal", "1 of 128", "ring of 8, 32 a rank", "1 of 90"}
    assert all(float(row["ms"]) > 0 and float(row["tflops_per_s"]) > 0 for row in rows)
    attention.show(rows)
    table = capsys.readouterr().out
    assert f"ours ({chosen.name})" in table and f"{chosen.name}, raw" in table
    groups = {row["group"] for row in rows}
    assert table.count("| 1.000 |") >= len(groups), "the best of each group is 1"


def test_a_run_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(backward: bool) -> None:
        if backward:
            raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(attention, "milliseconds", milliseconds)
    forward, both = attention.measured("ring", "k", "8K", 1e3, run)
    assert forward["ms"] > 0 and "error" not in forward
    assert (both["passes"], both["error"]) == ("forward + backward", "RuntimeError: no kernel")
    attention.show([forward, both])
    assert capsys.readouterr().out.count("| 8K |") == 1
