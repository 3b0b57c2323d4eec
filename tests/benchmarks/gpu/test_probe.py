"""The probe's questions, asked in tiny sizes of stand-ins for the GPU's kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import probe as probing
from benchmarks.gpu.probe import TINY, Kernels, Probe, Sizes, planned_shapes
from engine.attention.kernels import cpu, reference
from engine.attention.kernels.call import Call, Functions
from engine.attention.layout import Layout

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


def spoilt(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = cpu.load().forward(q, k, v, call)
    return out + 1, lse


def nan_dq(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    """As cuDNN: dq is NaN for 64 keys modulo 128 and a low log-sum-exp."""
    dq, dk, dv = cpu.load().backward(*arguments)  # type: ignore[arg-type]
    if arguments[2].shape[0] % 128 == 64 and float(arguments[5].max()) < -88.7:  # type: ignore[attr-defined]
        dq = dq * float("nan")
    return dq, dk, dv


def probe(cudnn: Functions | None = None) -> Probe:
    return Probe(CPU, TINY, Kernels(cudnn or cpu.load(), reference.load()))


def test_builds_are_asked_for_shapes_of_plans_and_in_another_thread() -> None:
    rows = probing.builds(probe())
    assert [row["thread"] for row in rows] == ["main"] * (len(rows) - 1) + ["another"]
    assert {row["causal"] for row in rows} == {True, False}
    assert all(min(row[f"{call}_{way}_ms"] for call in ("first", "then") for way in ("forward", "backward")) > 0
               for row in rows)  # fmt: skip
    shapes = [(row["queries"], row["keys"]) for row in rows[:-1]]
    assert len(set(shapes)) == len(shapes)


def test_shapes_come_from_plans() -> None:
    """Whole sequences fit a rank; blocks of rings have the queries of a part of the shard, or its keys."""
    shapes = planned_shapes(Sizes())
    whole, blocks = [s for s in shapes if s[2]], [s for s in shapes if not s[2]]
    assert len(whole) == len(blocks) == 3
    assert all(queries == keys <= 8192 for queries, keys, _ in whole)
    assert all(queries != keys and max(queries, keys) > 1024 for queries, keys, _ in blocks)


def test_gradients_that_are_not_finite_are_counted() -> None:
    rows = probing.low(probe(Functions(cpu.load().forward, nan_dq)))
    found = {(row["queries"], row["keys"], row["kernel"]): row["not_finite"] for row in rows}
    assert found[72, 64, "cudnn"] == [72 * 4 * 16, 0, 0]
    assert found[72, 64, "varlen"] == found[1, 96, "cudnn"] == [0, 0, 0]
    assert all(row["lse"] == pytest.approx(-120 + 4, abs=3) for row in rows)


def test_a_ring_on_one_device_agrees_with_attention() -> None:
    right = probing.ring(probe())
    assert [(row["rounds_per_call"], row["team"]) for row in right] == [(1, 1), (4, 1), (4, 2)]
    for row in right:
        assert (row["tokens"], row["merge"], row["ranks"], row["holds"]) == (67, "uncompiled", 8, True)
        assert len(row["errors"]) == 4 and max(row["errors"]) < 0.02
    assert not any(row["holds"] for row in probing.ring(probe(Functions(spoilt, cpu.load().backward))))


def test_the_fault_of_a_rank_is_reported_not_that_its_neighbours_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PATIENCE_S", 0.5)
    both_passes = probing.both_passes

    def failing(tensors: Any, one: Layout, *more: Any) -> list[Tensor]:
        if one.rings[0].shard.part == 5:
            raise RuntimeError("no plan")
        return both_passes(tensors, one, *more)

    monkeypatch.setattr(probing, "both_passes", failing)
    with pytest.raises(RuntimeError, match="no plan"):
        probing.ring(probe())


def test_a_ring_has_the_merge_of_training_and_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(out: Tensor, *others: Tensor) -> None:
        out.add_(1)

    monkeypatch.setattr(probing, "choose_merge", lambda *_: wrong)
    found = {row["merge"]: row["holds"] for row in probing.ring(probe())}
    assert found == {"compiled": False, "uncompiled": True}


def test_rates_of_both_kernels() -> None:
    rows = probing.rates(probe())
    assert [(row["length"], row["kernel"]) for row in rows] == [
        (64, "cudnn"), (64, "varlen"), (128, "cudnn"), (128, "varlen")
    ]  # fmt: skip
    assert all(row["forward_tflops"] > 0 < row["backward_tflops"] for row in rows)


def test_kernels_that_differ_are_seen() -> None:
    assert all(max(row["difference"]) < 0.05 for row in probing.agreement(probe()))
    wrong = probing.agreement(probe(Functions(spoilt, cpu.load().backward)))
    assert all(row["difference"][0] > 0.1 for row in wrong)


def test_cudnn_is_asked_for_calls_that_our_rules_keep_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        calls.append(q.shape)
        return q, q[..., :1]

    operators = SimpleNamespace(_scaled_dot_product_cudnn_attention=attend)
    monkeypatch.setattr(torch.ops, "aten", operators, raising=False)
    kernel = Kernels.on(torch.device("cuda")).cudnn
    q, k = torch.zeros(2, 4, 16), torch.zeros(64, 2, 16)
    kernel.forward(q, k, k, Call((0, 2), (0, 64), causal=False))
    assert calls == [(1, 4, 2, 16)]


def test_a_question_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(asked: Probe) -> list[dict[str, object]]:
        raise RuntimeError("no plan")

    written: list[list[dict[str, object]]] = []
    monkeypatch.setattr(probing, "QUESTIONS", {"low": fail, "ring": probing.ring})
    monkeypatch.setattr(probing.on_gpu, "write", lambda path, device, rows: written.append(list(rows)))
    monkeypatch.setattr("sys.argv", ["probe", "--dry-run"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as left:
        probing.main()
    assert left.value.code == 1
    assert [len(rows) for rows in written] == [1, 4], "written after each question"
    assert written[0] == [{"question": "low", "error": "RuntimeError: no plan"}]
    assert "question ring, tokens 67, merge uncompiled, ranks 8" in capsys.readouterr().out
