"""Copies checkpoints to a folder that has a URL, such as s3://bucket/run, and back. Imports no torch.

fsspec reads and writes the folder, with credentials from its own places (environment, configuration files, the host's
role). A checkpoint's manifest is copied last, so a folder with a manifest is complete. Copies are never removed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.config.checks import URL_EXAMPLES, url_problem
from engine.errors import BytescaleError, CheckpointError, ConfigError, PreflightError
from engine.files import sync, write_durably
from engine.folders import drafting, entered, inside, opened, opened_file, remove_ruins
from engine.readers import LARGE, read_bytes
from engine.run.checkpoints import (
    DAMAGED,
    FILES,
    MANIFEST,
    START_OVER,
    Manifest,
    TrainState,
    UnknownFormatError,
    blocks_of,
    check_sizes,
    folder_name,
    hash_of,
    parse_manifest,
    read,
    read_manifest,
    set_aside,
    step_of,
)

_ABANDONED = f"abandoned-{MANIFEST}"


def is_url(source: Path | str) -> bool:
    """Return whether a place of checkpoints is a URL, not a local path."""
    return "://" in str(source)


class Remote:
    """A folder of checkpoints at a URL, or one checkpoint in it.

    Raises ConfigError for a URL that cannot be one, PreflightError if the library of its protocol is not installed.
    What fsspec raises later is of many types.
    """

    def __init__(self, url: str, key: str = "run.remote") -> None:
        if problem := url_problem(url, key):
            raise ConfigError.of([problem])
        try:
            self._system, root = import_module("fsspec.core").url_to_fs(url.rstrip("/"))
        except ValueError as error:  # a protocol that does not exist
            raise ConfigError(f"cannot be opened: {error}", key=f"{key}={url}", hint=URL_EXAMPLES) from error
        except ImportError as error:
            hint = "install the package that it names, for example: pip install fsspec"
            raise PreflightError(f"cannot be opened: {error}", key=f"{key}={url}", hint=hint) from error
        folder, _, name = root.rpartition("/")
        self._one = name if step_of(Path(name)) >= 0 else None  # the checkpoint, if the URL is that of one
        self._root = folder if self._one else root
        self._local = Path(self._root) if "file" in self._system.protocol else None
        self.url = url.rstrip("/").removesuffix(f"/{name}") if self._one else url.rstrip("/")

    def newest_first(self) -> list[str]:
        """Return the names of the complete checkpoints, newest first; of the one checkpoint, if the URL is that."""
        self._system.invalidate_cache()  # another process may have added some
        if self._one:
            names = [self._one]
        else:
            try:
                names = [path.rstrip("/").rpartition("/")[2] for path in self._system.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []
        if self._local is not None:  # another user's link could lead to any folder
            names = [name for name in names if not (self._local / name).is_symlink()]
        complete = (
            name for name in names if step_of(Path(name)) >= 0 and self._system.exists(self._path(name, MANIFEST))
        )
        return sorted(complete, reverse=True)

    def manifest(self, name: str) -> Manifest:
        """Read and check the manifest of a checkpoint. Raises CheckpointError that names the damage."""
        with self._named(name):
            content = self._system.cat_file(self._path(name, MANIFEST))
            return parse_manifest(content, Path(name), partial(self._content_of_files, name))

    def upload(self, folder: Path) -> None:
        """Copy a local checkpoint, if the remote folder does not have it yet."""
        content, name = read_bytes(folder / MANIFEST, LARGE, CheckpointError), folder.name
        manifest = self._path(name, MANIFEST)
        if self._system.exists(manifest) and self._system.cat_file(manifest) == content:
            return
        with opened(folder, follow_links=False) as here, self._target(name) as target:
            for file in (*read_manifest(folder).files, *([FILES] if (folder / FILES).exists() else [])):
                place = f"{target}/{file}"
                self._system.makedirs(place.rpartition("/")[0], exist_ok=True)
                with opened_file(here, file) as source:
                    self._system.put_file(str(source), place)
            self._system.pipe_file(f"{target}/{MANIFEST}", content)

    @contextmanager
    def _target(self, name: str) -> Iterator[str]:
        """Yield the folder to copy a checkpoint to. In a local folder, which others may write to, it is a draft."""
        if self._local is None:
            if self._system.exists(self._path(name, MANIFEST)):
                self._system.rm_file(self._path(name, MANIFEST))  # first: from here on it is incomplete
            yield f"{self._root}/{name}"
            return
        with opened(self._local, make=True) as parent, drafting(self._local / name, parent) as draft:
            yield str(draft.path)
            for path in draft.path.rglob("*"):
                sync(path)
            with suppress(FileNotFoundError):
                set_aside(inside(parent) / name)
            draft.publish()

    def download(self, name: str, checkpoints: Path) -> Path:
        """Copy a checkpoint into the local folder `checkpoints`, compare all hashes, and return its path.

        Raises CheckpointError if it is damaged; then nothing is left of it.
        """
        content, final = self._system.cat_file(self._path(name, MANIFEST)), checkpoints / name
        with (
            opened(checkpoints, make=True, follow_links=False) as parent,
            drafting(final, parent) as draft,
            self._named(name),
        ):
            write_durably(draft.path / MANIFEST, content)
            found = parse_manifest(content, final, partial(self._content_of_files, name))
            for file in (*found.files, *([FILES] if self._system.exists(self._path(name, FILES)) else [])):
                (draft.path / file).parent.mkdir(parents=True, exist_ok=True)
                self._system.get_file(self._file(name, file), str(draft.path / file))
                sync(draft.path / file)
            read(draft.path)
            draft.publish()
        return final

    def check(self, name: str) -> None:
        """Compare all bytes of a checkpoint with their hashes. Raises CheckpointError that names the damage."""
        manifest = self.manifest(name)
        with self._named(name):
            for file, parts in manifest.files.items():
                place = self._file(name, file)
                with self._system.open(place, "rb") as content:
                    for _, length, digest, whose in blocks_of(parts, manifest.block):
                        if hash_of(content, self._system.size(place) if length is None else length) != digest:
                            raise CheckpointError(f"{DAMAGED}{file} does not match its hash{whose}")
                    if content.read(1):
                        raise CheckpointError(f"{DAMAGED}{file} does not match its hash")

    def listed(self) -> list[dict[str, Any]]:
        """Describe the checkpoints as `saved.listed` does. Raises CheckpointError if there is none."""
        rows = []
        for name in self.some():
            ranks, size, damaged = None, None, None
            try:
                manifest = self.manifest(name)
                ranks, size = manifest.state.ranks, sum(manifest.sizes.values())
            except CheckpointError as error:
                damaged = str(error).removeprefix(DAMAGED)
            place, step = f"{self.url}/{name}", step_of(Path(name))
            rows.append({"path": place, "step": step, "ranks": ranks, "bytes": size, "damaged": damaged})
        return rows

    def checked(self) -> list[dict[str, Any]]:
        """Compare all hashes, as `saved.check_all` does. Raises CheckpointError if there is no checkpoint."""
        rows = []
        for name in self.some():
            damaged = None
            try:
                self.check(name)
            except UnknownFormatError:
                raise
            except CheckpointError as error:
                damaged = str(error).removeprefix(DAMAGED)
            rows.append({"path": f"{self.url}/{name}", "damaged": damaged})
        return rows

    def some(self) -> list[str]:
        """Return what `newest_first` does. Raises CheckpointError if there is no checkpoint."""
        if names := self.newest_first():
            return names
        hint = "a checkpoint is complete only with its manifest, which is copied last"
        raise CheckpointError(
            "has no complete checkpoint", key=f"{self.url}/{self._one}" if self._one else self.url, hint=hint
        )

    def abandon(self, step: int) -> list[str]:
        """Make the checkpoints of steps after `step` unusable, as a run that goes back there does; return their names.

        Their manifest gets another name, and nothing is removed.
        """
        later = [name for name in self.newest_first() if name > folder_name(step)]
        if self._local is not None:
            remove_ruins(self._local)
        for name in later:
            if self._local is None:
                self._system.mv(self._path(name, MANIFEST), self._path(name, _ABANDONED))
            else:
                with opened(self._local) as around, entered(around, name) as folder:
                    os.rename(MANIFEST, _ABANDONED, src_dir_fd=folder, dst_dir_fd=folder)
        return later

    def _content_of_files(self, name: str) -> bytes:
        """Read files.jsonl, which manifests of older versions do not have. Raises CheckpointError if it is missing."""
        content: bytes = self._system.cat_file(self._file(name, FILES))
        return content

    def _file(self, name: str, file: str) -> str:
        """The path of a file that the manifest names. Raises CheckpointError if it is missing."""
        place = self._path(name, file)
        if not self._system.exists(place):
            raise CheckpointError(f"{DAMAGED}{file} is missing")
        return place

    def _path(self, name: str, file: str) -> str:
        return f"{self._root}/{name}/{file}"

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let errors about a checkpoint name its URL."""
        try:
            yield
        except CheckpointError as error:
            hint: str | None = "choose another checkpoint: `bytescale ckpt list` shows them"
            if isinstance(error, UnknownFormatError):
                hint = error.problems[0].hint
            raise type(error)(str(error), key=f"{self.url}/{name}", hint=hint) from error


@contextmanager
def reaching(remote: Remote) -> Iterator[None]:
    """Turn errors of a remote folder, which are of many types, into a PreflightError. A full local disk is none."""
    try:
        yield
    except BytescaleError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        hint = "check the URL, the network, and the credentials that fsspec finds"
        raise PreflightError(f"cannot be read: {reason}", key=remote.url, hint=hint) from error


def fetch(remote: Remote, checkpoints: Path, check: Callable[[TrainState], None], say: Callable[[str], None]) -> Path:
    """Copy the newest intact checkpoint of a remote folder into the local folder `checkpoints`; return its path.

    `check(state)` is called before a checkpoint's files are copied, and may reject it. A checkpoint that is already
    there is not copied. Raises CheckpointError if there is none, or if all are damaged.
    """
    damaged = list[str]()
    for name in remote.some():
        try:
            manifest, local = remote.manifest(name), checkpoints / name
            check(manifest.state)
            if not _has(local, manifest):
                if local.exists():
                    say(f"{name} differs from {remote.url}/{name}; it is kept as {set_aside(local).name}")
                say(f"copying {remote.url}/{name} to {checkpoints}")
                remote.download(name, checkpoints)
        except CheckpointError as error:
            if not str(error).startswith(DAMAGED):
                raise
            damaged.append(f"{name} is damaged ({str(error).removeprefix(DAMAGED)})")
        else:
            if damaged:
                say(f"warning: {', '.join(damaged)}; using {name} instead")
            return local
    raise CheckpointError(f"no intact checkpoint: {', '.join(damaged)}", key=remote.url, hint=START_OVER)


def _has(local: Path, manifest: Manifest) -> bool:
    """Return whether a local checkpoint has this manifest, and files of these sizes."""
    try:
        check_sizes(local)
    except CheckpointError:
        return False
    return read_manifest(local) == manifest
