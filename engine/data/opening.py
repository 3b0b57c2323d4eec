"""Opens the sources of a config or of a run: the one place where a process gets its documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.config import schema
from engine.config.schema import Config
from engine.config.sources import of_source, source_configs
from engine.data.block_files import read_blocks
from engine.data.blocks.blocks import Blocks
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.texts import Texts
from engine.data.corpus import Corpus, TextCorpus, TokenCorpus
from engine.data.mixture import segments_of
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block, with_transform
from engine.run.folder import RunFolder


def list_blocks(data: schema.Data) -> dict[str, Sequence[Block]]:
    """List the blocks of all sources of texts. Raises DataError for a source without documents."""
    found = dict[str, Sequence[Block]]()
    for name, one in source_configs(data).items():
        if one.format != "tokens":
            with of_source(data, name):
                found[name] = with_transform(FORMATS[one.format].blocks(one), one)
    return found


def validation_shares(data: schema.Data) -> dict[str, float]:
    """Return which share of the documents of each source is for validation: all, if `data.mix` gives it no weight."""
    trained = {name for segment in segments_of(data) for name, weight in segment.weights.items() if weight}
    return {name: data.validation_share if name in trained else 1.0 for name in source_configs(data)}


class Sources(NamedTuple):
    """All sources of a config, in their order, and what reads the blocks of those of texts."""

    corpora: list[Corpus]
    blocks: Blocks


MakeBlocks = Callable[[Mapping[str, Texts]], Blocks]  # gets the sources of texts by name


def open_sources(
    data: schema.Data,
    listed: Mapping[str, Sequence[Block]],
    tokenizer: str | None = None,
    make_blocks: MakeBlocks = LocalBlocks,
) -> Sources:
    """Open all sources of a config. `listed` are the blocks that `list_blocks` returned.

    `tokenizer` is the fingerprint of the tokenizer of texts, if it is known. Raises DataError for a source that cannot
    be used.
    """
    shares, corpora, texts = validation_shares(data), dict[str, Corpus](), dict[str, Texts]()
    for name, one in source_configs(data).items():
        if one.format == "tokens":
            with of_source(data, name):
                corpora[name] = TokenCorpus(name, Path(one.paths[0]), shares[name])
        else:
            texts[name] = Texts.of(one, listed[name], tokenizer)
    blocks = make_blocks(texts)  # may start processes, so after what may fail
    corpora |= {name: TextCorpus(name, shares[name], one, blocks) for name, one in texts.items()}
    return Sources([corpora[name] for name in shares], blocks)


def open_run(folder: RunFolder, config: Config, make_blocks: MakeBlocks = LocalBlocks) -> Sources:
    """Open the sources of a run, whose blocks the launcher has listed.

    Raises DataError as `read_blocks` and `open_sources`.
    """
    return open_sources(config.data, *read_blocks(folder.blocks), make_blocks)
