"""Expert parallelism in lockstep: loss and gradients are those of one process, in float64, with idle ranks too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.layout import layout
from engine.close import error
from engine.cluster.mesh import Mesh
from engine.config.schema import Config
from engine.cost.collectives import expert_collectives
from engine.data.inputs import rank_inputs
from engine.family.families import parameters_of
from engine.family.parameters import Parameters
from engine.job import Job
from engine.models.build import build_model
from engine.models.common import initialise as initialising
from engine.models.common.initialise import initialise
from engine.models.common.part import Part
from engine.models.decoder import Decoder
from engine.models.experts.layer import LocalRoute
from engine.models.parallelize import parallelize
from engine.models.recompute import MODES
from engine.parallel import expert
from engine.parallel.expert import ExpertParallel, ExpertRoute
from engine.planner.make import plan_step
from engine.trainer.step import evaluate, run_step
from tests.covering import Case, pairwise
from tests.helpers import Batch, batch, config, family, losses_of, mixtral, rank_context, table_of
from tests.models.shapes import mixtral_shape
from tests.world import run_world

WORLD, CAPACITY = 4, 40
EXPERTS = [
    "model.experts=4",
    "model.top_k=2",
    "balance.loss_weight=0.5",
    "balance.z_weight=0.1",
]
BYTES = ["model.family=mixtral", *EXPERTS, "parallel.ep=2", "cluster.ranks_per_node=2"]
FACTORS: dict[str, list[Any]] = {
    "ep": [2, 4],
    "planner": ["static", "naive", "balanced", "adaptive"],
    "few": [False, True],  # so few sequences that ranks are idle
    "recompute": list(MODES),
    "balance": ["loss", "bias"],
    "qwen3": [False, True],
}


def settings_of(case: Case) -> Config:
    more = [
        *EXPERTS,
        *family(True, case["qwen3"]),
        "planner.mode=lockstep",
        f"recompute={case['recompute']}",
        f"balance.by={case['balance']}",
    ]
    return config(WORLD, CAPACITY, case["planner"], *more)


def batch_of(case: Case) -> Batch:
    return table_of([70, 5, 9], seed=5) if case["few"] else batch(WORLD, CAPACITY)


def share_of(table: Parameters, name: str, whole: Tensor, ep: int, rank: int) -> Tensor:
    return whole.chunk(ep)[rank] if name in table and table[name].stacked else whole


def on_rank(cases: list[Case], fault: bool = False) -> list[dict[str, Any]]:
    context, found = rank_context(torch.float64), []
    groups = {
        ep: dist.new_group(Mesh(WORLD, ep=ep).members(dist.get_rank(), "ep"), use_local_synchronization=True)
        for ep in FACTORS["ep"]
    }
    if fault:
        ExpertRoute.collect_weights = lambda self, weights: self._local.collect_weights(  # type: ignore[method-assign]
            0 * self._back(weights)
        )
    for case in cases:
        settings, parallel = settings_of(case), ExpertParallel(groups[case["ep"]])
        whole = mixtral(settings).state_dict()
        part = Part(range(settings.model.layers), ep=parallel.size, ep_rank=parallel.rank)
        model = build_model(settings, part).double()
        parallelize(model, settings, torch.device("cpu"), experts=parallel)
        of_model, ep = parameters_of(settings.model), parallel.size
        model.load_state_dict({name: share_of(of_model, name, x, ep, parallel.rank) for name, x in whole.items()})
        table, reader = batch_of(case)
        plan = plan_step(table.length, Job(settings).settings)
        read_inputs = partial(rank_inputs, reader, table)
        loss, _ = run_step(plan, model, Tensor.backward, read_inputs, context)
        evaluated = evaluate(plan, model, read_inputs, context)
        told = model.end_step(total, int(table.loss_tokens.sum()))
        found.append(
            {
                "loss": loss.item(),
                "evaluated": evaluated.item(),
                "told": told,
                "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
                "idle": sum(not micro.shards for micro in plan.of_rank(context.hdp_rank)),
                "tokens": sum(layout(micro).tokens for micro in plan.of_rank(context.hdp_rank) if micro.shards),
                "degree": int(plan.degrees.max()),
            }
        )
    return found


def total(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def compare(case: Case, found: list[dict[str, Any]]) -> None:
    settings = settings_of(case)
    model, (table, reader) = mixtral(settings), batch_of(case)
    loss, evaluated = losses_of(model, table, reader)
    told = model.end_step(lambda values: values, int(table.loss_tokens.sum()))
    assert sum(one["loss"] for one in found) == pytest.approx(loss, rel=1e-10), case
    assert sum(one["evaluated"] for one in found) == pytest.approx(evaluated, rel=1e-10), case
    assert all(one["told"] == pytest.approx(told, rel=1e-12) for one in found), case
    ep, table = case["ep"], parameters_of(settings.model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for share in range(ep):  # the ranks that store the same experts; for other parameters all ranks
            ranks = range(share, WORLD, ep) if table[name].stacked else range(WORLD)
            value = sum((found[rank]["gradients"][name] for rank in ranks), torch.zeros(()))
            assert error(value, share_of(table, name, parameter.grad, ep, share)) < 1e-10, (case, name)


@pytest.mark.world
def test_float64_gradients_of_experts_on_several_ranks_are_those_of_one_process() -> None:
    cases = pairwise(FACTORS)
    ranks = run_world(WORLD, on_rank, cases)
    for number, case in enumerate(cases):
        compare(case, [of_rank[number] for of_rank in ranks])
    assert any(one["idle"] for of_rank in ranks for one in of_rank), "no idle rank: the test shows too little"
    assert any(len({of_rank[number]["tokens"] for of_rank in ranks}) > 1 for number in range(len(cases)))
    assert max(one["degree"] for one in ranks[0]) > 1, "no rings: the test shows too little"


@pytest.mark.world
def test_weights_whose_gradients_do_not_return_are_noticed() -> None:
    cases = pairwise(FACTORS)[:1]
    found = [of_rank[0] for of_rank in run_world(WORLD, on_rank, cases, True)]
    with pytest.raises(AssertionError):
        compare(cases[0], found)


def test_tiles_are_refused() -> None:
    model = Decoder(mixtral_shape())
    model.experts()[0].tile = 3
    with pytest.raises(ValueError):
        ExpertParallel.apply(None, model)  # type: ignore[arg-type]


def test_shares_are_initialised_as_in_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end inside experts."""
    monkeypatch.setattr(initialising, "BLOCK", 1000)
    shape = mixtral_shape()
    whole, table = Decoder(shape), parameters_of(shape)
    initialise(whole, 7)
    for rank in range(2):
        model = Decoder(shape, None, Part(range(shape.layers), ep=2, ep_rank=rank))
        initialise(model, 7)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, share_of(table, name, whole.get_parameter(name), 2, rank)), (name, rank)


def bytes_sent_in_all_modes() -> list[tuple[list[int], int]]:
    return [bytes_sent(mode) for mode in MODES]


def bytes_sent(recompute: str) -> tuple[list[int], int]:
    """On a rank of two: the bytes of rows and weights that each pass exchanges, and the rank's tokens."""
    settings, sent, tokens = config(2, CAPACITY, "static", *BYTES, f"recompute={recompute}"), [0, 0], torch.arange(9)
    exchange = ExpertParallel.exchange

    def counted(self: ExpertParallel, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        sent[0] += rows.nbytes
        return exchange(self, rows, send, receive)

    ExpertParallel.exchange = counted  # type: ignore[method-assign]
    part = Part(range(settings.model.layers), ep=2, ep_rank=dist.get_rank())
    model = build_model(settings, part)
    initialise(model, 3)
    parallelize(model, settings, torch.device("cpu"), experts=ExpertParallel(dist.group.WORLD))
    loss = model(tokens + dist.get_rank(), tokens, tokens)
    forward, sent[0] = sent[0], 0
    loss.backward()
    ExpertParallel.exchange = exchange  # type: ignore[method-assign]
    return [forward, sent[0]], len(tokens)


def numbers_exchanged_in_all_modes() -> list[tuple[int, int, int]]:
    return [numbers_exchanged(mode) for mode in MODES]


def numbers_exchanged(recompute: str) -> tuple[int, int, int]:
    """On a rank of two: how often the forward and the backward pass exchange numbers of rows; and the host's waits."""
    settings, tokens = config(2, CAPACITY, "static", *BYTES, f"recompute={recompute}"), torch.arange(9)
    exchange, fetch, found = dist.all_to_all_single, expert.fetch, [0, 0]

    def counted(out: Tensor, rows: Tensor, *arguments: Any, **more: Any) -> Any:
        found[0] += not rows.is_floating_point()
        return exchange(out, rows, *arguments, **more)

    def fetched(numbers: Tensor) -> Callable[[], Any]:
        def wait() -> Any:
            found[1] += 1
            return fetch(numbers)()

        return wait

    dist.all_to_all_single, expert.fetch = counted, fetched
    part = Part(range(settings.model.layers), ep=2, ep_rank=dist.get_rank())
    model = build_model(settings, part)
    initialise(model, 3)
    parallelize(model, settings, torch.device("cpu"), experts=ExpertParallel(dist.group.WORLD))
    loss = model(tokens + dist.get_rank(), tokens, tokens)
    forward = found[0]
    loss.backward()
    dist.all_to_all_single, expert.fetch = exchange, fetch
    return forward, found[0] - forward, found[1]


@pytest.mark.world
def test_the_host_waits_for_numbers_of_rows_once_for_each_layer() -> None:
    """Not again in the backward pass, nor when a layer is computed again."""
    layers = config(2, CAPACITY, "static", *BYTES).model.layers
    for of_rank in run_world(2, numbers_exchanged_in_all_modes):
        assert of_rank == [(layers, 0, layers)] * len(MODES)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_group_of_one_rank_exchanges_nothing_and_only_fetch_waits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU any other wait of the host is an error here. Its second route takes the numbers of the first."""
    parallel = object.__new__(ExpertParallel)
    parallel.size, parallel.rank, parallel.group = 1, 0, None  # type: ignore[assignment]
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, rows, *_, **__: out.copy_(rows))
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)).to(device)
    chosen = torch.stack((torch.arange(50) % 3, torch.arange(50) % 2 + 3), 1).to(device)
    weights, local = torch.rand(50, 2).to(device), LocalRoute(chosen, 6)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        first = ExpertRoute(parallel, chosen, 6, None)
        routes = [(one.spread(x), one.spread_weights(weights), one.counts) for one in
                  (first, ExpertRoute(parallel, chosen, 6, first.known))]  # fmt: skip
        sums = first.collect(routes[0][0], x.dtype)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    for found in routes:
        expected = local.spread(x), local.spread_weights(weights), local.counts
        assert all(map(torch.equal, found, expected))
    assert torch.equal(sums, local.collect(local.spread(x), x.dtype))


@pytest.mark.world
def test_bytes_are_those_of_the_cost_model() -> None:
    """Rows that stay on their rank are counted here; the cost model leaves out 1 / ep of all rows."""
    for recompute, *ranks in zip(MODES, *run_world(2, bytes_sent_in_all_modes), strict=True):
        expected = expert_collectives(config(2, CAPACITY, "static", *BYTES, f"recompute={recompute}"))
        tokens = sum(count for _, count in ranks)
        found = [sum(sent[place] for sent, _ in ranks) / tokens for place in (0, 1)]
        assert found == pytest.approx([2 * each for each in expected]), recompute


@pytest.mark.world
@pytest.mark.slow
def test_fifty_steps_with_idle_ranks_end() -> None:
    case = pairwise(FACTORS)[0] | {"planner": "adaptive", "few": True}
    cases = [case | {"ep": ep} for _ in range(25) for ep in FACTORS["ep"]]
    ranks = run_world(WORLD, on_rank, cases)
    for number, each in enumerate(cases):
        compare(each, [of_rank[number] for of_rank in ranks])
    assert any(one["idle"] for of_rank in ranks for one in of_rank), "no idle rank: the test shows too little"
