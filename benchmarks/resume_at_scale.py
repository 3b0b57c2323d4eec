"""How many files of a checkpoint a rank opens, and how often it lists their folder, to resume among many ranks.

    python benchmarks/resume_at_scale.py [--tp 8] [--pp 8] [--hdp 192] [--code FOLDER]

Writes the checkpoint of a tiny model on tp x pp x hdp ranks, without a world: only the files that are read have states
in them, all others a few bytes. Then one rank loads its states under strace, which counts the system calls in the
folder. `--code` is the folder of the code to measure, such as that of an older version.
"""

from __future__ import annotations

import argparse
import json
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
from engine.zero import reshard
from engine.zero.engine import ZeroEngine

PLACE = Place(hdp=5, tp=1, pp=1)  # of the rank that resumes
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


def write_checkpoint(folder: Path, mesh: Mesh, ranks: Sequence[int]) -> None:
    """Write the files of a checkpoint. Those of the HDP ranks `ranks` have states: its own number in each element."""
    config = config_of(mesh)
    (folder / "zero").mkdir(parents=True)
    for device in range(mesh.pp * mesh.tp):
        shapes = shapes_of(config, mesh, device // mesh.tp)
        model = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [shapes],
            "dp_world_size": mesh.hdp,
            "ds_config": {"zero_optimization": {"stage": 1}},
            "mesh": {"tp": mesh.tp, "pp": mesh.pp, "vocab": config.model.vocab, "ep": 1},
        }
        torch.save(model, folder / _MODEL.format(device))
        for rank in range(mesh.hdp):
            path = folder / _OPTIMIZER.format(rank, device)
            if rank not in ranks:
                path.write_bytes(b"none")
                continue
            flat = torch.full((length_of(shapes, mesh),), float(device * mesh.hdp + rank))
            state = {"exp_avg": flat, "exp_avg_sq": flat, "step": torch.tensor(3.0)}
            names = {"single_partition_of_fp32_groups": [flat], "base_optimizer_state": {"state": {0: state}}}
            torch.save({"optimizer_state_dict": names}, path)


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
    for axis, size in (("tp", 8), ("pp", 8), ("hdp", 192)):
        parser.add_argument(f"--{axis}", type=int, default=size)
    parser.add_argument("--code", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the process that resumes
    arguments = parser.parse_args()
    mesh = Mesh(arguments.hdp, arguments.tp, arguments.pp)
    if arguments.folder:
        resume(arguments.folder, mesh, PLACE)
        return
    with tempfile.TemporaryDirectory() as root:
        folder, calls = Path(root, "checkpoint"), Path(root, "calls")
        write_checkpoint(folder, mesh, (0, PLACE.hdp))
        trace = ["strace", "-f", "-qq", "-e", "trace=openat", "-o", str(calls)]
        program = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
        environment = {"PYTHONPATH": str(arguments.code.resolve()), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        subprocess.run([*trace, *program], check=True, env=environment)
        opened = [line for line in calls.read_text().splitlines() if f'"{folder}/zero' in line]
        files = Counter(line.split('"')[1] for line in opened if "O_DIRECTORY" not in line)
        lists = len(opened) - files.total()
        entries = lists * len(list((folder / "zero").iterdir()))
    found = {"ranks": mesh.ranks, "listings": lists, "entries": entries, "files": len(files), "opens": files.total()}
    print(
        json.dumps(found | {"entries of all ranks": entries * mesh.ranks, "opens of all": found["opens"] * mesh.ranks})
    )


if __name__ == "__main__":
    main()
