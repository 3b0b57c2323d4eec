from __future__ import annotations

import pytest

from engine.config.devices import uses_gpus
from engine.config.load import load


@pytest.mark.parametrize(("overrides", "gpus"), [([], False), (["recipe=h200-1b-8k"], True)])
def test_only_the_cluster_local_runs_on_cpus(overrides: list[str], gpus: bool) -> None:
    assert uses_gpus(load(overrides)) is gpus
