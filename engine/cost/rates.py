"""Seconds of a cost unit. Nominal, and said so wherever it is shown, until profile-hardware measures it."""

from __future__ import annotations

# Floating-point operations a second and rank: the data sheet's dense bf16 peak times 40 %, which large dense models
# commonly reach. For a CPU core a round figure.
_FLOPS_PER_S = {"a100x8": 312e12 * 0.4, "h100x8": 989e12 * 0.4, "h200x8": 989e12 * 0.4}
_CPU_FLOPS_PER_S = 50e9


def flops_per_s(cluster: str) -> int:
    """Return the nominal rate of one rank of a cluster, by its name."""
    return int(_FLOPS_PER_S.get(cluster, _CPU_FLOPS_PER_S))
