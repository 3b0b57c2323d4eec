"""Memory of each stage of a pipeline: parameters and saved bytes compared with the parts that devices build."""

from __future__ import annotations

import pytest
import torch

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.cluster.mesh import Place
from engine.config.load import load
from engine.config.schema import Config
from engine.cost.sizes import device_parameters
from engine.cost.stages import stages
from engine.cost.states import states
from engine.job import Job
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.models.common.part import Between
from engine.models.parallelize import parallelize
from engine.parallel.tensor import TensorParallel
from engine.trainer.model import part_of
from tests.attention.rings import unsplit
from tests.world import run_world

SIZE = ["layers=5", "hidden=64", "heads=4", "kv_heads=2", "ffn=160", "vocab=259"]
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4)]
EXPERTS = ["model.family=mixtral", "model.experts=4", "model.top_k=2"]
MODES = [
    ["recompute=none"],
    ["recompute=layer"],
    ["recompute=layer_keep_attention"],
    ["recompute=none", "mlp_tile=100"],
    ["recompute=none", "dtype=bf16"],
]
TOKENS, CPU = 400, torch.device("cpu")


def config(tp: int, pp: int, *keys: str) -> Config:
    mesh = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"cluster.ranks_per_node={tp * pp}"]
    return load(["recipe=quickstart", "compile=never", *(f"model.{key}" for key in SIZE), *mesh, *keys])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("more", [[], EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tp, pp", [(1, 1), *MESHES])
def test_parameters_are_those_of_the_part_that_a_device_builds(tp: int, pp: int, more: list[str], tied: bool) -> None:
    asked = config(tp, pp, f"model.tied={tied}", *more)
    for stage in range(pp):
        with torch.device("meta"):
            model = build_model(asked, part_of(asked, Place(pp=stage, hdp=0, tp=tp - 1)))
        assert device_parameters(asked, stage) == sum(parameter.numel() for parameter in model.parameters()), stage


@pytest.mark.parametrize("ep", [2, 4])
def test_parameters_with_shares_of_the_experts(ep: int) -> None:
    """The states are partitioned over fewer ranks, so that a rank has as much of them as without shares."""
    asked = config(1, 1, *EXPERTS, f"parallel.ep={ep}", f"cluster.ranks_per_node={ep}")
    whole = config(1, 1, *EXPERTS, f"cluster.ranks_per_node={ep}")
    with torch.device("meta"):
        model = build_model(asked, part_of(asked, Place(hdp=ep - 1)))
    assert device_parameters(asked, 0) == sum(parameter.numel() for parameter in model.parameters())
    assert states(asked, ep).optimizer == states(whole, ep).optimizer
    assert states(asked, ep).parameters < states(whole, ep).parameters


def test_each_micro_batch_in_flight_keeps_two_layers() -> None:
    """Counted by hand, layer by layer, for stages of unequal layers."""
    asked = config(1, 3, "model.layers=9", "parallel.stages=[2,4,3]", "cluster.ranks_per_node=3")
    costs, ratio, tokens = Job(asked).costs, 500_000, 1000
    layer = Job(config(1, 1, "model.layers=9")).costs.token_bytes // 9
    assert [stage.layers for stage in costs.stages] == [len(cut) for cut in stages(asked)] == [2, 4, 3]
    away = [in_flight * (own - 2) * layer * tokens // 2 for in_flight, own in ((3, 2), (2, 4), (1, 3))]
    for stage, expected in zip(costs.stages, away, strict=True):
        assert stage.host_bytes(tokens, ratio) == pytest.approx(expected, rel=0.01, abs=0)
    assert costs.host_bytes(tokens, ratio) == max(stage.host_bytes(tokens, ratio) for stage in costs.stages)
    peaks = [int(stage.peak_bytes(tokens, tokens, ratio)) for stage in costs.stages]
    assert int(costs.peak_bytes(tokens, tokens, ratio)) == max(peaks)
    assert len({stage.fixed_bytes for stage in costs.stages}) == 3


def saved(tp: int, pp: int, stage: int, keys: list[str]) -> int:
    """Bytes by storage that the layers of a device of a stage save in one forward pass."""
    asked = config(tp, pp, *keys)
    import torch.distributed as dist

    from engine.dtypes import DTYPES

    dtype = DTYPES[asked.dtype]
    part = part_of(asked, Place(pp=stage, hdp=0, tp=dist.get_rank() if tp > 1 else 0))
    model = build_model(asked, part).to(dtype)
    tensor = TensorParallel(dist.group.WORLD, asked.model.vocab) if tp > 1 else None
    parallelize(model, asked, CPU, None, tensor)
    initialise(model, 0)
    kept: dict[int, torch.UntypedStorage] = {}  # alive, or an address may be given to another
    plain = model.run_layer
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def counted(layer: object, x: torch.Tensor, rotation: tuple[torch.Tensor, ...], attention: object) -> torch.Tensor:
        excluded = parameters | {tensor.untyped_storage().data_ptr() for tensor in rotation}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in excluded:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return plain(layer, x, rotation, attention)  # type: ignore[arg-type]

    model.run_layer = counted  # type: ignore[assignment]
    positions = torch.arange(TOKENS)
    attention = AttentionContext(unsplit(TOKENS), None, choose(CPU, dtype, asked.model.head_dim))
    rows = -(-TOKENS // tp)
    given = positions % 259 if part.first else torch.randn(rows, asked.model.hidden, dtype=dtype, requires_grad=True)
    out = model(given, positions, positions % 259, attention)
    found = sum(storage.nbytes() for storage in kept.values())
    (out.stream.sum() if isinstance(out, Between) else out).backward()
    return found


def all_saved(tp: int) -> dict[str, tuple[int, int]]:
    """Saved bytes of each stage and mode of the meshes with this tp, each with the estimate of one in flight."""
    found = {}
    for pp in (pp for of, pp in MESHES if of == tp):
        for keys in MODES:
            for stage, costs in enumerate(Job(config(tp, pp, *keys)).costs.stages):
                estimate = TOKENS * costs.token_bytes // costs.in_flight
                found[f"tp {tp} pp {pp} stage {stage} {keys}"] = (saved(tp, pp, stage, keys), estimate)
    return found


@pytest.mark.world
@pytest.mark.parametrize("tp", [1, 2])
def test_saved_bytes_of_each_stage_are_those_of_the_estimate(tp: int) -> None:
    for ranks in run_world(tp, all_saved, tp):
        for name, (measured, estimate) in ranks.items():
            assert measured == pytest.approx(estimate, rel=0.01), name
