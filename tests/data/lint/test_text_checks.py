"""Suspicious texts are told from good ones."""

# ruff: noqa: RUF001 - typographic characters are what is tested

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.lint import text_checks
from engine.data.lint.text_checks import longest_run, longest_run_of_ids, mojibake, suspicious

GOOD = {
    "German": "Größe, Straße und Übermaß – „so viel Spaß“, sagte er: «Ähnlich wie früher…»",
    "French": "Voilà\u00a0! «\u00a0Déjà\u00a0» dit-il, à «\u00a0Orléans\u00a0», où l’été fut «\u00a0rêvé\u00a0».",
    "Portuguese": "AMANHÃ… IRMÃ… «AMANHÃ» não é possível – informação às três",
    "Vietnamese": "Tiếng Việt là ngôn ngữ của người Việt, “à” và “ã”",
    "Russian": "Привет, «мир»! Это – хороший текст…",
    "Chinese": "这是一个很好的文本,“没有”错误。",
    "science": "areas of 12 Å² and 13 Å², volumes of 3 Å³ and 4 Å³, 8×½ by 3×¼ by 2×¾, ØØ²",
    "brands": "NESCAFÉ® and NESCAFÉ™, CAFÉ®, PATÉ™, ROSÉ®",
    "quotes": "“It’s 5° — that’s all…” £5 ½ ©",
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("copies", [1, 20])
def test_good_texts_are_not_suspicious(name: str, copies: int) -> None:
    assert list(suspicious(GOOD[name] * copies)) == []


@pytest.mark.parametrize("name", ["German", "French", "Portuguese", "Vietnamese", "Russian", "Chinese", "quotes"])
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
def test_the_same_texts_are_mojibake_after_a_wrong_conversion(name: str, encoding: str) -> None:
    raw = GOOD[name].encode()
    if encoding == "latin-1":
        wrong = raw.decode("latin-1")
    else:  # as browsers do: what Windows-1252 does not have stays as it is
        wrong = "".join(bytes([one]).decode("cp1252", "replace").replace("\ufffd", chr(one)) for one in raw)
    ((code, detail),) = suspicious(wrong)
    assert code == "L10"
    first = next(character for character in GOOD[name] if ord(character) > 127)
    assert f"which is {first!r}" in detail


@pytest.mark.parametrize("text", ["Ã©", "Ã©Ã©Ã©", "cafÃ© Ã ", "AMANHÃ… Â» Ã© – é, è, à, û, ü, ö"])
def test_too_little_is_not_certain(text: str) -> None:
    assert mojibake(text) == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\0b\0", [("L11", "contains NUL at character 1")]),
        ("ab\ufeffc", [("L12", "contains a byte order mark, U+FEFF, at character 2")]),
        ("a\ufffdb\ufffdc\ufffd", [("L09", "contains U+FFFD 3 times in 6 characters")]),
        ("a\ufffdb\ufffdc", []),
        ("\ufffd" * 3 + "ab " * 1000, []),
        ("ab" + "-" * 1000, [("L13", "repeats '-' 1,000 times from character 2 on")]),
        ("ab" + "\u3000" * 1500 + "c", [("L13", "repeats '\\u3000' 1,500 times from character 2 on")]),
        ("-" * 999, []),
        ("", []),
    ],
)
def test_what_is_found(text: str, found: list[tuple[str, str]]) -> None:
    assert list(suspicious(text)) == found


RUNS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 25)), max_size=20)


@given(RUNS)
def test_runs_agree_with_a_loop(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * length for character, length in runs)
    longest, at, start = 0, 0, 0
    for position in range(len(text) + 1):
        if position == len(text) or text[position] != text[start]:
            if position - start > longest:
                longest, at = position - start, start
            start = position
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    assert longest_run_of_ids(ids) == (longest, at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_checks, "RUN", 8)
        assert longest_run(text) == ((longest, at) if longest >= 8 else (0, 0))
