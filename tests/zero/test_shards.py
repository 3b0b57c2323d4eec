"""ZeRO-3 shards from the start: one of four ranks never holds much more than its shards, nor while weights load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.config.load import load
from engine.config.schema import Config
from engine.family.families import stored_names
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.models.decoder import Decoder
from engine.models.parallelize import parallelize
from engine.trainer.model import make_model
from engine.trainer.optimizer import build_optimizer
from engine.weights.check import expected_shapes
from engine.weights.config_json import config_json
from engine.weights.load import load_weights
from engine.weights.write import Entry, new_folder, write_weights
from engine.zero.engine import ZeroEngine
from engine.zero.shards import gathered, sharded, stored
from tests.attention.rings import unsplit
from tests.world import run_world

SHAPE = ["hidden=128", "heads=4", "kv_heads=2", "ffn=256", "layers=12"]
TOKENS = 32

pytestmark = pytest.mark.world


def config() -> Config:
    return load(["recipe=quickstart", "zero.stage=3", "recompute=layer", *(f"model.{key}" for key in SHAPE)])


def held(parameters: Iterable[nn.Parameter]) -> int:
    """Count the bytes of parameters on this rank: shards, and gathered parameters."""
    found = {}
    for parameter in parameters:
        for tensor in (parameter.data, parameter.ds_tensor):  # type: ignore[attr-defined]
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Peak:
    """The peak bytes of parameters, measured before and after every module, forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters, self.bytes = model, list(model.parameters()), 0

    def watch(self) -> None:
        for module in self.model.modules():
            module.register_forward_pre_hook(self.look)
            module.register_forward_hook(self.look)
            module.register_full_backward_pre_hook(self.look)

    def look(self, *_: Any) -> None:
        self.bytes = max(self.bytes, held(self.parameters))

    @contextmanager
    def gathered(self, parameter: nn.Parameter) -> Iterator[bool]:
        with gathered(parameter) as writes:
            self.look()
            yield writes


def made() -> tuple[Decoder, Peak]:
    with sharded(config()):
        model = build_model(config())
    parallelize(model, config(), torch.device("cpu"))
    return model, Peak(model)


def trained() -> tuple[int, int, int]:
    """Train; return the peak bytes of parameters, the bytes of all, and those of a layer."""
    model, peak = made()
    initialise(model, 0, stored=stored)
    engine = ZeroEngine(model, build_optimizer(model, config().optimizer), config())
    peak.watch()
    attention = AttentionContext(unsplit(TOKENS), None, choose(torch.device("cpu"), torch.float32, 32))
    numbers = torch.arange(TOKENS)
    for _ in range(2):
        engine.backward(engine.forward(numbers, numbers, numbers, attention), 4 * TOKENS)
        engine.step(1e-3)
    sizes = [p.ds_numel for p in model.parameters()]  # type: ignore[attr-defined]
    layer = sum(p.ds_numel for p in model.layers["0"].parameters())  # type: ignore[attr-defined]
    return peak.bytes, 4 * sum(sizes), 4 * layer


def test_a_rank_of_four_holds_its_share_and_a_layer() -> None:
    (alone_,) = run_world(1, trained)
    for peak, total, layer in run_world(4, trained):
        assert alone_[0] >= total
        assert peak <= 0.35 * alone_[0] + layer


def gathers(tile: int, mode: str) -> int:
    """Count how often modules ask for their parameters in a step of a tiled model."""
    settings = config().model_copy(update={"mlp_tile": tile, "recompute": mode})
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"layers": 2})})
    with sharded(settings):
        model = build_model(settings)
    parallelize(model, settings, torch.device("cpu"))
    initialise(model, 0, stored=stored)
    engine = ZeroEngine(model, build_optimizer(model, settings.optimizer), settings)
    coordinator = engine._engine.optimizer.parameter_offload.get_param_coordinator()
    plain, times = coordinator.fetch_sub_module, 0

    def counted(*arguments: Any, **names: Any) -> None:
        nonlocal times
        times += 1
        plain(*arguments, **names)

    coordinator.fetch_sub_module = counted
    attention = AttentionContext(unsplit(TOKENS), None, choose(torch.device("cpu"), torch.float32, 32))
    numbers = torch.arange(TOKENS)
    engine.backward(engine.forward(numbers, numbers, numbers, attention), 4 * TOKENS)
    engine.step(1e-3)
    return times


def all_gathers() -> dict[str, set[int]]:
    return {mode: {gathers(tile, mode) for tile in (3, TOKENS)} for mode in ("none", "layer")}


def test_a_layer_is_gathered_once_for_all_its_tiles() -> None:
    """Ranks have different numbers of tiles: gathering for each tile would hang."""
    (found,) = run_world(1, all_gathers)
    assert all(len(times) == 1 for times in found.values()), found


def folder_of(path: Path) -> Path:
    """Write random weights of the model's shape."""
    sizes, model = expected_shapes(config()), config().model
    names = [name for several in stored_names(model).values() for name in several]
    entries = [
        Entry(name, 4 * torch.Size(sizes[name]).numel(), lambda name=name: torch.randn(sizes[name])) for name in names
    ]
    with new_folder(path) as draft:
        write_weights(draft, config_json(model, 64, "float32", 256, 257), entries, 1 << 20)
    return path


def loaded(folder: Path) -> tuple[int, int, int, float]:
    """Load weights; return the peak bytes, the bytes of all and of the largest, and the sum over this rank's shards."""
    model, peak = made()
    load_weights(model, model.shape, folder, peak.gathered)
    largest = 4 * max(p.ds_numel for p in model.parameters())  # type: ignore[attr-defined]
    share = sum(float(p.ds_tensor.double().sum()) for p in model.parameters())  # type: ignore[attr-defined]
    return peak.bytes, 4 * sum(p.ds_numel for p in model.parameters()), largest, share  # type: ignore[attr-defined]


def test_nor_while_it_loads_weights(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "theirs")
    ranks = run_world(4, loaded, folder)
    for peak, total, largest, _ in ranks:
        assert peak <= 0.35 * total + largest
    ((_, _, _, expected),) = run_world(1, loaded, folder)
    assert sum(share for *_, share in ranks) == pytest.approx(expected, rel=1e-6)


def drawn(stage: int) -> tuple[dict[str, torch.Tensor], int, int]:
    """Make a model with the run's weights; return the whole weights, and how often parameters were gathered for each:
    to make the model, and to return them."""
    settings = config().model_copy(update={"zero": config().zero.model_copy(update={"stage": stage})})
    gathers: list[int] = []
    plain = GatheredParameters.__enter__

    def counted(context: GatheredParameters) -> Any:
        gathers.append(len(context.params))
        return plain(context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatheredParameters, "__enter__", counted)
        model = make_model(settings, torch.device("cpu"))
        to_make = sum(gathers)
        whole = {}
        for name, parameter in model.named_parameters():
            with gathered(parameter):
                whole[name] = parameter.detach().clone()
    return whole, to_make, sum(gathers) - to_make


def test_weights_are_the_same_for_any_number_of_ranks_and_any_stage() -> None:
    """Each rank draws its own shards: none gathers a parameter for it."""
    ((expected, *_),) = run_world(1, drawn, 1)
    for world in (2, 4):
        for stage in (1, 3):
            for found, to_make, to_return in run_world(world, drawn, stage):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], weight) for name, weight in expected.items()), (world, stage)
                assert (to_make, to_return) == (0, len(expected) if stage == 3 else 0)


def test_muon_is_imported_without_its_compiler() -> None:
    """DeepSpeed imports Muon in each rank, only to see that an optimizer is another one."""
    program = (
        "import sys\nfrom engine.zero.shards import _import_muon\n"
        "_import_muon()\n"
        "from deepspeed.runtime import compiler\n"
        "from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam\n"
        "assert 'torch._inductor' not in sys.modules and compiler.compile() is not compiler.dummy_decorator\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
