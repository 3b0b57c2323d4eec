"""`python -m tests.run.every_damage RUN` damages the newest checkpoint of a run in every way, and repairs it.

Each single bit of the manifest; and of each file, the manifest too, 200 random flips, 20 truncations, 20 zeroed tails,
and no file at all. The run needs an older checkpoint, which must be chosen each time, for a reason that names the file.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from engine.run.checkpoints import FILES, MANIFEST, newest_first, read
from engine.run.saved import choose


def bits(content: bytes) -> Iterator[bytes]:
    """Flip each bit."""
    for bit in range(8 * len(content)):
        yield content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def others(content: bytes, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Flip random bits, cut the file, and zero its tail; skip what changes nothing."""
    for _ in range(200):
        damaged = bytearray(content)
        for bit in draw.sample(range(8 * len(content)), draw.randint(1, 40)):
            damaged[bit // 8] ^= 1 << bit % 8
        yield "random flips", bytes(damaged)
    for _ in range(20):
        at = draw.randrange(len(content))
        yield "truncations", content[:at]
    for _ in range(20):
        at = draw.randrange(len(content))
        yield "zeroed tails", content[:at] + bytes(len(content) - at)


def main(run: Path) -> int:
    """Print how many damages of each kind were tried and, of them, silent or told falsely. Returns the exit code."""
    newest, older = newest_first(run / "checkpoints")[:2]
    states = sorted(str(path.relative_to(newest)) for path in (newest / "zero").iterdir())
    names, draw = [MANIFEST, FILES, *states], random.Random(0)
    tried, wrong = Counter[str](), Counter[str]()

    def judge(kind: str, name: str, hashes: bool) -> None:
        said = list[str]()
        right = choose(run / "checkpoints", said.append, hashes) == older
        tried[kind] += 1
        wrong[kind] += not (right and len(said) == 1 and f"{newest.name} is damaged ({name} " in said[0])

    for name in names:
        path = newest / name
        content = path.read_bytes()
        try:
            if name in (MANIFEST, FILES):
                for damaged in bits(content):
                    path.write_bytes(damaged)
                    judge("single bits of the manifest", name, hashes=False)
            for kind, damaged in others(content, draw):
                if damaged != content:
                    path.write_bytes(damaged)
                    judge(kind, name, hashes=name != MANIFEST)
            path.unlink()
            judge("missing files", path.name, hashes=False)
        finally:
            path.write_bytes(content)
    read(newest)
    for kind, number in tried.items():
        print(f"{number:,} {kind}: {wrong[kind]} silent, or with a false reason or no fallback")
    return int(wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
