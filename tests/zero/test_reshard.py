"""A checkpoint is loaded with other numbers of ranks and in other stages, to the last bit.

DeepSpeed's own functions gather every parameter and moment, before a checkpoint is saved and after it is loaded.
"""

from __future__ import annotations

import gc
import os
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.config import ZeroStageEnum

from engine.config.schema import Config
from engine.errors import CheckpointError
from engine.family.families import parameters_of
from engine.models.decoder import Decoder
from engine.zero import initialize
from engine.zero.engine import ZeroEngine
from engine.zero.settings import deepspeed_settings
from engine.zero.sharded import ShardedOptimizer
from engine.zero.states import SavedStates, master_weights
from tests.allocations import allocated
from tests.refusals import refused
from tests.world import run_world
from tests.zero.engines import config_of, differences, engine_of, gather, train
from tests.zero.saving import change_part, save, take_apart

pytestmark = pytest.mark.world

WORLDS, STAGES = (1, 2, 3), (1, 2, 3)
RESHARDED = ("fp32", "bf16 tied", "fp32 experts, sgd")  # all dtypes, states, ties and experts


def folder_of(root: Path, kind: str, world: int, stage: int) -> Path:
    return root / f"{kind}, {world} ranks, stage {stage}"


def set_biases(model: Decoder) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.copy_(torch.arange(len(buffer)) * 3 % 7 - 3)


def save_all(root: Path) -> None:
    """On a rank: train two steps of each kind in each stage, and save a checkpoint."""
    gc.freeze()  # DeepSpeed collects garbage up to six times per engine
    for kind, stage in product(RESHARDED, STAGES):
        engine = engine_of(config_of(kind, stage), seed=0)
        set_biases(engine.module)
        train(engine, 2)
        whole, folder = gather(engine), folder_of(root, kind, dist.get_world_size(), stage)
        save(engine, folder)
        if dist.get_rank() == 0:
            torch.save(whole, folder / "whole.pt")


def load_all(root: Path) -> list[str]:
    """On a rank: load the checkpoints in each stage; return what differs."""
    gc.freeze()
    wrong, here = [], dist.get_world_size()
    for (number, kind), world, before in product(enumerate(RESHARDED), WORLDS, STAGES):
        # For each kind 9 of 81 combinations: any two of saved world, saved stage, loading world and loading stage occur
        # together. And those in which a rank stores what one of the checkpoint has stored.
        chosen = set() if (before + world + here + number) % 3 else {STAGES[(before + 2 * world + 2 * number) % 3]}
        for stage in chosen | ({before} if world == here else set()):
            folder = folder_of(root, kind, world, before)
            engine = engine_of(config_of(kind, stage), seed=1)
            engine.load(folder)
            changed = differences(torch.load(folder / "whole.pt"), gather(engine))
            wrong += [f"{folder.name} -> {here} ranks, stage {stage}: {changed}"] if changed else []
    return wrong


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all kinds, worlds and stages."""
    folder = tmp_path_factory.mktemp("saved")
    for world in WORLDS:
        run_world(world, save_all, folder)
    return folder


@pytest.mark.parametrize("world", WORLDS)
def test_all_states_are_equal_to_the_last_bit(root: Path, world: int) -> None:
    """Weights, master weights, moments, steps and the experts' biases."""
    adamw, sgd = (torch.load(folder_of(root, kind, 3, 1) / "whole.pt") for kind in ("bf16 tied", "fp32 experts, sgd"))
    assert adamw["keys"] == ["exp_avg", "exp_avg_sq"] and adamw["steps"] == 2
    assert sgd["keys"] == ["momentum_buffer"] and sgd["buffer layers.0.ffn.bias"].tolist() == [-3, 0, 3]
    for found in run_world(world, load_all, root):
        assert found == []


def to_the_host_and_back(root: Path) -> list[dict[str, Any]]:
    """On a rank: load what an engine with the states elsewhere saved; compare the states and two more steps."""
    gc.freeze()
    found = []
    for kind, stage, host in product(("fp32", "bf16 tied"), STAGES, (False, True)):
        # Half of the cases, in which any two of the three occur together, and the one of most GPU runs.
        if (stage + host + (kind == "fp32")) % 2 and (kind, stage, host) != ("bf16 tied", 1, False):
            continue
        folder = root / f"{kind}, stage {stage}, {host}"
        first = engine_of(config_of(kind, stage, f"optimizer.on_host={host}"), seed=0)
        train(first, 2)
        save(first, folder)
        second = engine_of(config_of(kind, 4 - stage, f"optimizer.on_host={not host}"), seed=1)
        second.load(folder)
        changed, on_host = differences(gather(first), gather(second)), [is_on_host(one) for one in (first, second)]
        norms = train(first, 2), train(second, 2)
        found.append({"case": folder.name, "changed": changed, "on_host": on_host, "norms": norms})
    return found


def is_on_host(engine: ZeroEngine) -> bool:
    """Whether the optimizer states are on the host."""
    optimizer = engine._engine.optimizer
    return bool(optimizer.on_host if isinstance(optimizer, ShardedOptimizer) else optimizer.offload_optimizer)


def test_the_optimizer_moves_to_the_host_and_back(tmp_path: Path) -> None:
    """The states are the same, and training goes on alike."""
    for rank in run_world(2, to_the_host_and_back, tmp_path):
        for found in rank:
            assert found["changed"] == [], found["case"]
            assert set(found["on_host"]) == {False, True}, found["case"]
            one, other = found["norms"]
            assert other == pytest.approx(one, rel=1e-4 if found["case"].startswith("fp32") else 3e-2), found["case"]


def load_of_an_int(root: Path) -> list[str]:
    """On a rank: save, count updates by an int as DeepSpeedCPUAdam did, and load; return what differs."""
    engine = engine_of(config_of("fp32", 1), seed=0)
    train(engine, 2)
    save(engine, root)
    dist.barrier()
    if dist.get_rank() == 0:
        take_apart(root)
        for file in (root / "zero").glob("*optim_states.pt"):
            saved = torch.load(file, weights_only=False)
            for state in saved["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                state["step"] = int(state["step"])
            torch.save(saved, file)
    dist.barrier()
    other = engine_of(config_of("fp32", 1), seed=1)
    other.load(root)
    changed = differences(gather(engine), gather(other))
    assert train(engine, 1) == train(other, 1)
    return changed


def test_an_older_checkpoint_whose_updates_are_counted_by_an_int(tmp_path: Path) -> None:
    assert run_world(2, load_of_an_int, tmp_path) == [[], []]


def save_in_sub_groups(root: Path) -> dict[str, Any]:
    """On a rank: save a checkpoint of stage 3 whose parameters lie in several sub-groups, as those of large models."""

    def small(config: Config) -> dict[str, Any]:
        settings = deepspeed_settings(config)
        settings["zero_optimization"]["sub_group_size"] = 3000
        return settings

    with patch.object(initialize, "deepspeed_settings", small):
        engine = engine_of(config_of("fp32", 3), seed=0)
    train(engine, 2)
    save(engine, root)
    return gather(engine) | {"groups": len(engine._engine.optimizer.fp16_groups)}


def load_one(root: Path, kind: str, stage: int) -> dict[str, Any]:
    engine = engine_of(config_of(kind, stage), seed=1)
    engine.load(root)
    return gather(engine)


def test_sub_groups_of_stage_3(tmp_path: Path) -> None:
    whole = run_world(2, save_in_sub_groups, tmp_path)[0]
    assert whole.pop("groups") > 2
    for stage in (1, 3):
        for found in run_world(3, load_one, tmp_path, "fp32", stage):
            assert differences(whole, found) == [], stage


def save_trained(root: Path, kind: str, stage: int) -> dict[str, Any]:
    engine = engine_of(config_of(kind, stage), seed=0)
    train(engine, 2)
    save(engine, root)
    return gather(engine)


def test_without_momentum_only_master_weights_are_saved(tmp_path: Path) -> None:
    kind = "sgd without momentum"
    whole = run_world(2, save_trained, tmp_path, kind, 1)[0]
    assert whole["keys"] == []
    for found in run_world(3, load_one, tmp_path, kind, 3):
        assert differences(whole, found) == []


def bytes_of_a_load(root: Path) -> tuple[int, int, int]:
    """On a rank: the peak of a load that reshards, the bytes of its moments, and those of all parameters in fp32."""
    large = ["model.hidden=200", "model.ffn=400", "model.layers=3"]
    first = engine_of(config_of("fp32", 1, *large), seed=0)
    train(first, 1)
    save(first, root)
    engine = engine_of(config_of("fp32", 3, *large), seed=1)
    peak = allocated(lambda: engine.load(root)).peak
    moments = 2 * sum(flat.nbytes for flat in engine._engine.optimizer.fp32_partitioned_groups_flat)
    shapes = SavedStates(root, parameters_of(engine.module.shape)).shapes
    return peak, moments, 4 * sum(shape.numel() for shape in shapes.values())


def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    """A load allocates the moments of the rank's own partition. Mapped parts of all ranks do not count."""
    for peak, moments, whole in run_world(3, bytes_of_a_load, tmp_path):
        assert moments <= peak < moments + whole / 10


class Member:
    """A member of an enum, as Python 3.11.0 to 3.11.3 pickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (ZeroStageEnum, "optimizer_states")


class Evil:
    """An object whose unpickling runs code: it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def save_one(root: Path) -> None:
    save(engine_of(config_of("fp32", 1), seed=0), root)


def read_all(folder: Path) -> None:
    for weight in master_weights(folder, parameters_of(config_of("fp32", 1).model)).values():
        weight()


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """In the part of any rank. Hashes do not show who has written a checkpoint, and DeepSpeed's loader would run it."""
    run_world(2, save_one, tmp_path)
    change_part(tmp_path, 1, lambda states: states.update(more=Member()))
    read_all(tmp_path)
    file = change_part(tmp_path, 1, lambda states: states.update(more=Evil(tmp_path / "made")))
    with refused(CheckpointError, file):
        read_all(tmp_path)
    assert not (tmp_path / "made").exists()
    change_part(tmp_path, 1, lambda states: None)
    assert (tmp_path / "made").exists(), "the test shows too little"


def test_code_in_a_file_of_an_older_checkpoint_is_not_run(tmp_path: Path) -> None:
    run_world(2, save_one, tmp_path)
    take_apart(tmp_path)
    (states,) = (tmp_path / "zero").glob("*rank_1_*optim_states.pt")
    torch.save(torch.load(states, weights_only=False) | {"more": Evil(tmp_path / "made")}, states)
    with refused(CheckpointError, states):
        read_all(tmp_path)
    assert not (tmp_path / "made").exists()
    torch.load(states, weights_only=False)
    assert (tmp_path / "made").exists(), "the test shows too little"


def rates_after_a_load(root: Path) -> list[tuple[float, float]]:
    """On a rank: the weight decay and clip norm after loads in the same layout and in another one."""
    engine = engine_of(config_of("fp32", 1), seed=0)
    train(engine, 1)
    save(engine, root)
    found = []
    for stage in (1, 3):
        other = engine_of(config_of("fp32", stage, "optimizer.weight_decay=0.25", "optimizer.clip_norm=0.125"), seed=0)
        other.load(root)
        inner = other._engine.optimizer
        found.append((max(group["weight_decay"] for group in inner.param_groups), inner.clip_grad))
    return found


def test_what_a_config_may_change_is_not_taken_from_the_checkpoint(tmp_path: Path) -> None:
    """DeepSpeed would go on with the old weight decay and clip norm, without a word."""
    assert run_world(1, rates_after_a_load, tmp_path) == [[(0.25, 0.125)] * 2]
