"""What `profile-hardware` times on a device, on one or two CPU ranks."""

from __future__ import annotations

import pytest
import torch

from engine.attention.comm import RingComm
from engine.hardware import device, timing
from engine.hardware.device import TRANSFERS, Message, copies, overlap, rows_of_duration, transfers
from engine.hardware.network import between, slowest
from tests.hardware.ranks import groups_of_world
from tests.world import run_world


def test_messages_reach_the_size_of_real_ones_on_gpus() -> None:
    """The K,V and dK,dV of a round have 30 to 100 MB; CPU ranks keep short ones."""
    assert max(TRANSFERS["cuda"]) == 128 << 20
    assert max(TRANSFERS["cpu"]) == 4 << 20
    assert all(list(sizes) == sorted(sizes) for sizes in TRANSFERS.values())


@pytest.mark.parametrize(("message_s", "row_s", "rows"), [(2e-3, 1e-6, 1984), (1e-3, 5e-9, 200_000), (1e-9, 1e-3, 64)])
def test_a_product_is_as_long_as_the_message(message_s: float, row_s: float, rows: int) -> None:
    assert rows_of_duration(message_s, row_s) == rows


def test_products_that_hide_messages_on_gpus_are_bf16() -> None:
    assert device._HIDING["cuda"][1] == torch.bfloat16


def _measured() -> dict[str, object]:
    groups = groups_of_world()
    comm = RingComm(groups.rings)
    sent: list[int] = []
    post = comm.post

    def counted(exchanges: list[device.Exchange]) -> object:
        sent.append(sum(exchange.send.nbytes for exchange in exchanges))
        return post(exchanges)

    comm.post = counted  # type: ignore[assignment, method-assign]
    products: list[int] = []
    mm = torch.mm
    torch.mm = lambda x, weight: products.append(len(x)) or mm(x, weight)  # type: ignore[func-returns-value]
    found = {
        "transfers": transfers(comm, groups, 0.05),
        "sent": set(sent),
        "overlap": overlap(comm, groups, 0.05),
        "products": len(set(products)),
        "copies": copies(groups, 0.05),
    }
    torch.mm = mm
    return found


@pytest.mark.world
def test_two_ranks_time_messages_and_copies() -> None:
    for found in run_world(2, _measured):
        sizes, times = zip(*found["transfers"], strict=True)
        assert sizes == TRANSFERS["cpu"] and min(times) > 0
        assert found["sent"] == set(sizes)
        assert found["products"] <= 2, "one to find the duration of a row, one as long as the message"
        assert min(vars(found["copies"]).values()) > 0


class Link:
    """A clock, and a link whose messages take 2 ms: while the rank computes, or only while it waits for them."""

    def __init__(self, hides: bool) -> None:
        self.hides, self.clock, self.arrival = hides, 0.0, 0.0

    def now(self) -> float:
        return self.clock

    def post(self, exchanges: object) -> Link:
        self.arrival = self.clock + 2e-3
        return self

    def wait(self) -> None:
        self.clock = max(self.clock, self.arrival) if self.hides else self.clock + 2e-3

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.clock += 1e-6 * len(x)


def _overlaps() -> list[float]:
    found = []
    for hides in (True, False):
        link = Link(hides)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timing, "Stopwatch", lambda device, link=link: link)
            patch.setattr(torch, "mm", link.multiply)
            found.append(overlap(link, groups_of_world(), 0.01))  # type: ignore[arg-type]
    return found


@pytest.mark.world
def test_what_a_product_hides_of_a_message_is_its_overlap() -> None:
    ((hidden, waited_for),) = run_world(1, _overlaps)
    assert hidden == pytest.approx(1, abs=0.05) and waited_for == pytest.approx(0, abs=0.05)


def _slowest() -> list[float]:
    groups = groups_of_world()
    # After two warm-ups, one rank becomes slower and the other faster.
    seconds = iter([900.0, 900.0, *(float((turn if groups.rank else 13 - turn) ** 2) for turn in range(1, 13))])
    return slowest([lambda: (next(seconds), 0.0), None], groups)


@pytest.mark.world
def test_messages_between_nodes_take_the_median_of_the_slowest_rank() -> None:
    assert run_world(2, _slowest) == [[(9**2 + 10**2) / 2, 0.0]] * 2


def _between_nodes(first: int) -> tuple[object, set[int]]:
    groups = groups_of_world()
    comm, peers = RingComm(groups.rings), set()
    post = comm.post

    def noted(exchanges: list[device.Exchange]) -> object:
        peers.update((exchange.next_rank, exchange.previous_rank) for exchange in exchanges)
        return post(exchanges)

    comm.post = noted  # type: ignore[assignment, method-assign]
    return between(groups, comm, first), peers


@pytest.mark.world
@pytest.mark.parametrize(
    ("first", "pairs", "peers"),
    [
        (1, 1, [{(1, 1)}, {(0, 0)}, set()]),
        (2, 1, [{(2, 2)}, set(), {(0, 0)}]),
    ],
)
def test_pairs_of_ranks_on_two_nodes_exchange_messages(first: int, pairs: int, peers: list[set[object]]) -> None:
    """Three ranks: one node has one more than the other, and that one waits."""
    found = run_world(3, _between_nodes, first)
    assert [met for _, met in found] == peers
    network = found[0][0]
    assert all(other == network for other, _ in found), "all ranks have the slowest rank's times"
    assert network.pairs == pairs
    for times in (network.alone, network.together):
        assert [size for size, _ in times] == list(TRANSFERS["cpu"])
        assert min(seconds for _, seconds in times) > 0


def test_a_message_has_the_size_in_bytes() -> None:
    message = Message(4096, None, torch.device("cpu"), 1, 2)  # type: ignore[arg-type]
    assert message._exchange.send.nbytes == message._exchange.receive.nbytes == 4096
    assert (message._exchange.next_rank, message._exchange.previous_rank) == (1, 2)


def test_one_thread_is_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, text in ((1, "1 thread per rank"), (2, "2 threads per rank")):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert device.name(torch.device("cpu")).endswith(f", {text}")
