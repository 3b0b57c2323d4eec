"""Continues a text with the model of a checkpoint or of a Hugging Face folder, in one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.data.tokenizers.load import BYTES, IN_FOLDER, open_tokenizer
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.dtypes import DTYPES
from engine.errors import ConfigError, DataError
from engine.family.families import parameters_of
from engine.models.build import build_model
from engine.models.common.cached_attention import CachedAttention
from engine.models.decoder import Decoder
from engine.run.checkpoints import MANIFEST
from engine.trainer.export import made_by_others, open_checkpoint
from engine.weights.check import check_weights
from engine.weights.config_json import CONFIG, read_config
from engine.weights.finite import STORED
from engine.weights.folder import read_headers
from engine.weights.generation import read_generation, stop_tokens
from engine.weights.load import load_weights
from engine.weights.model import read_model
from engine.zero.states import model_weights

PIECE = 512  # tokens of the prompt that pass through the model at once; the memory of logits is proportional to it
_TOY = 10_000_000  # parameters; models below this learn to spell


class Language(NamedTuple):
    """A model that can continue texts."""

    model: Decoder
    tokenizer: Tokenizer
    context: int  # tokens that a sequence had in training, at most
    source: Path  # checkpoint or folder
    step: int | None  # of the checkpoint
    stops: frozenset[int] = frozenset()  # tokens that end a text, besides EOS


class Continuation(NamedTuple):
    """The tokens that follow a prompt, without the one that ends them, and why there are no more.

    The reason is `tokens`, `context` or `eos`.
    """

    ids: list[int]
    stopped: str


def generate(
    source: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    tokenizer: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Continue `prompt` by at most `tokens` tokens; return the text and what the command prints as JSON.

    `source` is a checkpoint, a run, whose newest intact checkpoint is used, or a Hugging Face folder. `temperature` and
    `seed` as in `continued`. `tokenizer` is a name as in `data.tokenizer`; None uses that of the run or the folder.
    `say` gets a line if the model is a toy, and warnings. Raises CheckpointError without an intact checkpoint,
    DataError for an invalid folder or tokenizer, ConfigError for a prompt that is empty or longer than the context.
    """
    if not prompt:
        raise ConfigError("is empty", key="--prompt", hint="for example --prompt 'def main():'")
    # A folder with a manifest is a checkpoint, even if it contains a config.json.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_folder = (source / CONFIG).is_file() and not (source / MANIFEST).exists()
    found = (_of_folder if is_folder else _of_checkpoint)(source, tokenizer, device, say)
    parameters = sum(parameter.numel() for parameter in found.model.parameters())
    if parameters < _TOY:
        what = f"a toy of {parameters:,} parameters: do not expect its text to make sense"
        say(f"the model is {what}; `bytescale recipes list` shows larger ones")
    # Ids without an embedding would fail inside the model.
    if found.tokenizer.vocabulary > found.model.shape.vocab:
        message = f"has {found.tokenizer.vocabulary:,} tokens, but the model only {found.model.shape.vocab:,}"
        raise DataError(message, key=f"tokenizer of {source}", hint="name the right one with --tokenizer")
    # At least one token must fit into the context after the prompt.
    ids = prompt_ids(found.tokenizer, prompt)
    room = found.context - len(ids)
    if room < 1:
        message = f"has {len(ids):,} tokens, but the model's context is {found.context:,}"
        raise ConfigError(message, key="--prompt", hint=f"shorten it to {found.context - 1:,} tokens or fewer")
    done = continued(found, ids, min(tokens, room), temperature, seed)
    if done.stopped == "tokens" and tokens > room:
        done = done._replace(stopped="context")
        say(f"stopped at the model's context of {found.context:,} tokens")
    return {
        "text": _text(found.tokenizer, ids, done.ids),
        "tokens": done.ids,
        "prompt_tokens": len(ids),
        "stopped": done.stopped,
        "source": str(found.source),
        "step": found.step,
        "parameters": parameters,
    }


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids of a prompt, as those of the beginning of a document: with BOS if documents begin with it."""
    try:
        ids = tokenizer.encode(prompt).tolist()
    except DataError as error:
        (problem,) = error.problems
        raise ConfigError(problem.message, key="--prompt", hint="remove it from the prompt") from error
    return ids if tokenizer.bos is None else [tokenizer.bos, *ids]


@torch.inference_mode()
def continued(found: Language, prompt: list[int], tokens: int, temperature: float, seed: int) -> Continuation:
    """Choose up to `tokens` ids that follow the ids of a prompt; fewer if EOS comes first.

    With `temperature` 0 each is the most probable one. Else it is drawn from softmax(logits / temperature), by a
    generator that is seeded with `seed`, in float64 on the CPU. Raises DataError if logits are NaN or infinite.
    """
    model = found.model
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    attention = CachedAttention(model.shape.layers, len(prompt) + tokens)
    chosen: list[int] = []
    new = torch.tensor(prompt, device=device)
    while True:
        for piece in new.split(PIECE):
            positions = torch.arange(attention.tokens, attention.tokens + len(piece), device=device)
            logits = model(piece, positions, attention=attention)[-1]
        token = _choose(logits, found, temperature, generator)
        if token == found.tokenizer.eos or token in found.stops:
            return Continuation(chosen, "eos")
        chosen.append(token)
        if len(chosen) == tokens:
            return Continuation(chosen, "tokens")
        new = torch.tensor([token], device=device)


def _choose(logits: Tensor, found: Language, temperature: float, generator: torch.Generator) -> int:
    """Choose an id by its logits [V]. Ids beyond the tokenizer, which only pad the vocabulary, have no text."""
    logits = logits[: found.tokenizer.vocabulary].cpu().double()
    if not logits.isfinite().all():
        hint = "use an earlier checkpoint: `bytescale ckpt list RUN` lists them"
        raise DataError("the model computes NaN or infinity", key=str(found.source), hint=hint)
    if temperature == 0:
        return int(logits.argmax())
    # Without the maximum, logits / temperature could overflow.
    weights = ((logits - logits.max()) / temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


def _text(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """Return the text of ids that follow a prompt. Alone, many tokenizers would drop the space before the first."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *new])
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(new)


def _of_checkpoint(source: Path, tokenizer: str | None, device: torch.device, say: Callable[[str], None]) -> Language:
    """Load the model and the tokenizer of a checkpoint, in the dtype of its run."""
    saved = open_checkpoint(source, say)
    data = saved.config.data
    if tokenizer is None and data.tokenizer == BYTES and (others := made_by_others(saved.facts)):
        message = (
            f"another tokenizer ({', '.join(others)}) made the tokens of this run, and its config does not name it"
        )
        raise DataError(message, key=str(source), hint="name it with --tokenizer, a file or a folder")
    words = open_tokenizer(tokenizer or data.tokenizer, data.bos, data.eos)
    with torch.device(device):
        model = build_model(saved.config).to(DTYPES[saved.config.dtype]).eval()
    weights = model_weights(saved.folder, parameters_of(saved.config.model))
    with torch.no_grad():
        for name, target in chain(model.named_parameters(), model.named_buffers()):
            target.copy_(weights[name]())
    stops = frozenset(stop_tokens(saved.facts) if tokenizer is None else ())
    return Language(model, words, saved.config.context, saved.folder, saved.state.step, stops)


def _of_folder(folder: Path, tokenizer: str | None, device: torch.device, say: Callable[[str], None]) -> Language:
    """Load the model and the tokenizer of a Hugging Face folder, in the dtype of its embedding."""
    config = read_model(folder).config
    check_weights(folder, config)
    if tokenizer is None and not any((folder / name).is_file() for name in IN_FOLDER):
        hint = "name one with --tokenizer, such as --tokenizer bytes for a run with data.tokenizer=bytes"
        raise DataError("has no tokenizer", key=str(folder), hint=hint)
    words = open_tokenizer(tokenizer or str(folder))
    dtype = STORED[read_headers(folder)["model.embed_tokens.weight"].dtype]
    with torch.device(device):
        model = build_model(config).to(dtype).eval()
    load_weights(model, config.model, folder)
    context = read_config(folder).get("max_position_embeddings")
    stops = frozenset(stop_tokens({"generation": read_generation(folder)}) if tokenizer is None else ())
    return Language(model, words, context if isinstance(context, int) else config.context, folder, None, stops)
