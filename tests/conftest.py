"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine that is busy with something else is no error.
settings.register_profile("bytescale", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bytescale")
