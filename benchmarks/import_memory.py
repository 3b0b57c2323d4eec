"""Peak memory while a rank reads weights, in addition to its own parameters, relative to the largest shard.

`python benchmarks/import_memory.py` writes a model of 1 GB in 4 shards to a temporary folder and reads it in two ways,
each in a new process: into a rank's fp32 model, and with `ckpt import --out`. It needs Linux, because it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load
from engine.family.families import stored_names
from engine.models.build import build_model
from engine.weights.check import expected_shapes
from engine.weights.config_json import config_json
from engine.weights.copy import import_weights
from engine.weights.load import load_weights
from engine.weights.write import Entry, new_folder, write_weights

LARGE = ("model.hidden=2048", "model.ffn=8192", "model.layers=6", "model.heads=16", "model.kv_heads=16")
LARGE_VOCAB = "model.vocab=32000"


def row(way: str) -> Iterator[driver.Row]:
    """Yield the row of a way of reading; sizes in MB."""
    with tempfile.TemporaryDirectory() as place:
        largest = generate(Path(place) / "theirs", [*LARGE, LARGE_VOCAB], shards=4)
        parameters, extra = in_a_process(way, Path(place) / "theirs", [*LARGE, LARGE_VOCAB])
    sizes = {"parameters_mb": parameters, "largest_shard_mb": largest, "more_mb": extra}
    yield {"way": way, **{name: round(size / 1e6) for name, size in sizes.items()}, "shards": extra / largest}


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for way in ("load", "import"):
        yield way, partial(row, way)


def generate(folder: Path, overrides: list[str], shards: int) -> int:
    """Write a model of random bf16 weights, and return the bytes of its largest shard."""
    config = load(overrides)
    sizes = expected_shapes(config)
    names = [name for several in stored_names(config.model).values() for name in several]
    entries = [
        Entry(name, 2 * torch.Size(sizes[name]).numel(), partial(torch.randn, sizes[name], dtype=torch.bfloat16))
        for name in names
    ]
    with new_folder(folder) as draft:
        most = sum(entry.bytes for entry in entries) // (shards - 1)
        write_weights(draft, config_json(config.model, 4096, "bfloat16", 256, 257), entries, most)
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def in_a_process(way: str, folder: Path, overrides: list[str]) -> tuple[int, int]:
    """Run `measure` in a new process; returns the same values."""
    command = [sys.executable, __file__, "--child", way, str(folder), *overrides]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    parameters, extra = json.loads(done.stdout)
    return parameters, extra


def measure(way: str, folder: Path, overrides: list[str]) -> tuple[int, int]:
    """Read a folder, into a model (`load`) or as a copy (`import`).

    Returns the bytes of the model's parameters, and the growth of this process's peak memory beyond these.
    """
    config = load(overrides)
    expected_shapes(config)  # imports modules, which should not be counted
    if way == "import":
        before = _resident("VmRSS")
        import_weights(folder, folder.with_name("copy"))
        return 0, _resident("VmHWM") - before
    model = build_model(config)
    before = _resident("VmRSS")
    load_weights(model, config.model, folder)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    # The pages of the parameters were not resident before.
    return parameters, _resident("VmHWM") - before - parameters


def _resident(field: str) -> int:
    """Resident memory (VmRSS) or its peak (VmHWM) in bytes, including pages of mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])))
    else:
        sys.exit(driver.main(__doc__, cases))
