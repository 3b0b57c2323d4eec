"""Reads the metrics that ranks write, while they run: for the progress on the terminal, trackers, and warnings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.config.schema import Config
from engine.config.units import counted, format_bytes
from engine.data.quarantine import MOST
from engine.launch.say import OnStep, Say
from engine.run import metrics
from engine.run.folder import RunFolder
from engine.simulator.hollow import low_balance

_BALANCED = 10  # steps, whose mean balance is judged


class MetricsTail:
    """Calls `on_step` for each line that the ranks add to the metrics.

    Warns once if a host had less memory than a rank needs for offload or for a copy of its states, if a step has more
    than `batch_tokens`, if validation sets are empty, and if the balance of the first steps is low on average; and when
    documents were left out or steps skipped: at the first one, and whenever their number has doubled.
    """

    def __init__(self, folder: RunFolder, config: Config, on_step: OnStep, say: Say) -> None:
        self._folder, self._config, self._on_step, self._say = folder, config, on_step, say
        self._offset = folder.metrics.stat().st_size
        self._warned, self._left_out = set[str](), 0  # kinds of warnings that are given once
        self._skipped = 0  # steps
        self._balances = list[float]()  # of the first steps

    def __call__(self) -> None:
        """Read the lines added since the last call."""
        lines, self._offset = metrics.read_from(
            self._folder.metrics, self._offset, lambda line: self._say(f"warning: {line}")
        )
        for line in lines:
            for kind, warning in self._warnings(line):
                if kind not in self._warned:
                    self._warned.add(kind)
                    self._say(f"warning: {warning}")
            if len(self._balances) < _BALANCED and "balance" in line:
                self._balances.append(line["balance"])
                if len(self._balances) == _BALANCED:
                    for low in low_balance(self._config, sum(self._balances) / _BALANCED):
                        self._say(str(low))
            if (left_out := line.get("left_out", 0)) >= max(1, 2 * self._left_out):
                self._left_out = left_out
                self._say(f"warning: {left_out_so_far(left_out, self._folder)}")
            if "skipped" in line:
                self._skipped += 1
                if self._skipped.bit_count() == 1:  # 1, 2, 4, ...
                    self._say(f"warning: {skipped_so_far(self._skipped, line['step'], self._folder)}")
            self._on_step(line)

    def _warnings(self, line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of each warning that a step gives rise to."""
        if short := line.get("host_short"):  # bytes
            yield (
                "host",
                f"a host lacked {format_bytes(short)} that a rank needs for offload; activations that did not fit stay "
                f"on the device; set a smaller cluster.host_memory to plan with less (details: {self._folder.logs})",
            )
        if short := line.get("copy_short"):  # bytes
            what = f"a host lacked {format_bytes(short)} for a copy of a rank's states"
            yield "copy", f"{what}; training waits while checkpoints are written (`save_s` in {self._folder.metrics})"
        most, data = self._config.batch_tokens, self._config.data
        if (tokens := line.get("tokens", 0)) > most:
            piece, way = "document", "data.long=split distributes its pieces over steps"
            if data.long == "split":
                piece, way = f"piece of context={self._config.context} tokens", "set a smaller context"
            what = f"step {line['step']} has {tokens:,} tokens, more than batch_tokens={most}"
            yield "long", f"{what}: a longer {piece} forms a step alone; {way}"
        if empty := line.get("unvalidated"):
            sets = f"validation sets of {', '.join(empty)} are" if data.sources else "validation set is"
            yield "validation", f"the {sets} empty; set a larger data.validation_share or data.validation_tokens"


def left_out_so_far(count: int, folder: RunFolder) -> str:
    """Describe how many documents were left out so far."""
    number = f"{'at least ' if count >= MOST else ''}{counted(count, 'document')}"
    return f"{number} could not be used and {'was' if count == 1 else 'were'} left out; see {folder.quarantine}"


def skipped_so_far(count: int, step: int, folder: RunFolder) -> str:
    """Describe how many steps were skipped since the launcher started, of which `step` is the last."""
    number = f"{counted(count, 'step')} {'was' if count == 1 else 'were'} skipped"
    trace = f"`bytescale data trace {folder.root} --step {step}` shows its documents"
    return f"{number}, because loss or gradients are not finite; the last is step {step}: {trace}"
