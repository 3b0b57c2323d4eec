"""Hugging Face's `tokenizer.json`, read by the package tokenizers.

Note: [special tokens in text]. The library finds added tokens in any text. `encode_special_tokens` switches that off
for special ones; others, such as runs of spaces, are ordinary vocabulary and stay. It does not reach the model: one
with "</s>" in its vocabulary (Unigram, word level) still encodes that text as the special id. So ids are checked, and a
document with such a text is rejected. The texts of chat templates contain special tokens: there the option is off.

Time grows about linearly, also for runs without spaces (1M letters: .6 s). Memory is large: about 420 bytes a token
while a document is encoded, almost 1 GB for 2M tokens. `encode_batch_fast` leaves out offsets; `encode` takes 530 bytes
a token, and up to twice the time.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.data.tokenizers.chat import CONFIG, Chats, read_settings, read_templates, read_variables
from engine.data.tokenizers.tokenizer import MOST_TOKENS, Ids, Loaded, as_text
from engine.errors import DataError
from engine.readers import AGAIN
from engine.units import Ints

if TYPE_CHECKING:
    import tokenizers

_MOST_GROWTH = 16
_SHORT = 64  # bytes that replace a character or are put before a text; NFKC turns one character into 18


class HuggingFaceCodec:
    """`special` [vocabulary] is true for ids that must not come from a text."""

    def __init__(self, model: tokenizers.Tokenizer, special: set[int], vocabulary: int) -> None:
        self._model = model
        self._special = np.zeros(vocabulary, dtype=np.bool_)
        self._special[list(special)] = True

    def encode(self, text: str | bytes) -> Ids:
        """Return the ids of a text, [n]. Raises DataError if one is special, see Note: [special tokens in text]."""
        (encoding,) = self._model.encode_batch_fast([as_text(text)], add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        found = self._special[ids]
        if found.any():
            token = int(ids[found.argmax()])
            name = self._model.id_to_token(token)
            message = (
                f"contains {name!r} or text that the tokenizer cannot distinguish from this special token (id {token})"
            )
            raise DataError(message, hint=f"remove {name!r} from the document, or leave the document out")
        return ids

    def encode_rendered(self, text: str) -> tuple[Ids, Ints]:
        """Encode the text of a chat template: special tokens count as such. See `chat.ChatCodec`."""
        self._model.encode_special_tokens = False
        try:
            encoding = self._model.encode(text, add_special_tokens=False)
        finally:
            self._model.encode_special_tokens = True
        return np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def special(self, ids: Ids) -> NDArray[np.bool_]:
        """Return which ids are those of special tokens, [n]."""
        found: NDArray[np.bool_] = self._special[ids]
        return found

    @property
    def special_names(self) -> list[str]:
        """The texts of all special tokens."""
        return [str(self._model.id_to_token(int(token))) for token in np.flatnonzero(self._special)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens by name."""
        return self._model.decode(ids, skip_special_tokens=False)


def load(path: Path, content: bytes, data: dict[str, Any]) -> Loaded:
    """Open a tokenizer.json, given as bytes and as parsed JSON, with the tokenizer_config.json beside it if it exists.

    BOS and EOS are those that tokenizer_config.json names, else those that the post-processor adds. BOS is added if
    `add_bos_token` is true; without that key, if the post-processor adds a token at the beginning. Raises DataError.

    Sets TOKENIZERS_PARALLELISM=false unless it is set: the library would start a thread per core for single texts too.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    # A file of another author could make a process run out of memory with a few bytes of text.
    for part in ("normalizer", "decoder"):
        if _growth(data.get(part)) > _MOST_GROWTH:
            message = f"has a {part} that makes a text more than {_MOST_GROWTH} times as long"
            raise DataError(message, key=str(path), hint="remove its long replacements")
    try:
        model = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        hint = "save it again with a newer version of tokenizers, or update that package"
        raise DataError(
            f"is not a tokenizer.json that tokenizers can read: {error}", key=str(path), hint=hint
        ) from error
    if data["model"].get("dropout"):
        raise DataError(
            "encodes at random (model.dropout)", key=str(path), hint="set model.dropout to null in the file"
        )
    model.no_truncation()  # files saved after fine-tuning often have both
    model.no_padding()
    model.encode_special_tokens = True

    # A trial shows what the post-processor adds before and after a text; its description in the file has many forms.
    marks = model.encode("a")
    mask = marks.special_tokens_mask
    before, after = mask.index(0), mask[::-1].index(0)
    model.post_processor = None  # BOS is ours to add, and it leaves white space out of the offsets of tokens
    config = read_settings(path.with_name(CONFIG))
    bos = _named("bos_token", config, model, path) if config.get("bos_token") else marks.ids[0] if before else None
    eos = _named("eos_token", config, model, path) if config.get("eos_token") else marks.ids[-1] if after else None
    adds_bos = config.get("add_bos_token")

    # Ids that a text must never have (Note: [special tokens in text]).
    special = {token for token, added in model.get_added_tokens_decoder().items() if added.special}
    special.discard(_unknown(data["model"], model))  # ordinary text may contain unknown tokens
    special |= {token for token in (bos, eos) if token is not None}
    vocabulary = max(model.get_vocab(with_added_tokens=True).values(), default=0) + 1
    if vocabulary > MOST_TOKENS:
        message = f"has the id {vocabulary - 1:,}; a vocabulary has at most {MOST_TOKENS:,} tokens"
        raise DataError(message, key=str(path), hint=AGAIN)
    codec = HuggingFaceCodec(model, special, vocabulary)
    templates = read_templates(path.parent, config)
    ends = {"bos_token": bos, "eos_token": eos}
    names = {key: str(model.id_to_token(token)) for key, token in ends.items() if token is not None}
    chats = Chats(codec, templates, names | read_variables(path.parent, config)) if templates else None
    return Loaded(codec, vocabulary, bos, eos, bool(before) if adds_bos is None else bool(adds_bos), chats)


def _growth(part: Any) -> float:
    """Return how many times as long a normalizer or decoder may make a text.

    A chain of ten replacements by ten characters would make 10^10 characters of one.
    """
    if not isinstance(part, dict):
        return 1
    found, kind = 1.0, part.get("type")
    for name in ("normalizers", "decoders"):
        for inner in part.get(name) or () if kind == "Sequence" else ():
            found *= _growth(inner)
    if kind == "Replace":
        pattern, content = part.get("pattern"), str(part.get("content", ""))
        text = pattern.get("String") if isinstance(pattern, dict) else None  # else a regular expression
        found = len(content) / len(text) if text else len(content) + 1
    elif kind == "Prepend":
        found = len(str(part.get("prepend", ""))) / _SHORT
    elif kind == "Precompiled":
        with suppress(ValueError, TypeError):  # the library rejects invalid base64
            table = b64decode(part["precompiled_charsmap"])
            # The size of a trie, the trie, and the texts that characters become, with a zero after each.
            texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
            found = max(map(len, texts)) / _SHORT
    return max(1.0, found)


def _named(key: str, config: dict[str, Any], model: tokenizers.Tokenizer, path: Path) -> int:
    """Return the id of a token that the config names by its text, or as an object with its text."""
    name = config[key].get("content") if isinstance(config[key], dict) else config[key]
    token = model.token_to_id(name) if isinstance(name, str) else None
    if token is None:
        place = str(path.with_name(CONFIG))
        raise DataError(
            f"names {name!r} as its {key}, which {path.name} does not have", key=place, hint=f"correct {key}"
        )
    return token


def _unknown(section: dict[str, Any], model: tokenizers.Tokenizer) -> int | None:
    """Return the id for unknown text: Unigram has it as `unk_id`, the other models its name."""
    name = section.get("unk_token")
    return model.token_to_id(name) if name else section.get("unk_id")
