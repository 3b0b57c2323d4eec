"""Runs of MLflow, on the server of MLFLOW_TRACKING_URI; without one, in the database RUN/trackers/mlflow.db.

`mlflow ui --backend-store-uri sqlite:///RUN/trackers/mlflow.db` shows the latter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from engine.trackers.tracker import Step, Tracked

_BATCH = 500  # metrics per request; servers take at most 1,000, and 100 parameters
_PARAMETERS = 100
_LONGEST = 6000  # characters of a parameter; a list of many paths may be longer


class MLflow:
    """A run of the experiment of MLFLOW_EXPERIMENT_NAME, or of `bytescale`.

    MLflow rejects new values of parameters, so those of the first start are kept.
    """

    def __init__(self, run: Tracked) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else the library reports its use to its makers
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        here = None if os.environ.get("MLFLOW_TRACKING_URI") else f"sqlite:///{run.folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=here)
        if run.id is not None:
            self.id = run.id
            self._client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "bytescale"
        found = self._client.get_experiment_by_name(name)
        place = None if here is None else (run.folder / "mlflow").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(name, artifact_location=place)
        self.id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        parameters = [Param(key, str(value)[:_LONGEST]) for key, value in run.config.items()]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self.id, params=parameters[first : first + _PARAMETERS])

    def log(self, steps: Sequence[Step]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(name, value, now, step.number) for step in steps for name, value in step.metrics.items()
        ]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self.id, metrics=metrics[first : first + _BATCH])

    def close(self) -> None:
        self._client.set_terminated(self.id)
