"""Files behind URLs, which fsspec opens. Every failure becomes a DataError with the URL and the cause.

Protocols have different exceptions: those of requests, aiohttp, httpx, botocore, and of libraries that are unknown
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from engine.data.sources.library import library
from engine.errors import BytescaleError, DataError

_HINT = "check the URL, the network and the credentials that fsspec finds, or copy the files into a local folder"
_BUFFER = 1 << 20


def is_url(path: Path | str) -> bool:
    """Return whether a path is a URL and not a local path."""
    return "://" in str(path)


def kind_of_url(url: str) -> Literal["folder", "file", "missing"]:
    """Return whether a URL refers to a file or a folder. Raises DataError if that cannot be determined."""
    system, inside = _file_system(url)
    is_http = url.startswith(("http://", "https://"))
    if is_http and url.endswith("/"):
        return "folder"  # an index page; fsspec would read any other page to look for links in it
    with _reported(url):
        try:
            return "folder" if system.info(inside)["type"] == "directory" else "file"
        except (FileNotFoundError, NotADirectoryError) as error:
            # fsspec raises it for every failure of http, with the failure as the cause.
            if is_http and error.__cause__ is not None and getattr(error.__cause__, "status", None) != 404:
                raise error.__cause__ from None
            return "missing"


@contextmanager
def opened_url(url: str) -> Iterator[BinaryIO]:
    """Open a URL in binary mode, as a context. Raises DataError if opening it, or reading it later, fails."""
    system, inside = _file_system(url)
    with _reported(url):
        file = system.open(inside, "rb")
    try:
        yield cast(BinaryIO, BufferedReader(_Remote(url, file), _BUFFER))
    finally:
        file.close()


def names_below_url(url: str) -> list[str]:
    """Return the files below a folder, as paths relative to it. Raises DataError for a folder that cannot be read."""
    system, inside = _file_system(url)
    with _reported(url):
        return [path.removeprefix(inside).lstrip("/") for path in system.find(inside)]


def stamp_of_url(url: str) -> str:
    """Return what identifies the present content of a file. Raises DataError if it cannot be looked up."""
    system, inside = _file_system(url)
    with _reported(url):
        return str(system.ukey(inside))


class _Remote(RawIOBase):
    """A file of fsspec. Errors of the library of its protocol become DataError."""

    def __init__(self, url: str, file: Any) -> None:
        self._url, self._file = url, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _reported(self._url):
            found = self._file.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = 0) -> int:
        with _reported(self._url):
            return cast(int, self._file.seek(offset, whence))

    def tell(self) -> int:
        return cast(int, self._file.tell())


@contextmanager
def _reported(url: str) -> Iterator[None]:
    """Turn any exception in this context, in which only fsspec runs, into a DataError with its cause."""
    try:
        yield
    except BytescaleError:
        raise
    except Exception as error:
        reason = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        named = reason if isinstance(error, OSError) and reason else f"{type(error).__name__}: {reason}".rstrip(": ")
        raise DataError(f"cannot be read: {named}", key=url, hint=_HINT) from error


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path inside it."""
    core = library("fsspec.core", url)
    with _reported(url):
        try:
            return cast("tuple[Any, str]", core.url_to_fs(url))
        except (ImportError, ValueError) as error:  # the library of the protocol is missing, or the protocol is unknown
            hint = "install the package that it names, or copy the files into a local folder"
            raise DataError(f"cannot be opened: {error}", key=url, hint=hint) from error
