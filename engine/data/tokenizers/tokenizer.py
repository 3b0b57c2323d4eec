from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Tokenizer(Protocol):
    kind: str
    fingerprint: str
    vocabulary: int
    bos: int | None
    eos: int | None

    def document(self, text: bytes) -> NDArray[np.int32]: ...
