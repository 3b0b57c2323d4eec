"""What the cost model says of a measured micro-batch, through the very functions that planner and simulator use."""

from __future__ import annotations

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.cost.calibration import Calibration
from engine.cost.model import NS, rates_of
from engine.cost.times import shared, whole
from engine.hardware.measured import Case
from engine.hardware.prepare import with_layers


def seconds(case: Case, calibration: Calibration, config: Config) -> float:
    """Return the time of a case with a calibration; its rings are those of all ranks of the config's cluster."""
    cluster = Cluster.of(config.cluster)
    rates = rates_of(with_layers(config, case.layers), calibration, cluster)
    wholes = sum(whole(rates, float(length)) for length in case.whole)
    rings = sum(shared(rates, float(length), cluster.ranks, 1.0) for length in case.shared)
    return float(rates.micro + wholes + rings) / NS
