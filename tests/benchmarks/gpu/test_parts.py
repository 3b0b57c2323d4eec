"""Every part has rows, and one that fails does not stop the others."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import parts

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", parts.PARTS)
def test_each_part_is_measured(name: str) -> None:
    rows = list(parts.attempted(name, CPU, parts.TINY))
    assert rows and all(row["part"] == name and row["ms"] > 0 for row in rows)


def test_quantisation_keeps_three_bits_of_mantissa() -> None:
    x, weight = (parts.random(CPU, rows, 256) for rows in (64, 32))
    exact = x.float() @ weight.float().T
    found = parts.scaled(parts.quantised(x), parts.quantised(weight), fast=True).float()
    error = float((found - exact).norm() / exact.norm())
    assert 0.005 < error < 2**-4
    values, scale = parts.quantised(x)
    assert float(values.float().abs().max()) == torch.finfo(parts.FP8).max
    assert float(scale) * 448 == pytest.approx(float(x.abs().max()), rel=1e-3)


def test_a_part_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "quantised", lambda x: 1 / 0)
    assert "error" in list(parts.attempted("fp8", CPU, parts.TINY))[-1]
