"""The tokenizer of a Hugging Face folder: copies its files, and compares it with the tokenizer of the documents.

Training on documents of another tokenizer would go unnoticed: every id below the vocabulary has an embedding.
"""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from engine.config import schema
from engine.config.sources import source_configs
from engine.data.token_facts import read_facts
from engine.data.tokenizers.chat import CONFIG, MORE_TEMPLATES, SPECIAL, TEMPLATE
from engine.data.tokenizers.load import BYTES, IN_FOLDER, open_tokenizer, tokenizer_file
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.errors import ConfigError, DataError
from engine.folders import entered, inside, opened
from engine.readers import LARGE, read_bytes
from engine.weights.folder import copy_file

_BESIDE = (CONFIG, SPECIAL, TEMPLATE, "chat_template.json", "added_tokens.json")
_OTHERS = (*IN_FOLDER, "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model")
_PROBES = 2000  # tokens whose texts are compared, about 50 ms


def copy_tokenizer(tokenizer: str, folder: Path) -> list[str]:
    """Copy the files of a tokenizer, named as in `data.tokenizer`, into a Hugging Face folder; return their names.

    These are all that describe a tokenizer in its folder, chat templates too; none for bytes. A file with a name of its
    own gets the usual one. Raises DataError if there is no such tokenizer, or if a file of it is a link, OSError if a
    file cannot be copied.
    """
    path = tokenizer_file(tokenizer)
    if path is None:
        return []
    if not path.is_file():
        raise DataError("no such tokenizer", key=str(path), hint="copy its files into the folder by hand")
    usual = path.name in _OTHERS
    names = {name: path.with_name(name) for name in (*_BESIDE, *(_OTHERS if usual else ()))}
    names[path.name if usual else "tokenizer.json" if path.suffix == ".json" else "tokenizer.model"] = path
    copied = [name for name, source in names.items() if source.is_file()]
    for name in copied:
        copy_file(names[name], folder / name)
    with ExitStack() as stack:
        try:
            more = stack.enter_context(entered(stack.enter_context(opened(path.parent)), MORE_TEMPLATES))
        except OSError:  # there are none, or in their place a link
            return copied
        for one in inside(more).glob("*.jinja"):
            (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
            copy_file(one, folder / MORE_TEMPLATES / one.name)
            copied.append(f"{MORE_TEMPLATES}/{one.name}")
    return copied


def check_tokenizer(folder: Path, data: schema.Data) -> None:
    """Raise ConfigError if the weights in `folder` come with another tokenizer than that of the documents.

    A folder without a tokenizer is accepted, and so is one with the same file, or one that gives equal ids (see
    `difference`): files of one tokenizer differ between formats and versions. Raises DataError if a tokenizer cannot be
    read.
    """
    found = [folder / name for name in IN_FOLDER if (folder / name).is_file()]
    sources = source_configs(data).values() if found else ()
    encoded = [_encoded(source, found, folder) for source in sources]  # raises for any of them
    if any(encoded):
        _compare(data.tokenizer, found, folder)


def _encoded(source: schema.Data, found: list[Path], folder: Path) -> bool:
    """Return whether `data.tokenizer` made, or makes, the tokens of a source, so that it must be compared.

    False for a token file of one of the tokenizers that were `found` with the weights, and for one of another tool if
    its tokenizer is not set. Raises ConfigError if a token file has a tokenizer that is not known.
    """
    if source.format != "tokens":
        return True
    facts = read_facts(Path(source.paths[0]))
    if facts is None:
        return source.tokenizer != BYTES
    if any(facts.made_by(str(path)) for path in found):
        return False
    if not facts.made_by(source.tokenizer):
        message = f"did not make the tokens of {source.path_text}, nor did the tokenizer of run.weights={folder}"
        hint = f"set it to the one that did ({facts.tokenizer}), which is then compared"
        raise ConfigError(message, key=f"data.tokenizer={source.tokenizer}", hint=hint)
    return True


def _compare(tokenizer: str, found: list[Path], folder: Path) -> None:
    """Raise ConfigError if a tokenizer is none of those that were `found` with the weights."""
    file = tokenizer_file(tokenizer)
    content = read_bytes(file, LARGE) if file is not None and file.is_file() else None
    if any(read_bytes(path, LARGE) == content for path in found):
        return
    ours = open_tokenizer(tokenizer)
    differences = [difference(ours, open_tokenizer(str(path))) for path in found]
    if None not in differences:
        message = f"is not the tokenizer of run.weights={folder}: {differences[0]}"
        other = f"if these weights belong to it, remove {found[0].name} from their folder"
        hint = f"set data.tokenizer={shlex.quote(str(folder))}; {other}"
        raise ConfigError(message, key=f"data.tokenizer={tokenizer}", hint=hint)


def difference(ours: Tokenizer, theirs: Tokenizer) -> str | None:
    """Return a text that two tokenizers encode differently, as a sentence; None if none is found.

    The texts are those of 2,000 of their tokens, evenly spaced. Runs of white space are left out: Mixtral's
    tokenizer.json and its SentencePiece model differ there.
    """
    probes = np.unique(np.linspace(0, theirs.vocabulary - 1, _PROBES).astype(np.int64))
    for token in probes.tolist():
        text = theirs.decode([token])
        if not text.strip() or "\ufffd" in text or re.search(r"\s\s", text):
            continue
        try:
            there = theirs.encode(text).tolist()
            here = ours.encode(text).tolist()
        except DataError:  # the name of a special token
            continue
        if here != there:
            return f"it encodes {text!r} as {here[:8]}, theirs as {there[:8]}"
    return None
