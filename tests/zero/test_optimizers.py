"""What others need to know of an optimizer is in its entry: a test adds one with two kinds of states.

If these fail, a new optimizer is trained, estimated or saved wrongly although its entry says what it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bytescale_cli.main import run
from engine.config import schema
from engine.config.load import load
from engine.cost.optimizers import OPTIMIZERS, Optimizer, alike
from engine.cost.states import states
from engine.family.families import parameters_of
from engine.zero.states import MASTER, SavedStates
from tests.world import run_world
from tests.zero.engines import EXPERTS, SHAPE, engine_of, train
from tests.zero.saving import save


class Mixed(torch.optim.Optimizer):
    """Momentum for matrices, Adam's two moments for vectors, and nothing for experts."""

    def __init__(self, groups: dict[str, dict[str, Any]], lr: float) -> None:
        super().__init__([group | {"kind": kind} for kind, group in groups.items()], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, update = self.state[p], p.grad
                if group["kind"] == "matrix":
                    state.setdefault("momentum", torch.zeros_like(p))
                    update = state["momentum"].mul_(0.9).add_(p.grad)
                if group["kind"] == "vector":
                    for name in ("first", "second"):
                        state.setdefault(name, torch.zeros_like(p))
                    state["step"] = state.get("step", torch.zeros(())) + 1
                    state["first"].lerp_(p.grad, 0.1)
                    state["second"].lerp_(p.grad.square(), 0.1)
                    update = state["first"] / (state["second"].sqrt() + 1e-3)
                p.sub_(group["lr"] * update)


MIXED = Optimizer(
    build=lambda groups, settings: Mixed(groups, settings.lr),
    states=lambda settings: {"matrix": ("momentum",), "vector": ("first", "second"), "expert": ()},
)


def config_of(stage: int, *more: str) -> schema.Config:
    chosen = ["model.family=mixtral", "dtype=fp32", "optimizer.name=mixed", f"zero.stage={stage}"]
    return load(["recipe=quickstart", *(f"model.{one}" for one in SHAPE), *EXPERTS, *chosen, *more])


def saved_in(folder: Path) -> SavedStates:
    return SavedStates(folder, parameters_of(config_of(1).model))


def whole(folder: Path) -> dict[str, Tensor]:
    """All states of a checkpoint by parameter and key."""
    saved, found = saved_in(folder), dict[str, Tensor]()
    for name, size in saved.shapes.items():
        for key in saved.keys(name):
            found[f"{name} {key}"] = torch.zeros(size.numel())
            saved.read(name, key, 0, found[f"{name} {key}"])
        found[f"{name} step"] = torch.tensor(saved.step(name) or 0)
    return found


def trained(folder: Path, stage: int, before: Path | None = None) -> tuple[int, float]:
    """On a rank: load `before`, save it into `folder` / again, train two steps, save into `folder`.

    Returns the elements of the optimizer's states of this rank, master weights included, and the last norm.
    """
    OPTIMIZERS["mixed"] = MIXED
    engine = engine_of(config_of(stage), seed=0)
    if before is not None:
        engine.load(before)
        save(engine, folder / "again")
    norms = train(engine, 2)
    save(engine, folder)
    inner = engine._engine.optimizer.optimizer
    tensors = [tensor for state in inner.state.values() for key, tensor in state.items() if key != "step"]
    return sum(map(torch.numel, [*inner.state, *tensors])), norms[-1]


@pytest.mark.world
@pytest.mark.parametrize(("stage", "other"), [(1, 3), (3, 2)])
def test_an_added_optimizer_trains_and_resumes_with_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, other: int
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "mixed", MIXED)
    found = run_world(2, trained, tmp_path / "a", stage)
    estimated = states(config_of(stage), 2).optimizer // 4
    assert all(0 <= held - estimated < 200 for held, _ in found), "DeepSpeed pads the part of each kind"

    again = run_world(3, trained, tmp_path / "b", other, tmp_path / "a")
    saved, loaded = whole(tmp_path / "a"), whole(tmp_path / "b" / "again")
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    kinds = {
        "layers.0.attention.q.weight": {MASTER, "momentum"},
        "layers.0.ffn.up": {MASTER},
        "norm.weight": {MASTER, "first", "second"},
    }
    for name, keys in kinds.items():
        assert {*saved_in(tmp_path / "a").keys(name)} == keys
        assert saved[f"{name} step"] == (2 if name == "norm.weight" else 0)
    assert whole(tmp_path / "b")["norm.weight step"] == 4 and len({norm for _, norm in again}) == 1


def test_states_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over parameters; each kind is partitioned by itself."""
    monkeypatch.setitem(OPTIMIZERS, "mixed", MIXED)
    for more in ([], ["parallel.tp=2", "cluster.ranks_per_node=8", "model.kv_heads=2"]):
        config = config_of(1, "model.ffn=20", "model.vocab=260", *more)
        h, f, layers, tp = 20, 20, 2, config.parallel.tp
        heads = 2 * h * h + 2 * h * (h if more else h // 2)
        router, vectors, experts = 3 * h * layers, (2 * layers + 1) * h, 3 * 3 * h * f * layers // tp
        matrices = (heads * layers + 2 * 260 * h) // tp + router
        parts = [-(-count // 3) for count in (matrices + vectors + experts, vectors, experts)]
        assert states(config, 3).optimizer == 4 * (2 * parts[0] + parts[1] - parts[2])


def test_an_added_optimizer_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(OPTIMIZERS, "mixed", MIXED)
    assert run(["config", "help", "optimizer.name", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["help"]["keys"][0]["allowed"] == ["adamw", "sgd", "mixed"]
    assert run(["candidates", "plan", "optimizer.name=m"]) == 0
    assert capsys.readouterr().out.split() == ["optimizer.name=mixed"]
    assert run(["estimate-memory", "optimizer.name=mixed", "--json"]) == 0
    mixed = json.loads(capsys.readouterr().out)["memory"]["optimizer"]
    assert run(["estimate-memory", "--json"]) == 0
    assert 0.66 < mixed / json.loads(capsys.readouterr().out)["memory"]["optimizer"] < 0.68
    assert run(["estimate-memory", "optimizer.name=mixd", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["key"] == "optimizer.name" and "did you mean mixed?" in error["hint"]


def test_an_optimizer_of_whole_matrices_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "mixed", Optimizer(MIXED.build, MIXED.states, whole_matrices=True))
    assert run(["estimate-memory", "optimizer.name=mixed", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["key"] == "optimizer.name"


def test_an_optimizer_without_its_traits_is_refused() -> None:
    with pytest.raises(TypeError):
        OPTIMIZERS["mixed"] = Mixed  # type: ignore[assignment]
    with pytest.raises(TypeError):
        Optimizer(MIXED.build)  # type: ignore[call-arg]
    assert alike("a") == {"matrix": ("a",), "vector": ("a",), "expert": ("a",)}
