"""What most ranks of worlds import and load. The server that forks them imports this module once, so that they have it.

It runs no operation of PyTorch: threads of its pool would not be there after a fork.
"""

from __future__ import annotations

import multiprocessing.forkserver

import deepspeed.ops
import numpy as np

import engine.data.blocks.loaders
import tests.meshes
import tests.trainer.worlds
from engine.config.load import load
from engine.data.steps import Cursor
from engine.job import Job
from engine.planner.make import plan_step
from tests.data.memory import Memory, config_of, steps_of

engine.data.blocks.loaders._CONTEXT = multiprocessing.get_context("forkserver")
# Processes that ranks start, planning processes and loaders, are forked from the same server: multiprocessing documents
# that, but in Python 3.11 a process that was forked starts a server of its own.
multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
assert deepspeed.ops.__compatible_ops__  # read once here: DeepSpeed then runs a C compiler, and each rank would do so
load(["recipe=quickstart"])
for planner in ("static", "naive", "balanced", "adaptive"):  # reads the recipes, and loads compiled functions
    for mesh in ([], ["parallel.pp=2", "cluster.ranks_per_node=4"]):
        plan_step(np.array([30, 20, 70, 5]), Job(tests.meshes.config(2, 40, planner, *mesh)).settings)
steps_of([Memory([[5]])], config_of(5, 5)).next(Cursor())
