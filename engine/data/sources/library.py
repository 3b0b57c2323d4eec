"""Imports the libraries that some formats of documents need, which an installation may lack."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import DataError


def library(name: str, path: Path | str) -> Any:
    """Import a library of the extra `data`. Raises DataError if it is not installed, which `path` needs."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        message = f"cannot be read without the library {package}"
        raise DataError(message, key=str(path), hint=f"install it: pip install {package}") from error
