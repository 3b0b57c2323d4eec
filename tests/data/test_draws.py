from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from engine.data.draws import QUEUED, Draws
from engine.data.mixture import Mixer, scaled


def test_only_the_draws_of_a_step_load_numba() -> None:
    """It takes .3 s and 60 MiB. The launcher and commands that do not plan import these modules, too."""
    code = "import sys, engine.data.lengths, engine.data.overview, engine.data.steps; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def mixer(**weights: float) -> Mixer:
    made = Mixer(weights)
    made.weights = scaled(weights)
    return made


def test_sources_are_asked_when_they_are_due() -> None:
    """For weights 3 and 1; the last document does not fit, and is not taken."""
    draws = Draws(mixer(a=3, b=1), 24)
    assert draws.run() == "a"
    draws.give("a", np.array([8, 8]))
    assert draws.run() == "b"
    draws.give("b", np.array([4, 4, 4]))
    assert draws.run() == "a", "both documents were taken"
    draws.give("a", np.array([1]))
    assert draws.run() is None
    assert [column.tolist() for column in draws.parts] == [[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0], [8, 4, 8, 4]]
    assert (draws.tokens, draws.count) == (24, 4)
    assert (draws.used("a"), draws.used("b")) == ((0, 0), (2, 0))
    assert draws.mixer.taken.tolist() == [16, 8] and draws.mixer.longest == 8


def test_long_documents_are_given_in_pieces_that_a_step_may_begin_in() -> None:
    draws = Draws(mixer(a=1), 10, piece=4)
    assert draws.run() == "a"
    draws.give("a", np.array([25]), start=3)
    assert draws.run() is None
    assert [column.tolist() for column in draws.parts[2:]] == [[3, 7], [4, 4]]
    assert draws.used("a") == (0, 11)


def test_at_most_so_many_parts_are_drawn() -> None:
    draws = Draws(mixer(a=1), 1 << 30, most=3)
    while (name := draws.run()) is not None:
        draws.give(name, np.array([5, 5]))
    assert (draws.count, draws.used("a")) == (3, (1, 0))


def test_a_step_has_as_many_documents_as_fit() -> None:
    """Many queues, and more parts than there is memory for at first."""
    draws, given = Draws(mixer(a=1, b=1), 50_000), 0
    while (name := draws.run()) is not None:
        draws.give(name, np.full(QUEUED, 3))
        given += 1
    assert draws.count == 50_000 // 3 and given > 16
    assert draws.parts.document[draws.parts.source == 1].tolist() == list(range(draws.count // 2))


def test_a_mixture_of_which_no_source_is_left_gives_nothing() -> None:
    dropped = mixer(a=1)
    dropped.drop("a")
    for empty in (dropped, Mixer(["a", "b"]), Mixer([])):
        draws = Draws(empty, 10)
        assert draws.run() is None and draws.count == 0 and not len(draws.parts.length)


def test_a_source_gives_nothing_before_all_was_taken() -> None:
    draws = Draws(mixer(a=1), 4)
    assert draws.run() == "a"
    draws.give("a", np.array([3, 3]))
    assert draws.run() is None
    with pytest.raises(AssertionError):
        draws.give("a", np.array([3]))
