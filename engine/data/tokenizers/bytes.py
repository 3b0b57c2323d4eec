"""The byte tokenizer: one id per byte, any file accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.data.tokenizers.tokenizer import Ids, Loaded

BOS = 256
EOS = 257


class ByteCodec:
    """Ids 0 to 255 are the bytes."""

    def encode(self, text: str | bytes) -> Ids:
        """Return the bytes of a text, [n]."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; BOS and EOS are left out."""
        return bytes(token for token in ids if token < BOS).decode("utf-8", "replace")


def load() -> Loaded:
    """Return the byte tokenizer."""
    return Loaded(ByteCodec(), EOS + 1, BOS, EOS, adds_bos=True)
