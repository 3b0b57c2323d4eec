"""What to do about a folder of a model that is missing: the user may have meant a name on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import DataError

_LOCAL = ("checkpoints", "data", "model", "models", "output", "outputs", "runs", "tokenizers", "weights")


def hub_hint(path: str) -> str | None:
    """Return the command that downloads `path`, if it reads like the name of a model on the Hugging Face Hub.

    `models/llama3-8b` has the form of a name, too. If its first part is a folder here or a usual name of one, it is
    taken for a path.
    """
    name = re.sub(r"^(https?:/{1,2}(huggingface\.co|hf\.co)/|hf:/{1,2}(models/)?)", "", path)
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", name) or name.endswith((".json", ".model", ".yaml")):
        return None
    first = name.partition("/")[0]
    if name == path and (first in _LOCAL or Path(first).exists()):
        return None
    return f"for a model on the Hub, run `hf download {name} --local-dir FOLDER` and name FOLDER"


def no_model(folder: str, place: str) -> DataError:
    """Create the error for the folder of a model that is missing, or that is a file. `place` is how it is named."""
    if Path(folder).exists():
        return DataError("is not a folder", key=place, hint="choose one with config.json and safetensors files")
    hub = hub_hint(folder) or "`hf download OWNER/NAME --local-dir FOLDER` downloads one from the Hub"
    return DataError("no such folder", key=place, hint=f"choose one with config.json and safetensors files; {hub}")
