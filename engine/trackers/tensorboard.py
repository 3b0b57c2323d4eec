"""Event files for TensorBoard, in RUN/trackers/tensorboard: `tensorboard --logdir runs` finds those of all runs.

Written with TensorBoard's own writer: it brings the readers as well, and imports neither torch nor TensorFlow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.trackers.tracker import Step, Tracked


class TensorBoard:
    """A new event file in the folder of the run; TensorBoard shows all files of a folder as one run."""

    def __init__(self, run: Tracked) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self.id = run.id or run.name
        self._writer = EventFileWriter(str(run.folder / "tensorboard"))
        summary = hparams_pb(dict(run.config), trial_id=self.id)
        self._writer.add_event(self._event(wall_time=time.time(), summary=summary))

    def log(self, steps: Sequence[Step]) -> None:
        for step in steps:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in step.metrics.items()]
            event = self._event(wall_time=time.time(), step=step.number, summary=self._summary(value=values))
            self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
