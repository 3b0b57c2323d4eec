"""What reading weights takes beside the rank's own parameters: peak resident bytes against the largest shard.

`python benchmarks/import_memory.py` makes a model of 1 GB in 4 shards in a temporary folder and reads it, each time in
a process of its own: into a rank's model in fp32, and through `ckpt import --out`. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from engine.config.load import load
from engine.models.build import build_model
from engine.weights.architectures import tensor_names
from engine.weights.check import expected_shapes
from engine.weights.config_json import config_json
from engine.weights.copy import import_weights
from engine.weights.load import load_weights
from engine.weights.write import Entry, new_folder, write_weights

LARGE = ("model.hidden=2048", "model.ffn=8192", "model.layers=6", "model.heads=16", "model.kv_heads=16")
LARGE_VOCAB = "model.vocab=32000"


def main() -> None:
    """Print one line a way of reading."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", nargs="+", metavar=("WAY", "FOLDER"))
    child = parser.parse_args().child
    if child:
        print(json.dumps(measure(child[0], Path(child[1]), child[2:])))
        return
    with tempfile.TemporaryDirectory() as place:
        largest = generate(Path(place) / "theirs", [*LARGE, LARGE_VOCAB], shards=4)
        for way in ("load", "import"):
            parameters, extra = in_a_process(way, Path(place) / "theirs", [*LARGE, LARGE_VOCAB])
            held = f"parameters {parameters / 1e6:,.0f} MB, largest shard {largest / 1e6:,.0f} MB"
            print(f"{way}: {held}, beside them {extra / 1e6:,.0f} MB = {extra / largest:.2f} shards", flush=True)


def generate(folder: Path, overrides: list[str], shards: int) -> int:
    """Write a model of random bf16 weights; return the bytes of its largest shard."""
    config = load(overrides)
    sizes = expected_shapes(config)
    names = [name for several in tensor_names(config.model).values() for name in several]
    entries = [
        Entry(name, 2 * torch.Size(sizes[name]).numel(), partial(torch.randn, sizes[name], dtype=torch.bfloat16))
        for name in names
    ]
    with new_folder(folder) as draft:
        most = sum(entry.bytes for entry in entries) // (shards - 1)
        write_weights(draft, config_json(config.model, 4096, "bfloat16", 256, 257), entries, most)
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def in_a_process(way: str, folder: Path, overrides: list[str]) -> tuple[int, int]:
    """Return the bytes of the model that a fresh process holds, and its peak beyond what it held before it read."""
    command = [sys.executable, __file__, "--child", way, str(folder), *overrides]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    parameters, extra = json.loads(done.stdout)
    return parameters, extra


def measure(way: str, folder: Path, overrides: list[str]) -> tuple[int, int]:
    """Read a folder in this process, into a model or as a copy beside it."""
    config = load(overrides)
    expected_shapes(config)  # what is imported on the way is not weights
    if way == "import":
        before = _resident("VmRSS")
        import_weights(folder, folder.with_name("copy"))
        return 0, _resident("VmHWM") - before
    model = build_model(config)
    before = _resident("VmRSS")
    load_weights(model, config.model, folder)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return parameters, _resident("VmHWM") - before - parameters  # no page of which was there before


def _resident(field: str) -> int:
    """Return VmRSS or VmHWM, its peak, in bytes; pages of mapped files count."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


if __name__ == "__main__":
    main()
