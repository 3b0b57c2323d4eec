"""NaN and infinity are found at every place, in every dtype that weights may have."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.weights import finite
from engine.weights.finite import STORED, is_finite, not_finite, not_finite_error
from engine.weights.folder import SINGLE, read_headers

BAD = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("dtype", STORED.values())
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_at_every_place(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert is_finite(tensor)
    assert is_finite(torch.full((size,), torch.finfo(dtype).max, dtype=dtype))
    for value in BAD:
        for at in {0, size // 2, size - 1}:
            changed = tensor.clone()
            changed[at] = value
            assert not is_finite(changed), (value, at)


@pytest.mark.parametrize("piece", [8, 24, 1 << 24])
def test_a_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Each tensor is read from its first byte to its last, without bytes of its neighbours."""
    monkeypatch.setattr(finite, "_PIECE_BYTES", piece)
    tensors = {f"{name}{at}": torch.zeros(5, 3, dtype=dtype) for name, dtype in STORED.items() for at in range(3)}
    tensors |= {f"{name}1": torch.ones(5, 3, dtype=dtype) for name, dtype in STORED.items()}
    for name, tensor in tensors.items():
        if name.endswith("1"):
            tensor[-1 if name.startswith("B") else 0, -1 if name.startswith("B") else 0] = math.nan
    save_file({**tensors, "whole": torch.full((4,), -1)}, tmp_path / SINGLE)
    found = not_finite(tmp_path / SINGLE, read_headers(tmp_path).items())
    assert sorted(found) == sorted(f"{name}1" for name in STORED)


def test_the_first_are_named(tmp_path: Path) -> None:
    assert str(not_finite_error(["a"], tmp_path)) == "NaN or infinity in a"
    assert str(not_finite_error(list("abcde"), tmp_path)) == "NaN or infinity in a, b, c and 2 more tensors"
    assert not_finite_error(["a"], tmp_path).problems[0].hint
