"""What a GPU will be asked for runs here, small and on the CPU: only the clock is another one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.attention import DEGREE, TINY
from engine.trainer.model import kernel_of

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


def test_every_group_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = kernel_of(TINY.config, CPU, DEGREE)
    rows = list(attention.cases(CPU, chosen, TINY))
    assert (rows[0]["lengths"], rows[-1]["lengths"]) == ("0K", "1K"), "the longest comes last"
    lengths = {row["lengths"] for row in rows}
    of_plans = {"step 0", "step 1"}
    rings = {"ring of 8, 32 a rank", "ring of 8, 32 a rank, 4 rounds a call"}
    assert lengths - of_plans - rings == {"0K", "1K", "4 of 64", "4 unequal", "1 of 128", "1 of 90"}
    assert rings <= lengths
    assert all(float(row["ms"]) > 0 and float(row["tflops_per_s"]) > 0 for row in rows)
    assert {row["lengths"] for row in rows if row.get("first_ms", 0) > 0} == of_plans
    attention.show(rows)
    table = capsys.readouterr().out
    assert f"ours ({chosen.name})" in table and f"{chosen.name}, raw" in table
    groups = {row["group"] for row in rows}
    assert table.count("| 1.000 |") >= len(groups), "the best of each group is 1"
