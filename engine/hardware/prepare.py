"""Prepares the ranks that measure: the recipe's model, reduced to fit this machine, and a folder with a tiny corpus."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.cost.calibration import NEVER_S
from engine.cost.datasheets import nominal
from engine.cost.sizes import parameters
from engine.data.overview import Corpora
from engine.data.steps import Cursor
from engine.errors import MemoryFitError
from engine.fit.machine import on_this_machine
from engine.job import Job
from engine.launch.checks.launchable import check_launch
from engine.launch.prepare import write_facts
from engine.run.folder import RunFolder

LONGEST = {"cpu": 1 << 14, "cuda": 1 << 16}  # tokens
LONGEST_REFERENCE = 1 << 12  # tokens with the reference attention, which stores all scores
_LAYERS = 4  # layers are alike, so more of them give no further information
_LEAST = 1024  # tokens that must fit: one document
_DOCUMENTS, _BYTES = 64, 1000
_STEP = 2048  # tokens of a training step: a document for each of two ranks; the next step is planned meanwhile


def measuring(config: Config, ranks: int, folder: Path) -> Config:
    """Derive the config with which `ranks` ranks of this machine measure; its run folder and documents are in `folder`.

    The model keeps as many of its layers as fit, at most four. Training options are set to the simplest ones.
    Raises ConfigError for a recipe that cannot be trained here, and MemoryFitError if not even one layer fits.
    """
    # The simplest training: the cost model derives recompute, offload, tiles and sharded weights from its rates.
    sections = {
        # A step with a due checkpoint writes a trace. No checkpoint is saved, because nothing calls `save`.
        "run": {"steps": 1000, "validate_every": 1000, "checkpoint_every": 1, "out": str(folder)},
        "data": {
            "name": "folder",
            "format": "folder",
            "pattern": "*",
            "separator": None,
            "transform": (),
            "path": str(folder / "documents"),
            "cache": str(folder / "tokens"),
        }
        | {"encoding": "bytes", "validation_share": 0.0, "validation_tokens": 0},
        "cluster": {"nodes": 1, "ranks_per_node": ranks, "hostfile": None, "calibration": None},
        "planner": {"name": "static", "mode": "auto"},
        "optimizer": {"on_host": False},
        "zero": {"stage": 1, "weights_on_host": False},
        "parallel": {"tp": 1, "pp": 1, "stages": "auto", "ep": 1},
    }
    top = {"linear_dtype": "same", "recompute": "none", "mlp_tile": 0}
    top |= {"context": _LEAST, "capacity": _LEAST, "batch_tokens": _STEP}
    parts = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    ours = config.model_copy(update=parts | top)
    whole = Job(ours)
    check_launch(whole, launcher=None)
    whole, _ = on_this_machine(whole)
    # Only a few layers of a large model fit on one device.
    for layers in range(min(whole.config.model.layers, _LAYERS), 0, -1):
        cut = whole.with_config(with_layers(whole.config, layers))
        if most_tokens(cut) >= _LEAST:
            return cut.config
    message = f"not even one layer of model={config.model.name} fits on the device"
    raise MemoryFitError(message, key="cluster.device_memory", hint="measure with a smaller model")


def with_layers(config: Config, layers: int) -> Config:
    """Return the config with another number of layers."""
    return config.model_copy(update={"model": config.model.model_copy(update={"layers": layers})})


def longest(config: Config, device: str, kernel: str) -> int:
    """Return the length of the longest sequence to measure with an attention kernel, in tokens: a power of two."""
    fits = most_tokens(Job(config))
    most = LONGEST_REFERENCE if kernel == "reference" else LONGEST[device]
    return min(most, 1 << (fits.bit_length() - 1))


def most_tokens(job: Job) -> int:
    """Return the most tokens of a micro-batch that fit on a device; 0 if none do."""
    allowance = Allowance.of(job.config, job.cluster)
    return job.costs.most_tokens(allowance.usable(job.config.cluster.device_memory))


def write_folder(config: Config, folder: RunFolder) -> None:
    """Write the files that a rank needs: documents, their index and the config."""
    texts = Path(config.data.paths[0])
    for made in (texts, folder.logs, folder.checkpoints):
        made.mkdir()
    for number in range(_DOCUMENTS):
        text = bytes(1 + (number * 31 + place * 7) % 251 for place in range(_BYTES))
        (texts / f"{number:03d}").write_bytes(text)
    # Micro-batches are repeated, and cuDNN would get plans for their shapes after some repetitions. So all are measured
    # with the kernel for shapes without a plan, which in training computes about half of the pairs
    # (benchmarks/RESULTS.md): the measured rate of attention is lower than that of training.
    calibration = folder.root / "calibration.json"
    replace(nominal(config.cluster.name), plan_build_s=NEVER_S).write(calibration)
    cluster = config.cluster.model_copy(update={"calibration": str(calibration)})
    config = config.model_copy(update={"cluster": cluster})
    corpora = Corpora(config)
    corpora.pack_first(Cursor(), lambda line: None)
    write_facts(folder, config, corpora, parameters(config.model))
