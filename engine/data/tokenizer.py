"""The byte-level tokenizer: one token per byte, and BOS and EOS at the start and end of a document.

A document of n bytes has n + 2 tokens: BOS, the bytes, EOS. All tokens but the last are inputs, all but the first are
labels.
"""

from __future__ import annotations

import numpy as np

from engine.units import Ints

BOS = 256
EOS = 257
VOCAB = 258


def encode(text: bytes, *, first: bool = True, last: bool = True) -> Ints:
    """Return the tokens of a text, int64. BOS is added if it is the `first` part of its document, EOS if the `last`."""
    tokens = np.empty(first + len(text) + last, dtype=np.int64)
    tokens[first : first + len(text)] = np.frombuffer(text, dtype=np.uint8)
    if first:
        tokens[0] = BOS
    if last:
        tokens[-1] = EOS
    return tokens
