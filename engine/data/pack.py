"""Packs the documents of a source into one token file: packs all its blocks, and joins their parts in their order.

Training packs parts too, and reads them one by one (parts.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

import numpy as np

from engine import files
from engine.config import schema
from engine.config.sources import BUILT_IN
from engine.data.cache import move_into_place, remove_parts
from engine.data.parts import Progress, Tokens, pack_blocks, part_path, read_left_out, unwritable
from engine.data.quarantine import Quarantine, Unusable
from engine.data.sources.formats import FORMATS
from engine.data.sources.notes import notes, nothing_to_train
from engine.data.sources.source import Block, with_transform
from engine.data.sources.urls import is_url
from engine.data.token_facts import (
    SCHEMA,
    Facts,
    blocks_path,
    facts_path,
    hashes_path,
    parts_path,
    quarantine_path,
    read_facts,
)
from engine.data.token_file import TokenFile, concatenate, token_dtype
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.errors import ConfigError, StorageError
from engine.folders import drafting, inside, opened
from engine.readers import HUGE, read_bytes

_HASH_BYTES = 16
JOINED_ENDINGS = (".json", ".idx", ".bin", ".mask", ".hash", ".blocks", ".quarantine.jsonl")  # of those of PREFIX


def pack(
    data: schema.Data,
    prefix: Path,
    workers: int | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Facts:
    """Write the documents of a source as PREFIX.bin, .idx, .hash, .blocks and .json, with `workers` processes.

    None uses all cores. `say` gets the lines of `notes`. Parts that an interrupted call has written are used again. A
    token file at PREFIX is replaced if it has the same documents, which may have grown; it stays unchanged until the
    new one is complete. Raises ConfigError if it has others, DataError for an invalid document or if none has text,
    StorageError if writing fails or another process is packing the same file.
    """
    # Checked before hours of packing instead of when the files are replaced.
    tokens = Tokens.of(data)
    _refuse_other(prefix, data, tokens.fingerprint)
    blocks = with_transform(FORMATS[data.format].blocks(data), data)
    for line in notes(data, blocks):
        say(line)
    parts = parts_path(prefix)
    try:
        # Parts stay in this folder until they are joined, so an interrupted call can continue. The lock keeps a second
        # process with the same prefix out.
        with opened(parts, make=True, follow_links=False) as folder, files.locked(inside(folder) / files.LOCK):
            pack_blocks(tokens, parts, blocks, workers, progress)
            written = [part_path(tokens, parts, block) for block in blocks]
            with drafting(prefix, folder) as draft:
                facts = _join(blocks, written, draft.path / prefix.name, tokens.open(), data)
                if facts.documents:
                    facts_path(prefix).unlink(missing_ok=True)  # so that it never describes other documents
                    move_into_place(draft.path, prefix, JOINED_ENDINGS)
            remove_parts(folder)
            (inside(folder) / files.LOCK).unlink()
        with suppress(OSError):  # it has other files
            parts.rmdir()
    except BlockingIOError as error:
        message, hint = "another process is packing these documents", "wait until it ends"
        raise StorageError(message, key=str(prefix), hint=hint) from error
    except OSError as error:
        raise unwritable(error, prefix) from error
    if not facts.documents:
        raise nothing_to_train(data.path_text, blocks, facts.empty, facts.broken, facts.dropped)
    return facts


def _source(data: schema.Data) -> dict[str, str]:
    """Return the keys of `data` that identify the documents of a source, and their values, with absolute paths."""
    paths = [path if is_url(path) or path in BUILT_IN else os.path.realpath(path) for path in data.paths]
    path = paths[0] if isinstance(data.path, str) else f"[{','.join(paths)}]"
    named = {
        "format": data.format,
        "path": path,
        "pattern": data.pattern,
        "field": data.field,
        "encoding": data.encoding,
    }
    if data.separator is not None:
        named["separator"] = data.separator
    return named | {"transform": json.dumps(data.transform)} if data.transform else named


def _refuse_other(prefix: Path, data: schema.Data, fingerprint: str) -> None:
    """Raise ConfigError if PREFIX is a token file of other documents, another tokenizer, or another tool.

    An incomplete one does not count.
    """
    index = Path(f"{prefix}.idx")
    if not index.exists():
        return
    facts, source = read_facts(prefix), _source(data)
    if facts is None:
        if parts_path(prefix).exists():
            return
        found = "is a token file of another tool"
    elif facts.fingerprint != fingerprint:
        found = "was packed with another tokenizer"
    elif facts.source != source:
        theirs = [f"data.{key}={value}" for key, value in facts.source.items() if source.get(key) != value]
        found = f"was packed from {', '.join(theirs)}" if theirs else "may have other documents"
    else:
        return
    hint = f"choose another --out, or remove {index} to replace it"
    raise ConfigError(f"{prefix} {found}", key="--out", hint=hint)


def _join(blocks: Sequence[Block], parts: list[Path], prefix: Path, tokenizer: Tokenizer, data: schema.Data) -> Facts:
    """Join the token files of all blocks, and write their facts."""
    quarantine, empty, broken, first = Quarantine(quarantine_path(prefix)), 0, 0, [0]
    dropped = 0
    # Identifies the documents and their order: the hashes decide which of them are for validation, the blocks in which
    # order they come.
    contents = blake2b(tokenizer.fingerprint.encode(), digest_size=_HASH_BYTES)
    # Without its mask, all tokens of a part would count in the loss, so a mask that was lost since packing is an error.
    with files.new_file(hashes_path(prefix)) as file:
        for number, part in enumerate(parts):
            left_out = read_left_out(part)
            TokenFile.open(part).check_mask(left_out.masked)
            empty, broken = empty + len(left_out.empty), broken + len(left_out.broken)
            dropped += left_out.dropped
            quarantine.add(0, [Unusable("data", number, *one) for one in left_out.broken])
            hashes = read_bytes(hashes_path(part), HUGE)
            first.append(first[-1] + len(hashes) // 8)
            contents.update(hashes)
            file.write(hashes)
        os.fsync(file.fileno())
    table = np.array([first, [*(block.size for block in blocks), 0]], dtype="<i8").T
    files.write_durably(blocks_path(prefix), table.tobytes())
    contents.update(table.tobytes())  # decides the order
    # Counts come from the joined file, as a reader will see it.
    concatenate(parts, prefix, token_dtype(tokenizer.vocabulary))
    joined = TokenFile.open(prefix)
    facts = Facts(
        tokenizer=tokenizer.kind,
        fingerprint=tokenizer.fingerprint,
        vocabulary=tokenizer.vocabulary,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        documents=len(joined),
        tokens=joined.tokens,
        empty=empty,
        contents=contents.hexdigest(),
        masked=joined.mask is not None,
        broken=broken,
        dropped=dropped,
        source=_source(data),
    )
    files.write_json(facts_path(prefix), {"schema": SCHEMA, **asdict(facts)})
    return facts
