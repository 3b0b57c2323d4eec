"""Lists of layer kinds: parts of them, and equal kinds merged."""

from __future__ import annotations

from engine.family.layers import LayerKind, merged, part

# Every second of six layers has a window; the last three have experts.
KINDS = (
    LayerKind(1, None, experts=False),
    LayerKind(1, 4096, experts=False),
    LayerKind(1, None, experts=False),
    LayerKind(1, 4096, experts=True),
    LayerKind(1, None, experts=True),
    LayerKind(1, 4096, experts=True),
)


def test_equal_kinds_are_merged_in_the_order_of_their_first_layers() -> None:
    assert merged(KINDS) == (
        LayerKind(2, None, experts=False),
        LayerKind(1, 4096, experts=False),
        LayerKind(2, 4096, experts=True),
        LayerKind(1, None, experts=True),
    )


def test_a_part_has_the_layers_of_its_numbers() -> None:
    alike = (LayerKind(3, None, experts=False), LayerKind(4, 8, experts=False))
    each = [kind for kind in alike for _ in range(kind.count)]
    for first in range(8):
        for stop in range(first, 8):
            found = [kind for kind in part(alike, range(first, stop)) for _ in range(kind.count)]
            assert [kind.window for kind in found] == [kind.window for kind in each[first:stop]]
