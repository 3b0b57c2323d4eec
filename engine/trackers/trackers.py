"""The trackers by name, as in run.trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.trackers.mlflow import MLflow
from engine.trackers.tensorboard import TensorBoard
from engine.trackers.tracker import Tracked, Tracker
from engine.trackers.wandb import WeightsAndBiases

TRACKERS: Mapping[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
