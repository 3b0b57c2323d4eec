from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.random import Generator, Philox

from engine.config import schema
from engine.data.index import build_index
from engine.data.mixes import draw, draw_documents, github, lognormal, write_jsonl

K = 1024


def lengths(name: str = "github", mean: float = 8192, sigma: float = 1.5, max_: int = 2048 * K) -> schema.Lengths:
    return schema.Lengths(name=name, mean=mean, sigma=sigma, max=max_)  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [2048 * K, 512 * K])
def test_github_has_the_token_shares_of_the_paper(longest: int) -> None:
    """ByteScale, evaluation, in percent of the tokens; a mix that is scaled has its shares at scaled bounds."""
    drawn = github(Generator(Philox(key=1)), lengths(max_=longest), 2_000_000)
    scale = longest / (2048 * K)
    share = {
        (low, high): 100 * drawn[(drawn > low * K * scale) & (drawn <= high * K * scale)].sum() / drawn.sum()
        for low, high in [(0, 2), (128, 256), (256, 512), (128, 2048), (256, 2048)]
    }
    stated = {(0, 2): 34.0, (128, 256): 6.4, (256, 512): 4.5, (128, 2048): 16.2, (256, 2048): 9.8}
    assert share == pytest.approx(stated, abs=0.5)
    assert drawn.max() <= longest


def test_github_above_2m_is_not_stretched() -> None:
    random = [Generator(Philox(key=1)) for _ in range(2)]
    plain, larger = (github(r, lengths(max_=m), 1000) for r, m in zip(random, (2048 * K, 8192 * K), strict=True))
    np.testing.assert_array_equal(plain, larger)


def test_lognormal_has_its_mean_and_spread() -> None:
    drawn = lognormal(Generator(Philox(key=1)), lengths("lognormal", mean=5000, sigma=0.5), 200_000)
    assert drawn.mean() == pytest.approx(5000, rel=0.01)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.01)


def test_lognormal_is_clipped() -> None:
    drawn = lognormal(Generator(Philox(key=1)), lengths("lognormal", mean=2, sigma=3, max_=64), 10_000)
    assert (drawn.min(), drawn.max()) == (1, 64)


@pytest.mark.parametrize("name", ["github", "lognormal"])
def test_a_step_is_as_full_as_it_can_be_and_cut_at_the_context(name: str) -> None:
    mix = lengths(name, max_=64 * K)
    documents = draw_documents(mix, 256 * K, seed=3)
    longer = draw_documents(mix, 512 * K, seed=3)
    assert documents.sum() <= 256 * K < longer[: len(documents) + 1].sum()
    sequences = draw(mix, 256 * K, context=4 * K, seed=3)
    assert sequences.dtype == np.int64
    assert sequences.sum() == documents.sum()
    assert sequences.min() >= 1 and sequences.max() == 4 * K


def test_a_document_longer_than_the_step_is_a_step_of_its_own() -> None:
    assert draw(lengths("lognormal", mean=1000, sigma=0.01), 10, context=400, seed=0).tolist()[:2] == [400, 400]


def test_a_draw_is_a_function_of_the_seed() -> None:
    first, again, other = (draw(lengths(), K * K, 64 * K, seed).tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_written_documents_have_the_lengths_that_were_asked(
    tmp_path: Path, make_data: Callable[..., schema.Data]
) -> None:
    text = "def f():\n\treturn 'é\"\\'\n".encode()
    write_jsonl(tmp_path / "mix.jsonl", [2, 3, 1000, 17], text, seed=5)
    index = build_index(make_data(tmp_path / "mix.jsonl", format="jsonl"))
    assert index.lengths.tolist() == [2, 3, 1000, 17]
    written = json.loads((tmp_path / "mix.jsonl").read_text().splitlines()[2])["text"]
    ascii_ = text.decode("latin1").replace("Ã", "?").replace("©", "?")
    assert written in ascii_ * 50
