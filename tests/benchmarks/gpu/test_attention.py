"""What a GPU will be asked for runs here, small and on the CPU: only the clock is another one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import attention
from benchmarks.gpu.attention import DEGREE, TINY, Sizes
from engine.attention.kernels.call import Kernel, merge
from engine.config.schema import Config
from engine.trainer.model import kernel_of

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


def test_the_kernel_is_that_of_training_at_these_sizes() -> None:
    for sizes in (TINY, Sizes()):
        model = sizes.config.model
        assert (model.heads, model.kv_heads, model.head_dim) == (sizes.heads, sizes.groups, sizes.head_dim)
        assert sizes.config.dtype == "bf16"


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


def test_a_run_that_fails_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    def run(backward: bool) -> None:
        if backward:
            raise RuntimeError("no kernel\nfor this")

    forward, both = attention.measured("ring", "k", "8K", 1e3, run, CPU, TINY)
    assert forward["ms"] > 0 and "error" not in forward
    assert (both["passes"], both["error"]) == ("forward + backward", "RuntimeError: no kernel")
    attention.show([forward, both])
    assert capsys.readouterr().out.count("| 8K |") == 1


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attention.json"
    written: list[int] = []

    def cases(*_: object) -> Any:
        for ms in (1.0, 2.0):
            yield {"group": "ring, forward", "kernel": "k", "lengths": "8K", "passes": "forward"} | {
                "ms": ms,
                "tflops_per_s": 1.0,
            }
            written.append(len(json.loads(path.read_text())["rows"]))
        raise RuntimeError("no room")

    monkeypatch.setattr(attention, "cases", cases)
    monkeypatch.setattr("sys.argv", ["attention", "--dry-run", "--json", str(path)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match="no room"):
        attention.main()
    assert written == [1, 2]


def test_the_ring_has_the_merge_of_training_and_the_plain_one() -> None:
    used: list[str] = []

    def compiled(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        used.append("compiled")
        merge(out, lse, part_out, part_lse)

    plain = kernel_of(TINY.config, CPU, DEGREE)
    rows = []
    for row in attention.ring(CPU, replace(plain, merge=compiled), TINY):
        rows.append((row["kernel"], row["passes"], len(used) > 0))
        used.clear()
    ours, other = f"ours ({plain.name})", f"{plain.name}, uncompiled merge"
    assert [(name, merged) for name, passes, merged in rows if passes == "forward"] == [
        (ours, True),
        (other, False),
        (ours, True),  # with several rounds a call
        (f"{plain.name}, raw", False),
    ]
    assert len(list(attention.ring(CPU, plain, TINY))) == 6, "the plain merge is measured once"


def test_only_the_steps_of_plans_use_the_rule_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other cases repeat a shape, for which cuDNN would serve the later calls only."""

    def kernel(config: Config, device: torch.device, ranks: int, plan_build_s: float | None = None) -> Kernel:
        return replace(kernel_of(config, device, ranks), name=f"plans after {plan_build_s} s")

    monkeypatch.setattr(attention, "kernel_of", kernel)
    training = replace(kernel_of(TINY.config, CPU, DEGREE), name="training's")
    found = {(row["kernel"], row["group"].split()[0].rstrip(",")) for row in attention.cases(CPU, training, TINY)}
    ours = {(name, group) for name, group in found if name.startswith("ours")}
    assert ours == {
        ("ours (training's)", "plan"),
        *(("ours (plans after 0.0 s)", group) for group in ("kernels", "ring", "packing")),
    }
