from __future__ import annotations

from dataclasses import asdict, replace

from engine.hardware.measured import Measured
from engine.hardware.terms import nominal_terms, rows, shown
from tests.hardware.machines import TRUE, measured, network

NOMINAL = "nominal, not measured"


def test_every_term_has_a_line() -> None:
    words = {"cluster", "device", "source"}
    assert [name for name, _, _ in rows(TRUE, measured())] == [name for name in asdict(TRUE) if name not in words]


def test_unmeasured_terms_are_marked_as_nominal() -> None:
    """One node cannot measure the network, and one rank cannot measure rings."""

    def unmeasured(ranks: int, nodes: int = 1) -> set[str]:
        ours = replace(measured(ranks), network=network(pairs=8, cards=4) if nodes > 1 else None)
        found = {name for name, _, how in rows(TRUE, ours) if how.startswith(NOMINAL)}
        assert found == set(nominal_terms(TRUE, ours))
        return found

    assert unmeasured(2) == {"fp8_speedup", "network_bytes_per_s", "nics_per_node", "plan_build_s"}
    assert unmeasured(1) - unmeasured(2) == {
        "gather_s", "round_s", "ring_s", "merge_bytes_per_s",
        "latency_s", "node_bytes_per_s", "overlap", "reduce_bytes_per_s"
    }  # fmt: skip
    assert unmeasured(2, nodes=2) == {"fp8_speedup", "plan_build_s"}
    assert unmeasured(1, nodes=2) == unmeasured(1) - {"network_bytes_per_s", "nics_per_node", "latency_s"}


def test_the_time_of_a_plan_is_measured_where_cudnn_computes() -> None:
    """The first call of another kernel says nothing about cuDNN, which training on another GPU may choose."""
    how = {name: how for name, _, how in rows(TRUE, replace(measured(), kernel="cudnn"))}
    assert not how["plan_build_s"].startswith(NOMINAL)


def test_fixed_times_are_separated_only_by_two_layer_counts() -> None:
    def how(ours: Measured) -> set[str]:
        return {how for name, _, how in rows(TRUE, ours) if name in ("layer_s", "micro_batch_s")}

    both = measured()
    (text,) = how(both)
    assert text.endswith("with two different layer counts")
    one = replace(both, micro_batches=tuple(timed for timed in both.micro_batches if timed[0].layers == 2))
    (text,) = how(one)
    assert text.endswith("not separated, with one layer count")


def test_sizes_are_those_of_the_messages() -> None:
    ours = replace(measured(), transfers=((4096, 1e-5), (1 << 27, 1e-3)))
    how = {name: how for name, _, how in rows(TRUE, ours)}
    assert how["node_bytes_per_s"] == "messages of 4.0 KiB to 128.0 MiB, in both directions at once"
    assert how["copy_bytes_per_s"] == "copies of 64 MiB, the slower direction; 8 GB/s each way at once"


def test_a_peak_is_the_data_sheets_where_there_is_one() -> None:
    def how(cluster: str) -> str:
        found = rows(replace(TRUE, cluster=cluster), measured())
        return next(how for name, _, how in found if name == "peak_flops_per_s")

    assert how("local") == "no data sheet: the fastest product of square matrices"
    assert how("h100x8") == f"{NOMINAL}: as on the data sheet"


def test_units_follow_from_names() -> None:
    assert shown("ffn_flops_per_s", 2.1e10) == "21 GFLOP/s"
    assert shown("node_bytes_per_s", 2.5e9) == "2.5 GB/s"
    assert shown("latency_s", 1.5e-4) == "0.15 ms"
    assert shown("overlap", 0.4) == "0.4"
