"""A sequence that is read in pieces has the attention of the whole, so generated text is that of the trained model."""

from __future__ import annotations

import pytest
import torch

from engine.models.common.attention import LocalAttention
from engine.models.common.cached_attention import CachedAttention


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 6]])
def test_pieces_attend_as_the_whole_does(pieces: list[int]) -> None:
    """Two layers with different keys, 4 query heads on 2 key heads; the cache is larger than the sequence."""
    torch.manual_seed(0)
    layers = [tuple(torch.randn(12, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)) for _ in range(2)]
    whole = LocalAttention(torch.arange(12))
    cached, found = CachedAttention(2, 15), list[list[torch.Tensor]]([[], []])
    split = [[part.split(pieces) for part in layer] for layer in layers]
    for number, _ in enumerate(pieces):
        for layer, parts in enumerate(split):
            found[layer].append(cached.at(layer)(*(part[number] for part in parts)))
        assert cached.tokens == sum(pieces[: number + 1])
    for outs, (q, k, v) in zip(found, layers, strict=True):
        torch.testing.assert_close(torch.cat(outs), whole(q, k, v), rtol=1e-12, atol=1e-12)
