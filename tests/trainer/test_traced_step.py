"""Whole steps of models of real widths on a device without values: what the host waits for, and how much it launches.

The stand-in for a GPU is PyTorch's meta device (FakeTensorMode has no autograd for CUDA in a build without CUDA).
Reading a value raises there. Attention and the grouped product of experts, which test themselves on values, are chosen
by hand. Tensors there have no addresses, by which offload tells storages apart, nor can they be copied to the host:
both have stand-ins.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.buffers import Buffers
from engine.attention.kernels.call import Call, Kernel
from engine.attention.layout import layout
from engine.config.load import load
from engine.config.schema import Config
from engine.data.inputs import RankInputs
from engine.job import Job
from engine.models.build import build_model
from engine.models.common import loss as losses
from engine.models.experts import grouped
from engine.models.parallelize import parallelize
from engine.offload.offload import Offload
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import MicroBatch
from engine.selection import Selected
from engine.trainer.model import make_offload
from engine.trainer.step import RankContext, run_step
from tests.covering import covered
from tests.root import ROOT

pytestmark = pytest.mark.long

META = torch.device("meta")
RECOMPUTE = ["none", "layer", "layer_keep_attention"]
DOCUMENTED = ROOT / "docs" / "gpu.md"
LENGTHS = [32 * 1024, 9000, 7000, 5000, 3000]  # a ring of four (of three with offload), rings of two, unsplit ones
WIDTHS = {
    "llama": ["model=llama7b"],
    "mixtral": ["model=mixtral8x7b"],
}
NO_KERNEL = (
    "aten::set_",
    "aten::empty",
    "aten::new_empty",
    "aten::detach",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::lift",
    "aten::set_",
)


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel on the device, and lists those that also use a tensor of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.mixed = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        flat = [x for arg in (*args, result) for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        devices = {x.device.type for x in flat if isinstance(x, Tensor)}
        self.count += "meta" in devices and not (func.is_view or name.startswith(NO_KERNEL))
        if len(devices) > 1:
            self.mixed.add(name)
        return result


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    return torch.clone(q), q.new_zeros(q.shape[:2], dtype=torch.float32)  # one launch


def derive(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call) -> tuple[Tensor, ...]:
    return torch.clone(q), torch.empty_like(k), torch.empty_like(v)  # one launch


class Copies:
    """Stands in for the stream of copies in one direction: counts bytes, and copies nothing."""

    def __init__(self) -> None:
        self.bytes = {"to host": 0, "to device": 0, "on device": 0}

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            assert len(target) == len(source) and META in (target.device, source.device)
            way = "on device" if target.device == source.device else "to device" if target.is_meta else "to host"
            self.bytes[way] += len(source)

    def computing_waits(self, done: None = None) -> None:
        pass


def inputs(micro: MicroBatch) -> RankInputs:
    tokens = layout(micro).tokens
    return RankInputs(*(np.zeros(tokens, dtype=np.int64) for _ in range(3)))


def traced(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Launches, int, Offload | None]:
    """Run a step of rank 0; return what was launched, the number of micro-batches, and the offload if there is one."""
    settings = Job(config).settings
    offload = make_offload(config, META, settings.host_memory) if settings.offload else None
    if offload is not None:
        offload._out = offload._back = Copies()  # type: ignore[assignment]
        monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)
    chunks = Selected("chunks", "", losses.chunked_loss, ())
    monkeypatch.setattr(losses, "choose", lambda *_: chunks)
    monkeypatch.setattr(grouped, "choose", lambda *_: Selected("", "", grouped.KERNEL, ()))
    with META:
        model = build_model(config).to(torch.bfloat16)
    parallelize(model, config, META, offload)
    plan = plan_step(np.array(LENGTHS, dtype=np.int64), settings)
    assert plan.degrees.max() >= 3 and plan.degrees.min() == 1, plan.degrees
    comm = SimpleNamespace(buffers=Buffers(), post=lambda exchanges: SimpleNamespace(wait=lambda: None))
    kernel = Kernel("stand-in", "", attend, derive)  # type: ignore[arg-type]
    context = RankContext(0, META, comm, kernel, offload)  # type: ignore[arg-type]
    with Launches() as launches:
        loss, times = run_step(plan, model, lambda loss: loss.backward(), inputs, context)
    assert loss.device == META and all(parameter.grad is not None for parameter in model.parameters())
    return launches, len(times.marks), offload


@covered("family, recompute, ratio", list(WIDTHS), RECOMPUTE, [0, 0.5])
def test_a_step_reads_no_value_and_uses_no_tensor_of_the_host(
    family: str, recompute: str, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = [*WIDTHS[family], "model.layers=8", "dtype=bf16", "zero.stage=1", f"recompute={recompute}"]
    ranks = ["cluster=h100x8", "cluster.device_memory=1T", "cluster.ranks_per_node=4", "planner=balanced"]
    sizes = ["capacity=8K", "context=32K", "batch_tokens=64K", f"offload.ratio={ratio}"]
    launches, micro_batches, offload = traced(load([*shape, *ranks, *sizes]), monkeypatch)
    assert launches.mixed <= {"aten::_to_copy"}, "only the lengths of shards are copied to the device, for the balance"
    if offload is not None:
        copies: Any = offload._out
        assert 0.2 < offload.moved_bytes / offload.saved_bytes < ratio * (8 - 2) / 8, "the last two layers keep theirs"
        assert copies.bytes["to host"] == copies.bytes["to device"] == offload.moved_bytes
    count, model = launches.count / micro_batches, {"llama": "LLaMA 7B", "mixtral": "Mixtral 8x7B"}[family]
    row = f"| {model}{f', offload.ratio={ratio}' if ratio else ''} |"
    print(f"{row} recompute={recompute}: {count:,.0f} launches per micro-batch of 8 layers")
    (line,) = (line for line in DOCUMENTED.read_text(encoding="utf-8").splitlines() if line.startswith(row))
    documented = line.strip("| ").split(" | ")[1 + RECOMPUTE.index(recompute)]
    assert count == pytest.approx(int(documented.replace(",", "")), rel=0.02), "docs/gpu.md"
