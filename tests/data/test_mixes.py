from __future__ import annotations

import hashlib
import subprocess
import sys
import time

import numpy as np
import pytest
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from engine.config import schema
from engine.data.mixes import MIXES, byted, draw, draw_documents, equal, github, lognormal

K = 1024


def lengths(name: str = "github", mean: float = 8192, sigma: float = 1.5, max_: int = 2048 * K) -> schema.Lengths:
    return schema.Lengths(name=name, path=None, mean=mean, sigma=sigma, max=max_)  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [2048 * K, 512 * K])
def test_github_has_the_token_percentages_of_the_paper(longest: int) -> None:
    """ByteScale, evaluation, in percent of the tokens; a scaled mix has the same percentages at scaled bounds."""
    drawn = github(Generator(Philox(key=1)), lengths(max_=longest), 2_000_000)
    scale = longest / (2048 * K)
    share = {
        (low, high): 100 * drawn[(drawn > low * K * scale) & (drawn <= high * K * scale)].sum() / drawn.sum()
        for low, high in [(0, 2), (128, 256), (256, 512), (128, 2048), (256, 2048)]
    }
    stated = {(0, 2): 34.0, (128, 256): 6.4, (256, 512): 4.5, (128, 2048): 16.2, (256, 2048): 9.8}
    assert share == pytest.approx(stated, abs=0.5)
    assert drawn.max() <= longest


@pytest.mark.parametrize("longest", [2048 * K, 512 * K])
def test_byted_has_the_percentages_of_the_paper(longest: int) -> None:
    """ByteScale, evaluation; tolerances are four standard errors of this many documents, and the paper's rounding."""
    drawn = byted(Generator(Philox(key=1)), lengths(max_=longest), 2_000_000)
    scale, tokens = longest / (2048 * K), drawn.sum()

    def documents(chosen: NDArray[np.bool_]) -> float:
        return float(100 * chosen.mean())

    def share(chosen: NDArray[np.bool_]) -> float:
        return float(100 * drawn[chosen].sum() / tokens)

    assert documents(drawn <= 4 * K * scale) == pytest.approx(80, abs=0.5)
    assert documents(drawn >= 128 * K * scale) == pytest.approx(1, abs=0.03)
    assert share(drawn >= 128 * K * scale) == pytest.approx(44.3, abs=0.7)
    assert share(drawn > 256 * K * scale) == pytest.approx(37, abs=0.7)
    assert documents(drawn == longest) == pytest.approx(0.05, abs=0.0064)
    assert share(drawn == longest) == pytest.approx(12.1, abs=1.3)
    assert drawn.mean() == pytest.approx(8700 * scale, rel=0.03)
    assert drawn.max() == longest


def test_equal_documents_are_as_long_as_lengths_max() -> None:
    assert equal(Generator(Philox(key=1)), lengths("equal", max_=5), 3).tolist() == [5, 5, 5]
    assert draw(lengths("equal", max_=1024 * K), 1024 * K, 1024 * K, 1).tolist() == [1024 * K]
    assert draw(lengths("equal", max_=1024 * K), 2048 * K, 512 * K, 1).tolist() == [512 * K] * 4


def test_a_step_of_byted_is_as_large_as_the_paper_says() -> None:
    """A batch of 32M tokens is about 3,900 documents, of which about 2 have 2M."""
    steps = [draw_documents(lengths("byted"), 32 * K * K, seed) for seed in range(40)]
    assert np.mean([len(step) for step in steps]) == pytest.approx(3900, rel=0.05)
    assert np.mean([(step == 2048 * K).sum() for step in steps]) == pytest.approx(2, abs=0.7)


@pytest.mark.parametrize("name", ["github", "byted"])
def test_a_mix_of_the_paper_above_2m_is_not_stretched(name: str) -> None:
    random = [Generator(Philox(key=1)) for _ in range(2)]
    plain, larger = (MIXES[name](r, lengths(max_=m), 1000) for r, m in zip(random, (2048 * K, 8192 * K), strict=True))
    np.testing.assert_array_equal(plain, larger)


def test_lognormal_has_its_mean_and_spread() -> None:
    drawn = lognormal(Generator(Philox(key=1)), lengths("lognormal", mean=5000, sigma=0.5), 200_000)
    assert drawn.mean() == pytest.approx(5000, rel=0.01)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.01)


def test_lognormal_is_clipped() -> None:
    drawn = lognormal(Generator(Philox(key=1)), lengths("lognormal", mean=2, sigma=3, max_=64), 10_000)
    assert (drawn.min(), drawn.max()) == (1, 64)


@pytest.mark.parametrize("name", ["github", "byted", "lognormal"])
def test_a_step_is_as_full_as_it_can_be_and_cut_at_the_context(name: str) -> None:
    mix = lengths(name, max_=64 * K)
    documents = draw_documents(mix, 256 * K, seed=3)
    longer = draw_documents(mix, 512 * K, seed=3)
    assert documents.sum() <= 256 * K < longer[: len(documents) + 1].sum()
    sequences = draw(mix, 256 * K, context=4 * K, seed=3)
    assert sequences.dtype == np.int64
    assert sequences.sum() == documents.sum()
    assert sequences.min() >= 1 and sequences.max() == 4 * K


def test_a_document_longer_than_the_step_is_a_step_by_itself() -> None:
    assert draw(lengths("lognormal", mean=1000, sigma=0.01), 10, context=400, seed=0).tolist()[:2] == [400, 400]


def test_a_draw_is_a_function_of_the_seed() -> None:
    first, again, other = (draw(lengths(), K * K, 64 * K, seed).tolist() for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("name", sorted(MIXES))
def test_every_process_draws_the_same(name: str) -> None:
    """Otherwise ranks that draw by themselves would plan different steps."""
    code = (
        "import hashlib; from engine.config.schema import Lengths; from engine.data.mixes import draw;"
        f"mix = Lengths(name={name!r}, path=None, mean=8192, sigma=1.5, max=2**21);"
        "print(hashlib.sha256(draw(mix, 2**24, 2**18, 3).tobytes()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = draw(lengths(name), 2**24, 2**18, seed=3)
    assert done.stdout.strip() == hashlib.sha256(own.tobytes()).hexdigest()


def test_as_many_documents_as_the_largest_cluster_takes_are_drawn_in_milliseconds() -> None:
    """131,072 documents; a loop over them in Python would take a hundred times as long."""
    for mix in MIXES.values():
        started = time.process_time()
        mix(Generator(Philox(key=1)), lengths(), 131_072)
        assert time.process_time() - started < 0.1
