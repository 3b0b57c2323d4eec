from __future__ import annotations

from dataclasses import asdict, replace

from engine.cost.activations import saved_bytes
from engine.hardware.terms import NOT_MEASURED, rows, shown
from tests.hardware.machines import TRUE, config, measured


def test_every_term_has_a_line() -> None:
    words = {"cluster", "device", "source"}
    assert [name for name, _, _ in rows(TRUE, measured())] == [name for name in asdict(TRUE) if name not in words]


def test_what_was_not_measured_says_so() -> None:
    """One machine shows nothing of a network, and one rank nothing of rings."""

    def unmeasured(ranks: int) -> set[str]:
        return {name for name, _, how in rows(TRUE, measured(ranks)) if how == NOT_MEASURED}

    assert unmeasured(2) == {"network_bytes_per_s", "nics_per_node"}
    assert unmeasured(1) - unmeasured(2) == {
        "round_s", "merge_bytes_per_s", "latency_s", "node_bytes_per_s", "overlap", "reduce_bytes_per_s"
    }  # fmt: skip


def test_a_peak_is_the_data_sheets_where_there_is_one() -> None:
    def how(cluster: str) -> str:
        found = rows(replace(TRUE, cluster=cluster), measured())
        return next(how for name, _, how in found if name == "peak_flops_per_s")

    assert how("local") == "no data sheet: the fastest product of square matrices"
    assert how("h100x8") == NOT_MEASURED


def test_counted_activations_stand_beside_the_formulas() -> None:
    """Act(s) is what capacity and offload follow from; a formula that forgets a tensor would show here."""
    ours = measured()
    told = next(how for name, _, how in rows(TRUE, ours) if name == "saved_ratio")
    formula = saved_bytes(config().model, config().dtype)
    counted = f"{1.04 * formula:,.0f} bytes a token and 96 more in {ours.layers} layers"
    assert told == f"Act(s) counted at 64, 256, 1024 tokens: {counted}; formula {formula:,.0f} (+4.0%)"


def test_units_are_those_of_the_name() -> None:
    assert shown("linear_flops_per_s", 2.1e10) == "21 GFLOP/s"
    assert shown("node_bytes_per_s", 2.5e9) == "2.5 GB/s"
    assert shown("latency_s", 1.5e-4) == "0.15 ms"
    assert shown("overlap", 0.4) == "0.4"
