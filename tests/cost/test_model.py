from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.config.schema import Config
from engine.cost import flops
from engine.cost.activations import Instant
from engine.cost.calibration import Calibration, alike
from engine.cost.collectives import collectives
from engine.cost.datasheets import nominal
from engine.cost.linear import ffn_share
from engine.cost.model import Costs
from engine.job import Job
from engine.units import PPM
from tests.planner.samples import COSTS, ints
from tests.presets import LLAMA7B_256K

TINY = load(["model=tiny"])


def of(*overrides: str) -> Costs:
    return Job(load([*LLAMA7B_256K, *overrides])).costs


def costs_of(config: Config, rates: Calibration) -> Costs:
    """The costs of a config on a machine of these rates, read from a file as a user would name it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        replace(rates, cluster=config.cluster.name).write(path)
        cluster = config.cluster.model_copy(update={"calibration": str(path)})
        return Job(config.model_copy(update={"cluster": cluster})).costs


def test_a_sequence_costs_its_tokens_and_its_causal_pairs() -> None:
    """In whole nanoseconds: plans depend on them."""
    assert COSTS.sequence(ints(1)).dtype == "int64"
    assert COSTS.sequence(ints(1, 2, 100)).tolist() == [1000 + 1, 2000 + 3, 100_000 + 5050]


def test_a_step_of_70b_at_2m_tokens_does_not_overflow() -> None:
    shape = ["layers=80", "hidden=8192", "heads=64", "kv_heads=8", "ffn=28672", "vocab=128256"]
    costs = of(*(f"model.{part}" for part in shape))
    step = ints(*[2 * 1024**2] * 100)  # 200M tokens, six times the paper's global batch
    rates = costs.rates
    exact = 100 * (2**21 * (rates.token_f + rates.token_b) + 2**20 * (2**21 + 1) * (rates.pair_f + rates.pair_b))
    assert int(costs.sequence(step).sum()) == pytest.approx(exact)
    assert costs.flops(step) > 2**63, "FLOPs are Python integers"
    assert costs.flops(ints(5, 2**21, 5)) == 2 * costs.flops(ints(5)) + costs.flops(ints(2**21))


def test_states_are_sharded_over_all_ranks() -> None:
    assert of("cluster.nodes=256").fixed_bytes < of("cluster.nodes=128").fixed_bytes


def test_most_tokens_is_the_last_that_fits() -> None:
    for memory in (COSTS.fixed_bytes + 500, 2000, 5000, 10**6):
        most = COSTS.most_tokens(memory)
        assert most == 0 or COSTS.peak_bytes(ints(most), ints(most))[0] <= memory
        assert COSTS.peak_bytes(ints(most + 1), ints(most + 1))[0] > memory
    assert COSTS.most_tokens(0) == 0


def test_the_end_of_a_step_has_no_activations_beside_it() -> None:
    costs = replace(COSTS, closing_bytes=3000)
    few, many = (int(costs.peak_bytes(ints(tokens), ints(tokens))[0]) for tokens in (1, 1000))
    assert few == costs.fixed_bytes + 3000
    assert many == COSTS.peak_bytes(ints(1000), ints(1000))[0]
    assert costs.most_tokens(few - 1) == 0 < costs.most_tokens(few) == COSTS.most_tokens(few)


def test_the_peak_is_where_the_backward_pass_begins() -> None:
    """By hand: each token has 100 bytes saved, 10 in a layer's backward pass, 40 + 6 in the loss; four layers."""
    costs = replace(COSTS, ring_bytes=0)
    tokens = ints(50, 1)
    assert costs.peak_bytes(tokens, tokens).tolist() == [1000 + 5000 + 500, 1000 + 100 + 46]
    assert costs.peak_bytes(tokens, tokens, PPM).tolist() == [1000 + 2500 + 500, 1000 + 100 + 46]


def test_a_data_sheets_rates_are_those_of_the_model() -> None:
    costs = of()
    assert costs.rates.token_f == pytest.approx(1e9 * costs.linear_flops / (0.6 * 989e12))
    assert costs.rates.pair_b == pytest.approx(2.5 * costs.rates.pair_f)
    assert "data sheet" in costs.source
    assert costs.seconds(5_000_000_000) == 5.0


def test_tensor_parallel_devices_share_compute_memory_and_traffic() -> None:
    one, two = of(), of("parallel.tp=2")
    assert two.rates.pair_f == pytest.approx(one.rates.pair_f / 2)
    assert one.rates.token_f / 2 < two.rates.token_f < one.rates.token_f, "sums over the devices come on top"
    assert two.rates.kv == pytest.approx(one.rates.kv / 2)
    assert two.token_bytes == one.token_bytes // 2 and two.devices == 2


def test_recomputing_trades_time_for_memory() -> None:
    none, kept, layer = (of(f"recompute={mode}") for mode in ("none", "layer_keep_attention", "layer"))
    assert none.token_bytes > kept.token_bytes > layer.token_bytes
    assert none.rates.token_b < kept.rates.token_b == layer.rates.token_b
    assert (none.rates.recompute_factor, kept.rates.recompute_factor, layer.rates.recompute_factor) == (0, 0, 1)
    assert (none.forward_rings, kept.forward_rings, layer.forward_rings) == (2, 2, 3)


def test_stages_of_zero_hold_less_and_less() -> None:
    held = [of(f"zero.stage={stage}").fixed_bytes for stage in (1, 2, 3)]
    assert held[0] > held[1] > held[2]


def test_what_stays_of_an_offloaded_micro_batch_is_equation_3() -> None:
    """Two of the four layers always stay, and 1 - r of the others."""
    assert COSTS.resident(ints(1000), ints(0)).tolist() == [1000]
    assert COSTS.resident(ints(1000), ints(500_000)).tolist() == [750]
    assert COSTS.resident(ints(1000), ints(1_000_000)).tolist() == [500]
    assert COSTS.host_bytes(ints(1000), ints(500_000)).tolist() == [250 * COSTS.token_bytes]
    assert replace(COSTS, layers=2).resident(ints(1000), ints(1_000_000)).tolist() == [1000]


@given(st.floats(0.01, 10), st.floats(10, 1e4), st.floats(0, 1e7), st.floats(1, 4), st.floats(1, 4))
def test_a_calibration_gives_back_what_was_measured(
    a: float, b: float, g: float, linear_backward: float, attention_backward: float
) -> None:
    """T(s) = a s^2 + b s + g in ns: a is half of a pair's two passes, a token's linear layers are the rest of b."""
    config = TINY
    pair, token = 2 * a / (1 + attention_backward), max(1.0, b - a) / (1 + linear_backward)
    rates = replace(
        nominal("local"),
        **alike(1e9 * flops.linear_flops(config.model) / token),
        linear_backward=linear_backward,
        attention_flops_per_s=1e9 * flops.attention_flops(flops.attention(config.model), 1) / pair,
        attention_backward=attention_backward,
        half_tokens=0.0,
        layer_s=0.0,
        sequence_s=0.0,
        micro_batch_s=g / 1e9,
    )
    costs = costs_of(config, rates)
    lengths = np.array([1, 2, 100, 4096, 2**21], dtype=np.int64)
    expected = [a * s * s + (max(1.0, b - a) + a) * s + g for s in lengths.tolist()]
    assert (costs.sequence(lengths) + costs.fixed).tolist() == pytest.approx(expected, rel=1e-9, abs=1.01)


def test_each_fixed_cost_has_its_place() -> None:
    """A micro-batch reads all weights in each pass; kernels are launched for each layer, shard and round."""
    config = TINY
    layers, rates = config.model.layers, nominal("local")
    costs = costs_of(config, rates)
    weights = rates.half_tokens * flops.linear_flops(config.model) / rates.ffn_flops_per_s
    micro = weights * (1 + rates.linear_backward) + rates.micro_batch_s + layers * rates.layer_s
    assert costs.rates.micro == pytest.approx(1e9 * micro)
    assert costs.fixed == round(costs.rates.micro)
    assert costs.rates.sequence == pytest.approx(1e9 * layers * rates.sequence_s)
    assert costs.rates.round == pytest.approx(1e9 * layers * rates.round_s)
    assert costs.rates.ring == pytest.approx(1e9 * layers * rates.ring_s)
    assert costs.rates.latency == pytest.approx(1e9 * layers * rates.latency_s)


def test_what_a_token_sends_and_copies() -> None:
    """K and V of 8 heads of 128 in 32 layers, two bytes each; their gradients are in fp32."""
    costs, sheet = of(), nominal("h100x8")
    elements = 2 * 8 * 128 * 32
    assert (costs.forward_hop_bytes, costs.backward_hop_bytes) == (2 * elements, 4 * elements)
    assert costs.rates.kv == pytest.approx(1e9 * 2 * elements / sheet.node_bytes_per_s)
    assert costs.rates.dkv == pytest.approx(2 * costs.rates.kv)
    assert costs.rates.inter_node_slowdown == pytest.approx(sheet.node_bytes_per_s / sheet.network_bytes_per_s)
    assert costs.rates.copy == pytest.approx(1e9 * costs.token_bytes * 30 / 32 / sheet.copy_bytes_per_s)
    assert costs.rates.merge == pytest.approx(1e9 * 3 * 4 * 32 * 4096 / sheet.merge_bytes_per_s)


def test_an_optimizer_on_the_host_leaves_memory_and_takes_time() -> None:
    here, away = of("zero.stage=2"), of("zero.stage=2", "optimizer.on_host=true")
    assert away.fixed_bytes < here.fixed_bytes < away.fixed_bytes + away.host_fixed_bytes
    assert away.step > here.step and away.rates == here.rates


def test_tiles_of_swiglu_are_computed_once_more() -> None:
    """SwiGLU's part of the linear layers is computed again; where layers are recomputed anyway, this costs nothing."""
    share = ffn_share(load(["model=llama7b", "context=1K", "capacity=1K"]).model, nominal("h100x8"))
    whole, tiled = of(), of("mlp_tile=1K")
    assert tiled.rates.token_b - whole.rates.token_b == pytest.approx(share * whole.rates.token_f)
    assert tiled.rates.token_f == whole.rates.token_f and 0.7 < share < 0.8
    assert of("recompute=layer", "mlp_tile=1K").rates.token_b == of("recompute=layer").rates.token_b


def test_a_rank_alone_has_no_ring_buffers() -> None:
    alone = of("cluster.nodes=1", "cluster.ranks_per_node=1", "context=8K")
    assert alone.ring_bytes == 0 < of().ring_bytes


def test_one_node_has_no_far_links() -> None:
    assert of("cluster.nodes=1", "context=16K").rates.inter_node_slowdown == 1


def test_a_network_faster_than_a_node_is_no_slower() -> None:
    rates = replace(nominal("h100x8"), network_bytes_per_s=1e15)
    assert costs_of(load(LLAMA7B_256K), rates).rates.inter_node_slowdown == 1


def test_cards_that_devices_share_are_shared_under_tensor_parallelism_too() -> None:
    """Each device of a rank sends its part of K,V through the cards of the node: all of it, however it is split."""
    config, rates = load(LLAMA7B_256K), replace(nominal("h100x8"), nics_per_node=1.0)
    one, four = costs_of(config, rates), costs_of(load([*LLAMA7B_256K, "parallel.tp=4"]), rates)
    assert four.rates.kv / four.nics == pytest.approx(one.rates.kv / one.nics)


def test_tensor_parallel_devices_exchange_rows_in_each_layer() -> None:
    """Forward four times in each layer; backward six times, because the input of both parts is gathered again."""
    one, four, sheet = of(), of("parallel.tp=4"), nominal("h100x8")
    rows = 3 / 4 * 1e9 * 4096 * 2 / sheet.reduce_bytes_per_s
    of_loss = 3 / 4 * 1e9 * 2 * 3 * 4 / sheet.reduce_bytes_per_s
    assert four.rates.token_f == pytest.approx(one.rates.token_f / 4 + (32 * 4 + 2) * rows + of_loss)
    assert four.rates.token_b == pytest.approx(one.rates.token_b / 4 + (32 * 6 + 2) * rows)


@pytest.mark.parametrize("mode", ["none", "layer", "layer_keep_attention"])
def test_recompute_and_tiles_exchange_rows_again(mode: str) -> None:
    """All but the last exchange of a layer is repeated. Tiles repeat both of theirs in every mode."""
    sheet, attention, mlp = nominal("h100x8"), 2 * (mode != "none"), 1 * (mode != "none")
    rows = 3 / 4 * 1e9 * 32 * 4096 * 2 / sheet.reduce_bytes_per_s
    for keys, again in (((), attention + mlp), (("mlp_tile=4096",), attention + 2)):
        one, four = of(f"recompute={mode}", *keys), of(f"recompute={mode}", *keys, "parallel.tp=4")
        sent = four.rates.token_b - one.rates.token_b / 4
        assert sent == pytest.approx((6 + again + 2 / 32) * rows)


def test_tensor_parallel_devices_of_two_nodes_exchange_over_the_network() -> None:
    """Twice the devices compute in half the time, but exchange over a slower link."""
    heads = "model.kv_heads=16"
    eight, sixteen, sheet = of("parallel.tp=8", heads), of("parallel.tp=16", heads), nominal("h100x8")
    sent = 1e9 * ((32 * 4 + 2) * 4096 * 2 + 2 * 3 * 4) * 15 / 16 / sheet.network_bytes_per_s
    assert sixteen.rates.token_f == pytest.approx(of(heads).rates.token_f / 16 + sent)
    assert sixteen.rates.token_f > eight.rates.token_f


def test_rows_travel_at_the_rate_of_collectives() -> None:
    """On CPUs collectives reach about a fourth of the rate of messages."""
    config, slow = load([*LLAMA7B_256K, "parallel.tp=4"]), replace(nominal("h100x8"), reduce_bytes_per_s=1e9)
    rows = 3 / 4 * 1e9 * ((32 * 4 + 2) * 4096 * 2 + 2 * 3 * 4)
    fast = nominal("h100x8").reduce_bytes_per_s
    sent = costs_of(config, slow).rates.token_f - of("parallel.tp=4").rates.token_f
    assert sent == pytest.approx(rows / 1e9 - rows / fast)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_with_free_sums_tensor_parallelism_divides_all(tp: int) -> None:
    sheet = replace(nominal("h100x8"), reduce_bytes_per_s=1e30)
    one, many = (costs_of(load([*LLAMA7B_256K, f"parallel.tp={n}"]), sheet) for n in (1, tp))
    for name in ("token_f", "token_b", "pair_f", "pair_b", "merge", "copy"):
        assert getattr(many.rates, name) == pytest.approx(getattr(one.rates, name) / tp), name
    lengths = np.array([1000, 10**6], dtype=np.int64)
    fixed = one.rates.sequence
    assert many.sequence(lengths) - fixed == pytest.approx((one.sequence(lengths) - fixed) / tp, rel=1e-6)
    for name in ("token_bytes", "ring_bytes"):
        assert getattr(many, name) == -(-getattr(one, name) // tp)
    angles = 2 * 4 * 128  # bytes of a token's cosines and sines, which are whole on every device
    for whole, part in zip(one.instants, many.instants, strict=True):
        divided = whole._replace(token=whole.token - angles + tp * angles)
        assert part == Instant(*(-(-size // tp) for size in divided))._replace(tile=whole.tile)
    assert (many.forward_hop_bytes, many.backward_hop_bytes) == (one.forward_hop_bytes, one.backward_hop_bytes)


def test_experts_cost_the_time_of_those_that_are_met_and_the_memory_of_all() -> None:
    dense, two, all_ = (
        of(),
        of("model.family=mixtral", "model.experts=8", "model.top_k=2"),
        of("model.family=mixtral", "model.experts=8", "model.top_k=8"),
    )
    assert dense.rates.token_f < two.rates.token_f < all_.rates.token_f
    assert dense.rates.pair_f == two.rates.pair_f
    assert dense.token_bytes < two.token_bytes < all_.token_bytes
    assert dense.parameters < two.parameters == all_.parameters
    assert dense.step < two.step == all_.step and dense.fixed_bytes < two.fixed_bytes


def test_a_stage_of_a_pipeline_holds_its_part_of_the_model() -> None:
    """In 1F1B the first stage holds as many micro-batches as there are stages, and the last one a single one.

    The loss is only on the last stage, and embedding and head are at the ends.
    """
    one, four = of("cluster.nodes=128"), of("cluster.nodes=512", "parallel.pp=4")
    parts = four.stages
    assert four.devices == 4 and sum(part.layers for part in parts) == one.layers
    assert sum(part.fixed_bytes for part in parts) == pytest.approx(one.fixed_bytes, rel=0.01)
    assert parts[0].fixed_bytes > parts[1].fixed_bytes == parts[2].fixed_bytes < parts[3].fixed_bytes
    assert [part.token_bytes * one.layers for part in parts] == [
        one.token_bytes * part.layers * (4 - stage) for stage, part in enumerate(parts)
    ]
    assert parts[3].instants == one.instants and all(len(part.instants) == 1 for part in parts[:3])
    assert four.rates == one.rates._replace(team=4, rounds_per_call=4), "a stage's share of the time is the simulator's"


@pytest.mark.parametrize("layers", [3, 4, 32])
def test_copies_take_as_long_as_the_bytes_that_wait_on_the_host(layers: int) -> None:
    """Two layers stay on the device and are never copied."""
    costs, sheet = of(f"model.layers={layers}"), nominal("h100x8")
    tokens = 10**6
    bytes_ = int(costs.host_bytes(ints(tokens), PPM)[0])
    assert costs.rates.copy * tokens == pytest.approx(1e9 * bytes_ / sheet.copy_bytes_per_s, rel=1e-5)


def test_the_peak_is_the_data_sheets() -> None:
    """The reference of MFU is the 989 TFLOP/s of an H100, not what linear layers reach."""
    assert of().peak_flops_per_s == 989e12
    found = of("parallel.tp=8")
    assert (found.peak_flops_per_s, found.devices) == (989e12, 8)


@pytest.mark.parametrize("overrides", [(), ("zero.stage=3", "parallel.tp=2")])
def test_costs_of_given_rates_are_those_of_a_file_with_them(overrides: tuple[str, ...]) -> None:
    """All of them, so that planner and simulator never use two different machines."""
    config = load([*LLAMA7B_256K, *overrides])
    rates = replace(nominal("h100x8"), micro_batch_s=7e-3, half_tokens=5000.0, **alike(1e14), step_s=0.5)
    given = Costs.of(config, Job(config).cluster, rates)
    assert given == costs_of(config, rates)
    assert given.fixed == round(given.rates.micro) != Job(config).costs.fixed


def end_of_step(count: float, ranks: int, bytes_per_s: float, most: int = 2**26) -> tuple[float, float]:
    """Seconds in which `count` parameters are reduced, and updated and gathered, in buckets of at most `most`.

    bf16: a reduce-scatter of fp32 gradients, and bf16 weights gathered, each of ranks - 1 hops a bucket. A rank reads
    and writes 12 bytes for each of its parameters before the first gather, and 34 beside the gather of other buckets.
    """
    sheet = nominal("h100x8")
    buckets, travel = math.ceil(count / most), count * (ranks - 1) / ranks / bytes_per_s
    hops = buckets * (ranks - 1) * sheet.latency_s
    first, update = (count / ranks * each / sheet.memory_bytes_per_s for each in (12, 34))
    gather = 2 * travel + hops
    return 4 * travel + hops, first + max(update, gather) + min(update, gather) / buckets


@pytest.mark.parametrize(("nodes", "tp"), [(128, 1), (128, 2), (16, 1)])
def test_a_step_reduces_gradients_and_updates_weights(nodes: int, tp: int) -> None:
    """The groups of tp ranks share the 8 network cards of a node. Buckets grow with the ranks."""
    costs, sheet = of(f"cluster.nodes={nodes}", "context=16K", f"parallel.tp={tp}"), nominal("h100x8")
    ranks = nodes * 8 // tp
    most = math.isqrt(costs.parameters // tp * ranks * 2**20)
    reduction, update = end_of_step(costs.parameters / tp, ranks, 8 / tp * sheet.network_bytes_per_s, most)
    assert costs.step == pytest.approx(1e9 * (sheet.step_s + reduction + update), abs=1)
    assert costs.reduction == pytest.approx(1e9 * reduction, abs=1)
    assert costs.last_bucket == pytest.approx(max(most * tp, 32000 * 4096) / costs.parameters)
    assert costs.most_hidden == pytest.approx((1 - costs.last_bucket) * costs.reduction)


@pytest.mark.parametrize("overrides", [("zero.stage=2",), ("parallel.pp=2",), ("cluster=local", "context=8K")])
def test_others_reduce_within_no_backward_pass(overrides: tuple[str, ...]) -> None:
    """Stages 2 and 3 reduce in each slot, pipelines and CPUs after the last pass."""
    assert of(*overrides).most_hidden == 0


def test_an_update_slower_than_the_gather_hides_it() -> None:
    """On the host: all but the gather of the last bucket."""
    one = of("optimizer.on_host=true", "cluster.nodes=1", "context=8K")
    sheet = nominal("h100x8")
    update = one.parameters / 8 * (12 + 34) / sheet.copy_bytes_per_s
    travel, hops = one.parameters * 7 / 8 / sheet.node_bytes_per_s, 7 * sheet.latency_s
    buckets = math.ceil(one.parameters / math.isqrt(one.parameters * 8 * 2**20))
    last = 2 * travel / buckets + hops
    assert one.step == pytest.approx(1e9 * (sheet.step_s + 4 * travel + buckets * hops + update + last), abs=1)


def test_a_slot_waits_for_reductions_and_the_first_gather_of_each_pass() -> None:
    """bf16: stages 2 and 3 reduce and scatter 4 bytes of each gradient, stage 2 all but the last bucket, the embedding,
    beside the backward pass; stage 3 gathers weights of 2."""
    one, two, three = (of(f"zero.stage={stage}") for stage in (1, 2, 3))
    # To move a byte of each parameter, over the 8 network cards of a node.
    ns = 1e9 * one.parameters * 1023 / 1024 / (8 * nominal("h100x8").network_bytes_per_s)
    layer = 2 / 32 * (one.parameters - 2 * 32000 * 4096 - 65 * 4096) / one.parameters
    assert (one.slot, one.gathers) == (0, (0, 0))
    rate, last = 8 * nominal("h100x8").network_bytes_per_s, 32000 * 4096 / one.parameters
    reduction, update = (1e9 * seconds for seconds in end_of_step(one.parameters, 1024, rate))
    assert (two.slot, two.gathers) == (pytest.approx(last * reduction), (0, pytest.approx((1 - last) * reduction)))
    assert three.slot == pytest.approx((4 + 2 * layer) * ns)
    kept = 2 * layer + 2 * 32000 * 4096 / one.parameters  # two layers and the head stay between the passes
    assert three.gathers == (pytest.approx((2 - layer) * ns), pytest.approx((2 - layer - kept) * ns))
    fixed = 1e9 * nominal("h100x8").step_s
    assert two.step == pytest.approx(fixed + update)
    assert three.step == pytest.approx(fixed + 1e9 * one.parameters / 1024 * 46 / nominal("h100x8").memory_bytes_per_s)


@pytest.mark.parametrize("overrides", [(), ("parallel.tp=2",), ("cluster.nodes=2", "parallel.pp=2")])
def test_inside_one_node_gradients_and_weights_travel_over_its_links(overrides: tuple[str, ...]) -> None:
    """One node, or one per stage: no byte of a reduction passes a network card."""
    costs, sheet = of("cluster.nodes=1", "context=8K", *overrides), nominal("h100x8")
    group = costs.devices
    ranks = 16 // group if "cluster.nodes=2" in overrides else 8 // group
    most = max(2**26, math.isqrt(costs.parameters // group * ranks * 2**20))
    reduction, update = end_of_step(costs.parameters / group, ranks, sheet.node_bytes_per_s, most)
    assert costs.step == pytest.approx(1e9 * (sheet.step_s + reduction + update), abs=1)


def test_a_network_faster_than_what_a_reduction_reaches_in_a_node_does_not_speed_it_up() -> None:
    config, slow = load(LLAMA7B_256K), replace(nominal("h100x8"), reduce_bytes_per_s=1e9)
    rates = [replace(slow, network_bytes_per_s=network) for network in (1e9, 1e12)]
    first, second = (Costs.of(config, Job(config).cluster, one) for one in rates)
    assert first.step == second.step


def test_groups_of_shares_of_experts_use_the_network_cards_of_a_node_together() -> None:
    """With ep 8, each of the 8 groups of a node has one of its 8 cards."""
    config = load(
        [
            "recipe=mixtral8x7b-32k-4nodes",
            "zero.stage=2",
            "parallel.ep=8",
            "parallel.tp=1",
            "parallel.pp=1",
            "cluster.device_memory=800GiB",
        ]
    )
    sent, sheet, costs = collectives(config, 32).reduction, nominal("h100x8"), Job(config).costs
    hops = math.ceil(costs.parameters / 2**26) * 31 * sheet.latency_s
    whole = costs.slot + costs.gathers[1]
    assert whole == pytest.approx(1e9 * (sent / sheet.network_bytes_per_s + hops), abs=1)


@given(st.integers(0, 10**7), st.integers(0, PPM), st.integers(1, 80))
def test_equation_3_for_any_number_of_layers(tokens: int, offload: int, layers: int) -> None:
    costs = replace(COSTS, layers=layers)
    ratio = Fraction(offload, PPM) if layers > 2 else Fraction(0)
    stays = math.ceil(tokens * (2 + (1 - ratio) * (layers - 2)) / layers) if layers > 2 else tokens
    assert int(costs.resident(ints(tokens), offload)[0]) == stays
    assert int(costs.host_bytes(ints(tokens), offload)[0]) == costs.token_bytes * (tokens - stays)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_offload_frees_what_it_moves(tokens: int, offload: int) -> None:
    kept, moved = (int(COSTS.peak_bytes(ints(tokens), ints(0), ratio)[0]) for ratio in (0, offload))
    host = int(COSTS.host_bytes(ints(tokens), offload)[0])
    assert kept - moved == host


@given(st.integers(0, 10**7))
def test_most_tokens_fit_and_one_more_does_not(memory: int) -> None:
    most = COSTS.most_tokens(memory)
    peak = [int(COSTS.peak_bytes(ints(tokens), ints(tokens))[0]) for tokens in (most, most + 1)]
    assert peak[1] > memory
    assert most == 0 or peak[0] <= memory
