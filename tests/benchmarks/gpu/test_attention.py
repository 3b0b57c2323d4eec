"""What a GPU will be asked for runs here, small and on the CPU: only the clock is another one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.attention import TINY
from engine.attention.kernels.choice import choose

CPU = torch.device("cpu")


def test_every_group_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = choose(CPU, attention.DTYPE, TINY.head_dim)
    parts = (attention.raw_and_seam, attention.packing, attention.ring, attention.plans_of_a_rank)
    rows = [row for part in parts for row in part(CPU, chosen, TINY)]
    lengths = {row["lengths"] for row in rows}
    of_plans = {"step 0", "step 1"}
    assert lengths - of_plans == {"0K", "1K", "4 of 64", "4 unequal", "1 of 128", "ring of 8, 32 a rank", "1 of 90"}
    assert all(float(row["ms"]) > 0 and float(row["tflops_per_s"]) > 0 for row in rows)
    assert {row["lengths"] for row in rows if row.get("first_ms", 0) > 0} == of_plans
    attention.show(rows)
    table = capsys.readouterr().out
    assert f"ours ({chosen.name})" in table and f"{chosen.name}, raw" in table
    groups = {row["group"] for row in rows}
    assert table.count("| 1.000 |") >= len(groups), "the best of each group is 1"


def test_a_run_that_fails_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    def run(backward: bool) -> None:
        if backward:
            raise RuntimeError("no kernel\nfor this")

    forward, both = attention.measured("ring", "k", "8K", 1e3, run, CPU, TINY)
    assert forward["ms"] > 0 and "error" not in forward
    assert (both["passes"], both["error"]) == ("forward + backward", "RuntimeError: no kernel")
    attention.show([forward, both])
    assert capsys.readouterr().out.count("| 8K |") == 1
