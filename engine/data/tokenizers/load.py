"""Opens a tokenizer by name or path. The kind is recognised from content: names say little (Llama 3's tiktoken file and
SentencePiece models are both called tokenizer.model)."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.config.explain.hub import hub_hint, no_model
from engine.config.schema import Config
from engine.data.confined import call
from engine.data.tokenizers import bytes as byte_level
from engine.data.tokenizers import huggingface, sentencepiece, tiktoken
from engine.data.tokenizers.tokenizer import Kind, Loaded, Tokenizer, make, needs
from engine.errors import DataError
from engine.readers import LARGE, parse_object, read_bytes

BYTES = "bytes"
IN_FOLDER = ("tokenizer.json", "tekken.json", "tokenizer.model")  # in this order
_CHOICES = (
    "set data.tokenizer to bytes, a tokenizer.json or a Hugging Face folder that has one, a SentencePiece .model, "
    "Llama 3's tokenizer.model, or Mistral's tekken.json"
)
_PACKAGES: dict[Kind, str] = {
    **{"huggingface": "tokenizers", "sentencepiece": "sentencepiece"},
    **{"tiktoken": "tiktoken", "tekken": "tiktoken"},
}
_PROBE = "".join(map(chr, range(32, 127))) + "a" * 1000 + "! " + "\u00e9\u4e2d\U0001f600" * 100 + "\n \t" * 300
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def open_tokenizer(
    path_or_name: str, bos: bool | None = None, eos: bool | None = None, *, tried: bool = False
) -> Tokenizer:
    """Open "bytes", or the tokenizer in a file or folder.

    It is first tried in a process of limited memory and time, unless a process of the same run has done so (`tried`):
    a library may end the process in which it reads a bad file.

    `bos` and `eos`: whether documents start with BOS and end with EOS, see `make`. Raises DataError if the file is
    missing or no known tokenizer, its library is not installed, or a token that must be added does not exist.
    """
    path = tokenizer_file(path_or_name)
    if path is None:
        return make("bytes", byte_level.load(), b"", BYTES, bos, eos)
    if path.is_dir():
        raise DataError(f"has none of {', '.join(IN_FOLDER)}", key=str(path), hint=_CHOICES)
    try:
        content = read_bytes(path, LARGE, hint=_CHOICES)
    except FileNotFoundError as error:
        hint = "; ".join(filter(None, (_CHOICES, hub_hint(path_or_name))))
        raise DataError("no such tokenizer", key=str(path), hint=hint) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", key=str(path), hint="make it readable") from error
    kind, data = recognise(path, content)
    with needs(_PACKAGES[kind], path):
        import_module(_PACKAGES[kind])
    if not tried:
        call(_try, str(path), _folder_of(path), what="as a tokenizer,", hint=_CHOICES, key=str(path))
    loaded = _load(kind, path, content, data)
    return make(kind, loaded, content, str(path), bos, eos)


def check_weights(config: Config) -> None:
    """Raise DataError that names `run.weights` if the tokenizer of a config is in that folder, which is missing."""
    weights = config.run.weights
    if weights is None or Path(weights).is_dir() or not Path(config.data.tokenizer).is_relative_to(weights):
        return
    raise no_model(weights, f"run.weights={weights}")


def tokenizer_file(path_or_name: str) -> Path | None:
    """Return the file of a tokenizer; the first one in a folder, or the folder if it has none. None for "bytes"."""
    if path_or_name == BYTES:
        return None
    path = Path(path_or_name)
    if path.is_dir():
        return next((path / name for name in IN_FOLDER if (path / name).is_file()), path)
    return path


def recognise(path: Path, content: bytes) -> tuple[Kind, dict[str, Any]]:
    """Return the kind of the tokenizer in a file, and its JSON, if any. Raises DataError if it is not a tokenizer."""
    if content[:100].lstrip().startswith(b"{"):
        data = parse_object(content, str(path), hint="copy the file again")
        if isinstance(data.get("model"), dict):
            return "huggingface", data
        if "config" in data and "vocab" in data:
            return "tekken", data
    if _TIKTOKEN.match(content):
        return "tiktoken", {}
    if content.startswith(b"\n"):  # a protobuf whose first field is a list of pieces
        return "sentencepiece", {}
    raise DataError("is not a known tokenizer", key=str(path), hint=_CHOICES)


def _folder_of(path: Path) -> str:
    """Return the folder from which `path` is found."""
    return "/" if path.is_absolute() else str(Path.cwd())


def _try(name: str, folder: str) -> None:
    """Load a tokenizer, and encode some text. A relative name counts from `folder`."""
    os.chdir(folder)  # the process may have been started in another one
    path = Path(name)
    content = read_bytes(path, LARGE, hint=_CHOICES)
    kind, data = recognise(path, content)
    loaded = _load(kind, path, content, data)
    with suppress(DataError):  # it may take a part of the text for a special token
        loaded.codec.encode(_PROBE)


def _load(kind: Kind, path: Path, content: bytes, data: dict[str, Any]) -> Loaded:
    if kind == "huggingface":
        return huggingface.load(path, content, data)
    if kind == "tekken":
        return tiktoken.load_tekken(path, data)
    return tiktoken.load_llama3(path, content) if kind == "tiktoken" else sentencepiece.load(path, content)
