"""The byte-level tokenizer: a token is a byte, and two more mark the ends of a document. Nothing to download.

A document of n text bytes is n + 2 tokens: BOS, the bytes, EOS. All but the last are its inputs, all but the first its
labels.
"""

from __future__ import annotations

import numpy as np

from engine.planner.plan import Ints

BOS = 256
EOS = 257
VOCAB = 258


def encode(text: bytes, *, first: bool = True, last: bool = True) -> Ints:
    """Return the tokens of a text: BOS before it if it is the first of its document, EOS after it if it is the last."""
    tokens = np.empty(first + len(text) + last, dtype=np.int64)
    tokens[first : first + len(text)] = np.frombuffer(text, dtype=np.uint8)
    if first:
        tokens[0] = BOS
    if last:
        tokens[-1] = EOS
    return tokens
