"""Our tokenizers against their bare libraries: equal ids, megabytes a second of one core, and a long document's needs.

    python benchmarks/tokenizer_speed.py [--files 0] [--rounds 3]

All .py files of the standard library that are UTF-8. Ids are compared with those of the library's usual call, which
gives a list. A round times, 100 files at a time in turn, that call, the library's fastest, and ours, from a file's
bytes to an int32 array with BOS and EOS; processor time, one thread. The ratio is to the fastest call. A long document
is the same files joined until it has 2M tokens, encoded in a fresh process. The tokenizers' files come from the package
registry (`tests/data/tokenizers/real_files.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.data.tokenizers.load import open_tokenizer
from engine.data.tokenizers.tiktoken import LLAMA3_PATTERN
from tests.data.tokenizers.real_files import python_texts, real_file

Encode = Callable[[str], Any]
LONG_TOKENS = 2_000_000
GROUP = 100  # ours and the library's have a vocabulary each, and evict each other's from the processor's cache


def huggingface(path: Path) -> tuple[Encode, Encode]:
    """Return the bare library's usual call, which gives a list, and its fastest; so do the functions below."""
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(path))
    return (
        lambda text: model.encode(text, add_special_tokens=False).ids,
        lambda text: model.encode_batch_fast([text], add_special_tokens=False)[0].ids,
    )


def sentencepiece(path: Path) -> tuple[Encode, Encode]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return model.encode, lambda text: model.encode(text, out_type="numpy")


def llama3(path: Path) -> tuple[Encode, Encode]:
    lines = path.read_text().splitlines()
    return encoding(LLAMA3_PATTERN, {b64decode(token): int(rank) for token, rank in map(str.split, lines)})


def tekken(path: Path) -> tuple[Encode, Encode]:
    data = json.loads(path.read_bytes())
    config = data["config"]
    shift = config["default_num_special_tokens"]
    kept = data["vocab"][: config["default_vocab_size"] - shift]
    return encoding(config["pattern"], {b64decode(entry["token_bytes"]): entry["rank"] + shift for entry in kept})


def encoding(pattern: str, ranks: dict[bytes, int]) -> tuple[Encode, Encode]:
    import tiktoken

    # Without any special token, tiktoken looks for the empty one at each character: encode_to_numpy would be slower.
    special = {"<|special|>": max(ranks.values()) + 1}
    model = tiktoken.Encoding("bare", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return model.encode_ordinary, lambda text: model.encode_to_numpy(text, disallowed_special=())


BARE = {"huggingface": huggingface, "sentencepiece": sentencepiece, "llama3": llama3, "tekken": tekken}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=int, default=0, help="use so many files, 0 for all")
    parser.add_argument("--rounds", type=int, default=3)


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # read when a library is first used
    for name in BARE:
        yield name, partial(row, name, arguments.files or None, arguments.rounds)


def row(name: str, files: int | None, rounds: int) -> Iterator[driver.Row]:
    """Yield the row of a tokenizer: speeds in MB/s, and seconds and MB of a document of 2M tokens."""
    texts = python_texts(files)
    equal, (usual, fastest, ours) = compare(name, texts, rounds)
    command = [sys.executable, __file__, "--long", name]
    seconds, megabytes = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    speeds = {"usual": usual, "fastest": fastest, "ours": ours, "ours_over_fastest": ours / fastest}
    yield {"tokenizer": name, "files": len(texts), "equal": equal, **speeds, "long_s": seconds, "long_mb": megabytes}


def compare(name: str, texts: list[str], rounds: int) -> tuple[int, list[float]]:
    """Return how many texts have the library's ids, and MB/s of its usual call, its fastest one, and ours.

    Of the rounds, the best of each counts.
    """
    path = real(name)
    usual, fastest = BARE[name](path)
    tokenizer = open_tokenizer(str(path))
    files = [(text, text.encode()) for text in texts]
    equal = sum(tokenizer.encode(raw).tolist() == usual(text) for text, raw in files)  # also warms caches
    best = [float("inf")] * 3
    for _ in range(rounds):
        spent = [0.0] * 3
        for first in range(0, len(files), GROUP):
            group = files[first : first + GROUP]
            times = [time.process_time()]
            for text, _ in group:
                usual(text)
            times.append(time.process_time())
            for text, _ in group:
                fastest(text)
            times.append(time.process_time())
            for _, raw in group:
                tokenizer.document(raw)
            times.append(time.process_time())
            spent = [total + stop - start for total, start, stop in zip(spent, times, times[1:], strict=False)]
        best = [min(pair) for pair in zip(best, spent, strict=True)]
    size = sum(len(raw) for _, raw in files) / 1e6
    return equal, [size / seconds for seconds in best]


def long_document(name: str) -> tuple[float, float]:
    """Return the processor seconds of a document of 2M tokens, and the resident MB that it adds at its peak."""
    tokenizer = open_tokenizer(str(real(name)))
    parts, tokens = [], 0
    for text in python_texts():
        parts.append(text)
        tokens += len(tokenizer.encode(text))
        if tokens >= LONG_TOKENS:
            break
    document = "".join(parts).encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    tokenizer.document(document)
    seconds = time.process_time() - start
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3


def real(name: str) -> Path:
    """Return a tokenizer's file, or end the program with the reason why it cannot be had."""
    found = real_file(name)
    return found if isinstance(found, Path) else sys.exit(found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--long"]:
        print(json.dumps(long_document(sys.argv[2])))
    else:
        sys.exit(driver.main(__doc__, cases, options))
