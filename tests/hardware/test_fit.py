from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.cost.calibration import LINEAR_TERMS, Calibration
from engine.cost.datasheets import nominal
from engine.errors import PreflightError
from engine.hardware.fit import (
    between_nodes,
    calibrate,
    fit_rings,
    least_squares,
    link,
    points,
    predict,
    split_launch_bound,
)
from engine.hardware.measured import Case, Measured, Timing
from engine.hardware.terms import nominal_terms
from engine.units import Floats
from tests.hardware.h200 import MICRO_BATCHES
from tests.hardware.machines import TRUE, config, measured, network
from tests.refusals import refused

NETWORK = {"network_bytes_per_s", "nics_per_node"}
RING = {
    "gather_s",
    "round_s",
    "ring_s",
    "merge_bytes_per_s",
    "latency_s",
    "node_bytes_per_s",
    "overlap",
    "reduce_bytes_per_s",
}
CASES = [Case(2, ring=(32 << doubling,)) for doubling in range(10)]
CASES += [Case(2, ring=(length,) * count) for length, count in ((32, 8), (32, 64), (128, 16), (512, 4))]


def numbers(found: object, without: set[str]) -> dict[str, float]:
    return {name: value for name, value in vars(found).items() if not isinstance(value, str) and name not in without}


def test_timings_without_noise_give_the_true_calibration() -> None:
    found = calibrate(measured(), config())
    assert numbers(found, NETWORK) == pytest.approx(numbers(TRUE, NETWORK), rel=1e-3)


def test_the_cost_model_then_predicts_every_timing() -> None:
    ours = measured()
    found = points(ours, calibrate(ours, config()), config())
    assert len(found) == len(ours.micro_batches)
    assert max(abs(point.error) for point in found) < 1e-3


def test_it_is_a_calibration_of_the_measured_cluster_and_says_so() -> None:
    found = calibrate(measured(), config())
    assert (found.cluster, found.device, found.source) == ("local", "made up", "measured")


def test_terms_that_need_two_ranks_stay_nominal_on_one() -> None:
    found, sheet = calibrate(measured(ranks=1), config(ranks=1)), nominal("local")
    unmeasured = NETWORK | RING
    assert {name: getattr(found, name) for name in unmeasured} == {name: getattr(sheet, name) for name in unmeasured}
    assert numbers(found, unmeasured) == pytest.approx(numbers(TRUE, unmeasured), rel=1e-3)


def test_the_time_of_a_plan_is_that_of_cudnn() -> None:
    assert calibrate(replace(measured(), kernel="cudnn"), config()).plan_build_s == pytest.approx((0.44 + 0.55) / 2)
    assert calibrate(measured(), config()).plan_build_s == nominal("local").plan_build_s == 0
    assert nominal("h100x8").plan_build_s > 0


def test_the_peak_is_the_data_sheets_or_else_the_fastest_product() -> None:
    """It is at least the rate of linear layers, or the MFU could exceed 1."""
    slow = replace(measured(), product_flops_per_s=1e9)
    assert calibrate(slow, config()).peak_flops_per_s == calibrate(slow, config()).head_flops_per_s
    h100 = config().model_copy(update={"cluster": config().cluster.model_copy(update={"name": "h100x8"})})
    assert calibrate(measured(), h100).peak_flops_per_s == 989e12


def test_noisy_timings_give_similar_rates() -> None:
    """Every second micro-batch 10 % slower: rates move by less than that, and the error is reported."""
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


def test_full_micro_batches_count_more_than_small_ones() -> None:
    """On a machine whose large micro-batches take 25 % longer, these are predicted well, and small ones are not."""
    ours = measured()
    total = {case: sum(case.unsplit) + sum(case.ring) for case, _ in ours.micro_batches}
    slower = tuple(
        (case, Timing(1.25 * timing.forward_s, 1.25 * timing.backward_s, 0.0) if total[case] > 1024 else timing)
        for case, timing in ours.micro_batches
    )
    ours = replace(ours, micro_batches=slower)
    found = points(ours, calibrate(ours, config()), config())
    small, large = (
        np.mean([abs(point.error) for point in found if (total[point.case] > 1024) == full]) for full in (False, True)
    )
    assert large < 0.03 < small  # with relative errors .047 and .059


def launched(launch_s: float, ranks: int = 1) -> Measured:
    """The measurements of a GPU without fixed times, whose host launches the kernels of a layer in `launch_s`.

    Those of a layer with rings take twice as long.
    """
    ours, gpu = measured(ranks), gpu_like(ranks)
    timed = []
    for case, _ in ours.micro_batches:
        forward = predict(case, replace(gpu, linear_backward=0.0, attention_backward=0.0), config(ranks))
        backward = predict(case, gpu, config(ranks)) - forward
        host = case.layers * launch_s * (2 if case.ring else 1) / 3
        timed.append((case, Timing(max(forward, host), max(backward, 2 * host), 0.0)))
    return replace(ours, micro_batches=tuple(timed), half_tokens=0.0)


def gpu_like(ranks: int) -> Calibration:
    """The known machine without fixed times."""
    known = replace(TRUE, micro_batch_s=0.0, layer_s=0.0, sequence_s=0.0, half_tokens=0.0)
    return replace(known, round_s=0.0, ring_s=0.0) if ranks > 1 else known


RATES = (*LINEAR_TERMS, "linear_backward", "attention_flops_per_s", "attention_backward")


def test_launches_of_kernels_take_no_part_of_the_time_of_linear_layers() -> None:
    ours = launched(1e-2)
    used, launch_bound = split_launch_bound(ours)
    assert len(used.micro_batches) + len(launch_bound) == len(ours.micro_batches)
    assert max(timing.total_s / case.layers for case, timing in launch_bound) < 1.25 * 1e-2
    found = calibrate(used, config(ranks=1))
    assert [getattr(found, name) for name in RATES] == pytest.approx([getattr(TRUE, name) for name in RATES], rel=1e-3)
    assert calibrate(ours, config(ranks=1)).ffn_flops_per_s > 1.4 * TRUE.ffn_flops_per_s, "if all are used"


def test_a_micro_batch_is_launch_bound_if_one_of_its_passes_is() -> None:
    shortest, *others = launched(1e-2).micro_batches
    alike = [number for number, (case, _) in enumerate(others) if case.layers == shortest[0].layers]
    case, timing = others[alike[-1]]
    others[alike[-1]] = (case, replace(timing, forward_s=shortest[1].forward_s))
    _, launch_bound = split_launch_bound(replace(launched(1e-2), micro_batches=(shortest, *others)))
    assert case in [case for case, _ in launch_bound]


def test_timings_of_an_h200_predict_more_layers_and_another_model() -> None:
    """Those of four layers of a 1B model, against what benchmarks/gpu/train.py measured (benchmarks/RESULTS.md)."""
    small = load(["recipe=h200-1b-8k"])
    timed = tuple((case, Timing(0.3 * s, 0.7 * s, 0.0)) for case, s in MICRO_BATCHES.items())
    ours = replace(measured(ranks=1), micro_batches=timed, half_tokens=0.0)
    used, launch_bound = split_launch_bound(ours)
    assert {sum(case.unsplit) for case, _ in launch_bound} == {1 << power for power in range(5, 13)}
    found = calibrate(used, small)
    vocab = "model.vocab=32000"
    predicted = [
        predict(Case(layers, (8192,)), found, load(["recipe=h200-1b-8k", f"model={model}", vocab]))
        for model, layers in (("1b", 16), ("llama3-8b", 8))
    ]
    assert predicted == pytest.approx([8192 / 52_223, 8192 / 38_334], rel=0.05)
    assert found.ffn_flops_per_s < found.peak_flops_per_s


def test_rings_have_launches_of_their_own() -> None:
    """The shortest ring takes longer than the shortest unsplit sequence, and still says nothing about the GPU."""
    used, launch_bound = split_launch_bound(launched(2e-3, ranks=2))
    rings, left_out = used.rings, [case for case, _ in launch_bound if case.ring]
    assert len(rings) >= 4 and left_out
    found, true = calibrate(used, config()), gpu_like(ranks=2)
    assert found.merge_bytes_per_s == pytest.approx(true.merge_bytes_per_s, rel=0.01)
    assert max(found.round_s, found.ring_s) < 1e-5, "no time of launches"
    every = calibrate(launched(2e-3, ranks=2), config())
    assert every.merge_bytes_per_s > 2 * true.merge_bytes_per_s and every.round_s > 1e-4, "if all are used"


def test_terms_of_rings_stay_nominal_if_too_few_are_left() -> None:
    ours = measured()
    few = [timed for timed in ours.micro_batches if timed[0].ring][:3]
    ours = replace(ours, micro_batches=(*(timed for timed in ours.micro_batches if not timed[0].ring), *few))
    assert ours.rings == []
    found, sheet = calibrate(ours, config()), nominal("local")
    assert [(found.round_s, found.ring_s, found.merge_bytes_per_s)] == [
        (sheet.round_s, sheet.ring_s, sheet.merge_bytes_per_s)
    ]
    assert {"round_s", "ring_s", "merge_bytes_per_s"} <= set(nominal_terms(found, ours))


def test_a_model_too_small_to_keep_a_gpu_busy_is_refused() -> None:
    with refused(PreflightError, None):
        split_launch_bound(launched(10.0))


def test_timings_that_show_no_attention_are_refused() -> None:
    flat = tuple((case, Timing(1e-3, 1e-3, 0.0)) for case, _ in measured().micro_batches)
    with refused(PreflightError, None):
        calibrate(replace(measured(), micro_batches=flat), config())


def test_noisy_updates_still_give_a_rate() -> None:
    """A larger model that seemed faster must not give a calibration that `read` refuses."""
    ours = measured()
    (small, _), (large, _) = ours.updates
    found = calibrate(replace(ours, updates=((small, 2e-2), (large, 1e-2)), fixed_s=1e-3), config())
    assert found.reduce_bytes_per_s > 0
    assert found.step_s >= 0


def test_a_fitted_calibration_has_no_nan(tmp_path: object) -> None:
    assert all(value == value for value in asdict(calibrate(measured(), config())).values()), "no NaN"


def test_an_error_is_relative_to_what_was_measured() -> None:
    ours = replace(measured(), micro_batches=((Case(2, (64,)), Timing(1.0, 1.0, 0.0)),))
    (point,) = points(ours, TRUE, config())
    assert point.error == pytest.approx(point.predicted_s / 2.0 - 1)


@pytest.mark.parametrize(
    ("round_s", "ring_s", "merge", "overlap", "latency_s", "link_rate"),
    [
        (7e-4, 8e-5, 2e9, 0.4, 1e-4, 2e9),
        (1e-5, 2e-5, 1e9, 1.0, 1e-3, 1e8),  # bound by the link
        (1e-4, 1e-5, 5e8, 0.0, 1e-5, 1e9),
    ],
)
def test_rings_of_a_known_machine(
    round_s: float, ring_s: float, merge: float, overlap: float, latency_s: float, link_rate: float
) -> None:
    link = {"latency_s": latency_s, "node_bytes_per_s": link_rate}
    true = replace(TRUE, round_s=round_s, ring_s=ring_s, merge_bytes_per_s=merge, overlap=overlap, **link)
    timed = [(case, Timing(0.0, predict(case, true, config()), 0.0)) for case in CASES]
    found = fit_rings(timed, replace(true, round_s=0.5, ring_s=0.5, merge_bytes_per_s=1.0), config())
    terms = (found.round_s, found.ring_s, found.merge_bytes_per_s)
    assert terms == pytest.approx((round_s, ring_s, merge), rel=1e-2)
    predicted = [predict(case, found, config()) for case in CASES]
    assert predicted == pytest.approx([timing.total_s for _, timing in timed], rel=1e-3)


def test_rings_faster_than_their_compute_have_no_overhead() -> None:
    timed = [(case, Timing(0.0, 1e-5, 0.0)) for case in CASES]
    found = fit_rings(timed, TRUE, config())
    assert found.round_s == found.ring_s == 0
    assert found.merge_bytes_per_s > 1e12


def test_messages_give_latency_and_rate() -> None:
    sizes = (4096, 65536, 1 << 22)
    latency, rate = link([(size, 2e-4 + size / 1.5e9) for size in sizes])
    assert (latency, rate) == pytest.approx((2e-4, 1.5e9))


def test_messages_of_equal_time_have_only_latency() -> None:
    latency, rate = link([(4096, 1e-3), (8192, 1e-3)])
    assert latency == pytest.approx(1e-3)
    assert rate > 1e12


@pytest.mark.parametrize(("pairs", "cards", "used"), [(8, 8, 8), (8, 4, 4), (8, 1, 1), (1, 8, 1)])
def test_pairs_of_ranks_give_the_cards_of_a_node(pairs: int, cards: int, used: int) -> None:
    """One pair uses one card; a node's cards show only where there are as many pairs."""
    assert between_nodes(network(pairs, cards)) == pytest.approx((2e-5, 4e10, used))


def test_two_nodes_replace_the_nominal_network() -> None:
    found = calibrate(replace(measured(), network=network(8, 4, latency_s=1.0)), config())
    assert (found.network_bytes_per_s, found.nics_per_node, found.latency_s) == pytest.approx((4e10, 4.0, 1.0))
    near = calibrate(replace(measured(), network=network(8, 4, latency_s=1e-9)), config())
    assert near.latency_s == pytest.approx(TRUE.latency_s), "the longer of both"
    alone = calibrate(replace(measured(ranks=1), network=network(1, 8)), config(ranks=1))
    assert (alone.network_bytes_per_s, alone.latency_s) == pytest.approx((4e10, 2e-5))
    assert alone.node_bytes_per_s == nominal("local").node_bytes_per_s


def test_copies_count_in_the_slower_direction() -> None:
    copies = replace(measured().copies, to_device=3e9)
    assert calibrate(replace(measured(), copies=copies), config()).copy_bytes_per_s == 3e9


def random_system(seed: int, points: int, unknowns: int) -> tuple[Floats, Floats]:
    generator = np.random.default_rng(seed)
    return generator.random((points, unknowns)) + 0.01, generator.random(points) + 0.1


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_an_exact_solution_is_found(seed: int, unknowns: int) -> None:
    terms, _ = random_system(seed, 12, unknowns)
    x = np.random.default_rng(seed + 1).random(unknowns) + 0.1
    times = terms @ x
    assert least_squares(terms, times, times) == pytest.approx(x, rel=1e-6)


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_no_feasible_step_reduces_the_error(seed: int, unknowns: int) -> None:
    """The Kuhn-Tucker conditions: the slope is zero where x is positive, and not negative where x is zero."""
    terms, values = random_system(seed, 9, unknowns)
    x = least_squares(terms, values, values)
    rows = terms / values[:, None]
    slope = rows.T @ (rows @ x - 1)
    assert (x >= 0).all()
    assert np.abs(slope[x > 0]).max(initial=0) < 1e-6 * np.abs(rows).max()
    assert slope[x == 0].min(initial=0) > -1e-6 * np.abs(rows).max()


def test_a_cost_is_never_negative() -> None:
    terms = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    times = np.array([1.0, 2.2, 3.4])  # a plain fit goes through -0.2
    assert np.linalg.lstsq(terms, times, rcond=None)[0][1] < 0
    slope, fixed = least_squares(terms, times, times)
    assert fixed == 0
    assert slope > 1


def test_errors_are_relative_to_the_scale() -> None:
    """Otherwise the longest micro-batch alone would determine the fit."""
    terms, values = np.array([[1.0], [1000.0]]), np.array([2.0, 1000.0])
    assert least_squares(terms, values, np.ones(2))[0] == pytest.approx(1.0, abs=1e-3)
    assert least_squares(terms, values, values)[0] == pytest.approx(1.2, abs=1e-3)


def test_units_do_not_matter() -> None:
    terms, values = random_system(7, 10, 3)
    units = np.array([1e-12, 1.0, 1e9])
    assert least_squares(terms * units, values, values) * units == pytest.approx(
        least_squares(terms, values, values), rel=1e-6
    )


def test_an_unmeasured_term_is_zero() -> None:
    terms = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert least_squares(terms, np.array([3.0, 6.0]), np.ones(2)).tolist() == pytest.approx([3.0, 0.0])
