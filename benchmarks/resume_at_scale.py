"""How many files a checkpoint of many ranks has, and how many of them a rank opens to resume.

    python benchmarks/resume_at_scale.py [--tp 8] [--pp 8] [--hdp 192] [--node 8]

Writes the checkpoint of a tiny model on tp x pp x hdp ranks, `--node` of them on each node, without a world: only the
parts that are read have states in them, all others are empty pages. Then one rank loads its states under strace, which
counts the system calls in the folder.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from engine.cluster.mesh import Mesh, Place
from engine.config.load import load
from engine.config.schema import Config
from engine.family.families import parameters_of
from engine.run.checkpoints import FILES, MANIFEST, Range, TrainState, write_manifest
from engine.zero import reshard
from engine.zero.engine import ZeroEngine
from engine.zero.part import Encoded
from engine.zero.snapshot import FILE

PLACE = Place(hdp=5, tp=1, pp=1)  # of the rank that resumes
_NO_HASH = "0" * 32
_MODEL = "zero/mp_rank_{:02d}_model_states.pt"
_OPTIMIZER = "zero/zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"


def config_of(mesh: Mesh) -> Config:
    """The config of a run on a mesh, with a layer on each stage."""
    layers, heads = max(2, mesh.pp), max(4, mesh.tp)
    model = [f"model.layers={layers}", f"model.heads={heads}", f"model.kv_heads={heads}", f"model.hidden={16 * heads}"]
    ranks = [f"cluster.nodes={mesh.pp * mesh.hdp}", f"cluster.ranks_per_node={mesh.tp}"]
    return load(["recipe=quickstart", *model, *ranks, f"parallel.tp={mesh.tp}", f"parallel.pp={mesh.pp}"])


def shapes_of(config: Config, mesh: Mesh, stage: int) -> dict[str, torch.Size]:
    """The shapes of the parameters of a device on a stage, by name."""
    found = {}
    for name, parameter in parameters_of(config.model).items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0 if "embedding" in name else mesh.pp - 1
        if min(layer, mesh.pp - 1) == stage:
            size = list(parameter.shape)
            if parameter.split is not None:
                size[parameter.split] = -(-size[parameter.split] // mesh.tp)
            found[name] = torch.Size(size)
    return found


def length_of(shapes: dict[str, torch.Size], mesh: Mesh) -> int:
    """Elements of the flat tensor of an HDP rank."""
    return -(-sum(size.numel() for size in shapes.values()) // mesh.hdp)


def write_checkpoint(folder: Path, mesh: Mesh, ranks: Sequence[int], node: int = 8) -> None:
    """Write a checkpoint. The parts of the HDP ranks `ranks` have states: the rank's number among those of its device
    in each element."""
    config, of_ranks = config_of(mesh), list[list[tuple[Range, list[str]]]]()
    (folder / "zero").mkdir(parents=True)
    for first in range(0, mesh.ranks, node):
        last, start = min(first + node, mesh.ranks) - 1, 0
        name = FILE.format(first, last)
        with (folder / name).open("wb") as file:
            for rank in range(first, last + 1):
                states = states_of(config, mesh, mesh.place(rank), ranks)
                part = Encoded(states) if states else None
                size = part.size if part else mmap.PAGESIZE
                if part:
                    file.seek(start)
                    file.writelines(part.pieces())
                of_ranks.append([(Range(name, start, start + size), [_NO_HASH])])
                start += size
            file.truncate(start)
    state = TrainState(1, {}, mesh.ranks, {}, {}, mesh={"tp": mesh.tp, "pp": mesh.pp})
    write_manifest(folder, state, of_ranks)


def states_of(config: Config, mesh: Mesh, place: Place, ranks: Sequence[int]) -> dict[str, Any]:
    """What a rank saves: the model states of its device, if it is the first, and its own if it is one of `ranks`."""
    device, found = place.pp * mesh.tp + place.tp, dict[str, Any]()
    shapes = shapes_of(config, mesh, place.pp) if place.hdp in {0, *ranks} else {}
    if place.hdp == 0:
        found[_MODEL.format(device)] = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [shapes],
            "dp_world_size": mesh.hdp,
            "ds_config": {"zero_optimization": {"stage": 1}},
            "mesh": {"tp": mesh.tp, "pp": mesh.pp, "vocab": config.model.vocab, "ep": 1},
        }
    if place.hdp in ranks:
        flat = torch.full((length_of(shapes, mesh),), float(device * mesh.hdp + place.hdp))
        state = {"exp_avg": flat, "exp_avg_sq": flat, "step": torch.tensor(3.0)}
        names = {"single_partition_of_fp32_groups": [flat], "base_optimizer_state": {"state": {0: state}}}
        found[_OPTIMIZER.format(place.hdp, device)] = {"optimizer_state_dict": names}
    return found


def resume(folder: Path, mesh: Mesh, place: Place) -> torch.Tensor:
    """Load the states of one rank, and return its flat master weights."""
    config = config_of(mesh)
    shapes = shapes_of(config, mesh, place.pp)
    flat = torch.zeros(length_of(shapes, mesh))
    inner = SimpleNamespace(state={})
    optimizer = SimpleNamespace(single_partition_of_fp32_groups=[flat], optimizer=inner, update_lp_params=lambda: None)
    engine: Any = SimpleNamespace(optimizer=optimizer, module=nn.Module(), _get_zero_param_shapes=lambda: [shapes])
    axes = SimpleNamespace(mesh=mesh, place=place, hdp=None)
    world = SimpleNamespace(get_rank=lambda group: place.hdp, get_world_size=lambda group: mesh.hdp)
    with patch.object(reshard, "dist", world):
        ZeroEngine.load(SimpleNamespace(_engine=engine, _config=config, _axes=axes), folder)  # type: ignore[arg-type]
    return flat


def main() -> None:
    """Write the folder, resume one rank of it in a process, and print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("tp", 8), ("pp", 8), ("hdp", 192), ("node", 8)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the process that resumes
    arguments = parser.parse_args()
    mesh = Mesh(arguments.hdp, arguments.tp, arguments.pp)
    if arguments.folder:
        resume(arguments.folder, mesh, PLACE)
        return
    with tempfile.TemporaryDirectory() as root:
        folder, calls = Path(root, "checkpoint"), Path(root, "calls")
        write_checkpoint(folder, mesh, (0, PLACE.hdp), arguments.node)
        trace = ["strace", "-f", "-qq", "-e", "trace=openat", "-o", str(calls)]
        program = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
        environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        subprocess.run([*trace, *program], check=True, env=environment)
        opened = [line for line in calls.read_text().splitlines() if f'"{folder}' in line]
        files = Counter(line.split('"')[1].removeprefix(f"{folder}/") for line in opened if "O_DIRECTORY" not in line)
        states = {name: count for name, count in files.items() if name.startswith("zero/")}
        found = {
            "ranks": mesh.ranks,
            "files of states in the folder": len(list((folder / "zero").iterdir())),
            "bytes of the manifest": (folder / MANIFEST).stat().st_size,
            "bytes of its pages": (folder / FILES).stat().st_size,
            "pages": len((folder / FILES).read_bytes().splitlines()),
            "listings of a rank": len(opened) - files.total(),
            "files of states that a rank opens": len(states),
            "opens of files of states": sum(states.values()),
            "opens of the manifest and its pages": files.total() - sum(states.values()),
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
