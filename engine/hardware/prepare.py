"""What the ranks measure with: the recipe's model, cut to what fits, and a folder with a tiny corpus."""

from __future__ import annotations

from pathlib import Path

from engine.cluster.cluster import Cluster
from engine.config.schema import Config, Model
from engine.cost.allowance import Allowance
from engine.cost.model import Costs
from engine.data.index import build_index
from engine.errors import MemoryFitError
from engine.launch.prepare import write_facts
from engine.launch.run import check_trainable
from engine.trainer.folder import RunFolder

LONGEST = {"cpu": 16384, "cuda": 4096}  # tokens; on GPUs the kernel so far is the reference, which keeps all scores
_LAYERS = 4  # more say nothing new: layers are alike
_LEAST = 1024  # tokens that must fit: a document
_DOCUMENTS, _BYTES = 64, 1000
_STEP = 2048  # tokens of a training step, a document for each of two ranks: the next one is planned meanwhile


def measuring(config: Config, ranks: int, folder: Path) -> Config:
    """Return the config with which `ranks` of this machine measure in `folder`.

    Raises ConfigError for what cannot be trained here, and MemoryFitError where even one layer does not fit.
    """
    sections = {
        # A step at which a checkpoint is due is traced; none is saved, for nobody calls `save`.
        "run": {"steps": 1000, "validate_every": 1000, "checkpoint_every": 1, "out": str(folder)},
        "data": {"name": "folder", "format": "folder", "pattern": "*", "path": str(folder / "documents")}
        | {"encoding": "bytes", "validation_share": 0.0, "validation_tokens": 0},
        "cluster": {"nodes": 1, "ranks_per_node": ranks, "hostfile": None, "calibration": None},
        "planner": {"name": "static", "mode": "auto"},
        "optimizer": {"on_host": False},
        "zero": {"stage": 1, "weights_on_host": False},
        "parallel": {"tp": 1, "pp": 1},
    }
    whole = {"recompute": "none", "mlp_tile": 0, "context": _LEAST, "capacity": _LEAST, "batch_tokens": _STEP}
    parts = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    ours = config.model_copy(update=parts | whole)
    check_trainable(ours, Cluster.of(ours.cluster), launcher=None)
    return _cut(ours)


def with_layers(config: Config, layers: int) -> Config:
    """Return the config with another number of layers."""
    return config.model_copy(update={"model": config.model.model_copy(update={"layers": layers})})


def other_layers(model: Model) -> int | None:
    """Return a second number of layers, which shows what a layer costs however small; None for a model of one."""
    return model.layers // 2 or None


def longest(config: Config, device: str) -> int:
    """Return the longest sequence to measure, a power of two."""
    fits = Costs.of(config).most_tokens(usable(config))
    return min(LONGEST[device], 1 << (fits.bit_length() - 1))


def usable(config: Config) -> int:
    """Return the bytes of a device that are there for what is measured."""
    return Allowance.of(config).usable(config.cluster.device_memory)


def write_folder(config: Config, folder: RunFolder) -> None:
    """Write what a rank of the trainer starts from: documents, their index, the config."""
    documents = Path(config.data.path)
    for made in (documents, folder.logs, folder.checkpoints):
        made.mkdir()
    for number in range(_DOCUMENTS):
        text = bytes((number * 31 + place * 7) % 251 for place in range(_BYTES))
        (documents / f"{number:03d}").write_bytes(text)
    write_facts(folder, config, build_index(config.data), Costs.of(config).parameters)


def _cut(config: Config) -> Config:
    memory = usable(config)
    for layers in range(min(config.model.layers, _LAYERS), 0, -1):
        cut = with_layers(config, layers)
        if Costs.of(cut).most_tokens(memory) >= _LEAST:
            return cut
    message = f"not even one layer of model={config.model.name} fits the device to be measured with"
    raise MemoryFitError(message, key="cluster.device_memory", hint="measure with a smaller model")
