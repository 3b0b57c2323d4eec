"""The probe's questions, asked in tiny sizes of stand-ins for the GPU's kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import probe as probing
from benchmarks.gpu.probe import TINY, Kernels, Probe
from engine.attention.kernels import cpu, reference
from engine.attention.kernels.call import Call, Functions

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
