r"""Byte-pair files read by the package tiktoken: Llama 3's `tokenizer.model` and Mistral's `tekken.json`.

Special tokens in a text count only where they are allowed, and none is. Since tiktoken 0.13, time grows about linearly,
also for runs without spaces (1M letters: .5 s); before, 300K spaces took 50 s. Meta's own code cuts texts every 400K
characters, and runs of 25K, which changes ids there; we do not, and agree with tiktoken on the whole text.

Note: [long runs of white space]. tiktoken panics on 1,000,000 white-space characters in a row: the pattern's
`\s+(?!\S)` keeps a stack entry per character. Both patterns end with `\s*[\r\n]+|\s+(?!\S)|\s+`, and nothing before
that matches more than one white-space character from the start of a run. So of a run without line breaks

    x[          ]y    all but its last character is one piece      (the last one belongs to y's piece)
    x[          ]     all of it is one piece at the end of the text
    x[          ]\n   it is one piece with the line breaks that follow, found without a stack

and encoding that piece separately from the texts before and after it gives the same ids.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.data.tokenizers.tokenizer import MOST_TOKENS, Ids, Loaded, as_text
from engine.errors import DataError

if TYPE_CHECKING:
    import tiktoken

# llama_models/llama3/tokenizer.py. A tiktoken file has neither its pattern nor its special tokens.
LLAMA3_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(2, 246)),
)
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WHITE = "\t\v\f \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


class TiktokenCodec:
    """A tiktoken encoding. Runs of at least `longest` white-space characters may be encoded separately."""

    def __init__(self, encoding: tiktoken.Encoding, longest: int = 500_000) -> None:
        self._encoding = encoding
        self._longest = longest

    def encode(self, text: str | bytes) -> Ids:
        """Return the ids of a text, [n]."""
        text, done = as_text(text), 0
        parts: list[Ids] = []
        for start, stop in white_pieces(text, self._longest):
            parts.append(self._ordinary(text[done:start]))
            parts.append(np.array(self._encoding._encode_single_piece(text[start:stop]), dtype=np.int32))
            done = stop
        if not parts:
            return self._ordinary(text)
        return np.concatenate([*parts, self._ordinary(text[done:])])

    def _ordinary(self, text: str) -> Ids:
        """Return what `encode_ordinary` does, without its list: special tokens are neither allowed nor an error."""
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens by name."""
        return self._encoding.decode(ids)


def white_pieces(text: str, longest: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of white space that is one separate piece, for every run of at least `longest` characters.

    See Note: [long runs of white space]. Such a run has a character at a multiple of `longest`: only those are tested.
    """
    stop = 0
    for position in range(0, len(text), longest):
        if position < stop or text[position] not in _WHITE:
            continue
        start = len(text[:position].rstrip(_WHITE))
        stop = len(text) - len(text[position:].lstrip(_WHITE))
        if stop - start >= longest and text[stop : stop + 1] not in ("\r", "\n"):
            yield start, stop - (stop < len(text))


def load_llama3(path: Path, content: bytes) -> Loaded:
    """Open Llama 3's tokenizer.model: lines of a token in base64, a space, its rank. Rejects other tiktoken files."""
    import tiktoken

    if sha256(content).hexdigest() != LLAMA3_SHA256:
        hint = "give the model's tokenizer.json, which has both"
        raise DataError("is a tiktoken file without a known pattern and special tokens", key=str(path), hint=hint)
    ranks = {b64decode(token): int(rank) for token, rank in (line.split() for line in content.splitlines())}
    special = {name: len(ranks) + number for number, name in enumerate(LLAMA3_SPECIAL)}
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    bos, eos = special["<|begin_of_text|>"], special["<|end_of_text|>"]
    return Loaded(TiktokenCodec(encoding), encoding.max_token_value + 1, bos, eos, adds_bos=True)


def load_tekken(path: Path, data: dict[str, Any]) -> Loaded:
    """Open Mistral's tekken.json: special tokens come first, and the vocabulary is cut to its default size.

    BOS and EOS are "<s>" and "</s>"; files up to v7 do not list them, and have them as ids 1 and 2. Raises DataError.
    """
    import tiktoken

    try:
        config, entries = data["config"], data.get("special_tokens")
        pattern, size, shift = config["pattern"], config["default_vocab_size"], config["default_num_special_tokens"]
        if not (isinstance(pattern, str) and 0 <= shift <= size <= MOST_TOKENS):
            raise ValueError(f"of {size} tokens, {shift} are special")
        special = {f"<SPECIAL_{number}>": number for number in range(shift)}
        ids = {entry["token_str"]: entry["rank"] for entry in entries or ()} or {"<unk>": 0, "<s>": 1, "</s>": 2}
        taken = set(ids.values())
        special = ids | {name: number for name, number in special.items() if number not in taken}
        ranks = {b64decode(entry["token_bytes"]): entry["rank"] + shift for entry in data["vocab"][: size - shift]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "copy the file again: it may be cut off"
        raise DataError(f"is not a complete tekken.json ({error!r})", key=str(path), hint=hint) from error
    if not pattern.endswith(_TAIL):
        raise DataError("has a pattern that is not known", key=str(path), hint="give the model's tokenizer.json")
    encoding = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    bos, eos = special.get("<s>"), special.get("</s>")
    return Loaded(TiktokenCodec(encoding), size, bos, eos, adds_bos=bos is not None)
