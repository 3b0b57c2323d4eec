"""Messages and bytes that a training step sends through the control group (gloo), in worlds of 2, 4 and 8 ranks.

`python benchmarks/control_plane.py` trains a tiny model with a batch that grows with the world, and counts the calls on
the control group. A message is one call; its bytes are those of its input and output tensors on the rank. The exit code
is 1 unless messages and bytes of the busiest rank are equal in all worlds within 20 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from engine.config.load import load, read_resolved
from engine.run.folder import RunFolder

WORLDS = (2, 4, 8)
STEPS, WARM_UPS = 12, 2
TOKENS = 2048  # per rank and step
MODEL = ["model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64"]
CALLS = ("allreduce", "broadcast", "allgather", "gather", "reduce", "send", "recv", "barrier")
FLAT = 0.2  # largest relative growth over the worlds


def main() -> None:
    """Print a row for each world."""
    print("| ranks | messages per step | bytes per step, busiest rank | bytes per step, mean |\n|---|---|---|---|")
    rows = []
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as root:
            found = train(world, Path(root))
        rows.append((max(m for m, _ in found), max(b for _, b in found)))
        mean = sum(b for _, b in found) / world
        print(f"| {world} | {rows[-1][0]:.1f} | {rows[-1][1]:,.0f} | {mean:,.0f} |", flush=True)
    flat = all(max(values) <= (1 + FLAT) * min(values) for values in zip(*rows, strict=True))
    print("equal within 20 % in all worlds" if flat else "not equal within 20 % in all worlds")
    sys.exit(not flat)


def train(world: int, root: Path) -> list[tuple[float, float]]:
    """Train in a new world; return (messages, bytes) per step of each rank."""
    from engine.cluster.cluster import Cluster
    from engine.cost.sizes import parameters
    from engine.data.overview import Corpora
    from engine.launch.commands import node_commands
    from engine.launch.prepare import write_facts
    from engine.launch.ranks import run_ranks

    folder, documents = RunFolder(root / "run"), root / "documents"
    for made in (folder.logs, folder.checkpoints, documents):
        made.mkdir(parents=True)
    for number in range(400):
        (documents / f"{number:03d}.py").write_text("abcdefg " * (1 + number % 100))
    places = [f"data.path={documents}", f"run.out={folder.root}", f"cluster.ranks_per_node={world}"]
    sizes = ["context=1K", "capacity=1K", f"batch_tokens={TOKENS * world}", "run.steps=1000"]
    config = load(["recipe=quickstart", *MODEL, *places, *sizes])
    write_facts(folder, config, Corpora(config), parameters(config.model))
    commands = node_commands(Cluster.of(config.cluster), folder, None, config)
    for command in commands:
        program = [sys.executable, str(Path(__file__).resolve()), "rank", str(folder.root)]
        command.job["ranks"] = [[rank, program] for rank in command.ranks]
        command.job["environment"]["OMP_NUM_THREADS"] = "1"
    run_ranks(commands, folder, lambda: None, lambda text: None)
    return [tuple(one) for one in json.loads((folder.root / "counted.json").read_text())]


def rank(root: Path) -> int:
    """Train on this rank; rank 0 writes the counts of all ranks, means over the steps after the warm-up."""
    import torch.distributed as dist

    from engine.parallel.groups import join_groups
    from engine.trainer.loop import Trainer

    folder = RunFolder(root)
    config = read_resolved(folder.resolved)
    groups = join_groups(config)
    trainer = Trainer(folder, config, groups)
    counted = {"messages": 0, "bytes": 0}
    for name in CALLS:
        setattr(dist.ProcessGroup, name, counting(name, groups.control.group_name, counted))
    trainer.begin(None)
    for step in range(STEPS):
        if step == WARM_UPS:
            counted.update(messages=0, bytes=0)
        trainer.one_step(lambda: False)
    mine = [value / (STEPS - WARM_UPS) for value in counted.values()]
    everyone: list[Any] = [None] * groups.mesh.ranks
    dist.all_gather_object(everyone, mine, group=groups.control)
    if groups.rank == 0:
        (root / "counted.json").write_text(json.dumps(everyone))
    trainer.close()
    return 0


def counting(name: str, group: str, counted: dict[str, int]) -> Any:
    """Wrap the method `name` of process groups, so that its calls on `group` are added to `counted`."""
    import torch.distributed as dist

    plain = getattr(dist.ProcessGroup, name)

    def call(self: Any, *arguments: Any, **names: Any) -> Any:
        if self.group_name == group:
            counted["messages"] += 1
            both_ways = 2 if name == "allreduce" else 1  # its tensors are input and output
            counted["bytes"] += both_ways * sum(tensor.nbytes for tensor in tensors(arguments))
        return plain(self, *arguments, **names)

    return call


def tensors(value: Any) -> list[Any]:
    """The tensors in nested lists, as a flat list."""
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors(one)]
    return [value] if hasattr(value, "nbytes") else []


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank(Path(sys.argv[2])))
    main()
