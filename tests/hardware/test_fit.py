from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from engine.cost.datasheets import nominal
from engine.errors import PreflightError
from engine.hardware.fit import calibrate, points
from engine.hardware.measured import Case, Timing
from tests.hardware.machines import TRUE, config, measured

NETWORK = {"network_bytes_per_s", "nics_per_node"}
RING = {"round_s", "merge_bytes_per_s", "latency_s", "node_bytes_per_s", "overlap", "reduce_bytes_per_s"}


def numbers(found: object, without: set[str]) -> dict[str, float]:
    return {name: value for name, value in vars(found).items() if not isinstance(value, str) and name not in without}


def test_undisturbed_timings_give_the_machine_back() -> None:
    found = calibrate(measured(), config())
    assert numbers(found, NETWORK) == pytest.approx(numbers(TRUE, NETWORK), rel=1e-3)


def test_the_cost_model_then_gives_every_timing_back() -> None:
    ours = measured()
    found = points(ours, calibrate(ours, config()), config())
    assert len(found) == len(ours.micro_batches)
    assert max(abs(point.error) for point in found) < 1e-3


def test_it_is_a_calibration_of_the_measured_cluster_and_says_so() -> None:
    found = calibrate(measured(), config())
    assert (found.cluster, found.device, found.source) == ("local", "made up", "measured")


def test_one_rank_leaves_to_the_data_sheet_what_needs_two() -> None:
    found, sheet = calibrate(measured(ranks=1), config(ranks=1)), nominal("local")
    unmeasured = NETWORK | RING
    assert {name: getattr(found, name) for name in unmeasured} == {name: getattr(sheet, name) for name in unmeasured}
    assert numbers(found, unmeasured) == pytest.approx(numbers(TRUE, unmeasured), rel=1e-3)


def test_the_peak_is_the_data_sheets_or_else_the_fastest_product() -> None:
    """And never less than what linear layers reach, or MFU could pass 1."""
    slow = replace(measured(), product_flops_per_s=1e9)
    assert calibrate(slow, config()).peak_flops_per_s == calibrate(slow, config()).linear_flops_per_s
    h100 = config().model_copy(update={"cluster": config().cluster.model_copy(update={"name": "h100x8"})})
    assert calibrate(measured(), h100).peak_flops_per_s == 989e12


def test_uneven_timings_stay_near() -> None:
    """Every second micro-batch 10 % slower: rates move by less than that, and the error is told."""
    ours = measured()
    slower = tuple(
        (case, Timing(1.1 * timing.forward_s, 1.1 * timing.backward_s, 0.1) if number % 2 else timing)
        for number, (case, timing) in enumerate(ours.micro_batches)
    )
    ours = replace(ours, micro_batches=slower)
    found = calibrate(ours, config())
    assert found.attention_flops_per_s == pytest.approx(TRUE.attention_flops_per_s, rel=0.15)
    errors = [abs(point.error) for point in points(ours, found, config())]
    assert 0.01 < sum(errors) / len(errors) < 0.1


def test_timings_that_show_no_attention_are_refused() -> None:
    flat = tuple((case, Timing(1e-3, 1e-3, 0.0)) for case, _ in measured().micro_batches)
    with pytest.raises(PreflightError) as caught:
        calibrate(replace(measured(), micro_batches=flat), config())
    assert "too disturbed" in str(caught.value)
    assert caught.value.problems[0].hint == "run it again while the machine is quiet"


def test_disturbed_updates_still_give_a_rate() -> None:
    """A larger model that seemed faster must not make a calibration that `read` refuses."""
    ours = measured()
    (small, _), (large, _) = ours.updates
    found = calibrate(replace(ours, updates=((small, 2e-2), (large, 1e-2)), fixed_s=1e-3), config())
    assert found.reduce_bytes_per_s > 0
    assert found.step_s >= 0


def test_what_was_fitted_can_be_written(tmp_path: object) -> None:
    assert all(value == value for value in asdict(calibrate(measured(), config())).values()), "no NaN"


def test_an_error_is_relative_to_what_was_measured() -> None:
    ours = replace(measured(), micro_batches=((Case(2, (64,)), Timing(1.0, 1.0, 0.0)),))
    (point,) = points(ours, TRUE, config())
    assert point.error == pytest.approx(point.predicted_s / 2.0 - 1)
