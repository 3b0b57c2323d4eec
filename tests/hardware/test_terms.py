from __future__ import annotations

from dataclasses import asdict, replace

from engine.hardware.terms import NOT_MEASURED, rows, shown
from tests.hardware.machines import TRUE, measured


def test_every_term_has_a_line() -> None:
    words = {"cluster", "device", "source"}
    assert [name for name, _, _ in rows(TRUE, measured())] == [name for name in asdict(TRUE) if name not in words]


def test_unmeasured_terms_are_marked() -> None:
    """One machine cannot measure the network, and one rank cannot measure rings."""

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


def test_units_follow_from_names() -> None:
    assert shown("linear_flops_per_s", 2.1e10) == "21 GFLOP/s"
    assert shown("node_bytes_per_s", 2.5e9) == "2.5 GB/s"
    assert shown("latency_s", 1.5e-4) == "0.15 ms"
    assert shown("overlap", 0.4) == "0.4"
