from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from engine.zero.partition import places

SIZES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=3)


def flats(groups: list[dict[str, int]], stage: int, ranks: int) -> list[list[list[tuple[str, int] | None]]]:
    """What each rank stores in its flat tensors, element by element, by DeepSpeed's rule; None is padding."""
    stored: list[list[list[tuple[str, int] | None]]] = [[] for _ in range(ranks)]
    for sizes in groups:
        runs: list[list[tuple[str, int] | None]] = [[(name, e) for e in range(size)] for name, size in sizes.items()]
        runs, unit = (runs, ranks) if stage == 3 else ([list(chain(*runs))], 2 * ranks)
        for rank in range(ranks):
            flat: list[tuple[str, int] | None] = []
            for run in runs:
                padded = [*run, *[None] * (-len(run) % unit)]
                part = len(padded) // ranks
                flat += padded[rank * part : (rank + 1) * part]
            stored[rank].append(flat)
    return stored


@given(SIZES, st.sampled_from([1, 2, 3]), st.integers(1, 9), st.data())
def test_places_are_those_of_deepspeed(sizes: list[list[int]], stage: int, ranks: int, data: st.DataObject) -> None:
    """If not, a resumed run trains with the weights and moments of other parameters."""
    groups = [{f"{group}.{i}": size for i, size in enumerate(row)} for group, row in enumerate(sizes)]
    stored = flats(groups, stage, ranks)
    found = places(groups, [len(flat) for flat in stored[0]], stage, ranks)
    assert list(found) == [name for group in groups for name in group]
    for name, place in found.items():
        seen = []
        for rank in range(ranks):
            start, stop, at = place.on_rank(rank)
            flat = stored[rank][place.group]
            assert flat[at : at + max(0, stop - start)] == [(name, e) for e in range(start, stop)]
            seen += range(start, stop)
        assert seen == list(range(place.size))
        start = data.draw(st.integers(0, place.size))
        stop = data.draw(st.integers(start, place.size))
        read = [stored[rank][place.group][at : at + count] for rank, at, count in place.pieces(start, stop)]
        assert all(read), "no piece is empty"
        assert list(chain(*read)) == [(name, e) for e in range(start, stop)]


def test_a_rank_0_that_stores_a_whole_group_may_be_given_without_its_padding() -> None:
    """DeepSpeed saves the master weights of stages 1 and 2 without padding."""
    (place,) = places([{"a": 1}], [1], 1, 2).values()
    assert list(place.pieces(0, 1)) == [(0, 0, 1)]
