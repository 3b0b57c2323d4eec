"""The size of the pool of loaders, also in simulated runs: a run waits for its documents if it is too small.

Each test is a fault that a first design had: loaders by the length of the queue, by wall time, by the steady rate, and
loaders that were given back long after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.data.mixture import SCALE
from engine.data.runtime.scaling import Estimates, Need, SourceState, loaders_wanted, needs

EVEN = {"a": SCALE // 2, "b": SCALE // 2}


def test_all_blocks_of_a_queue_do_not_count_as_needed_now() -> None:
    """16 blocks of 1 s that are needed in 20 steps of 2 s are work for one loader, in 4 steps for three."""
    assert loaders_wanted([Need("a", 16, 20)], {"a": 1.0}, 2.0, 8) == 1
    assert loaders_wanted([Need("a", 16, 4)], {"a": 1.0}, 2.0, 8) == 3
    assert loaders_wanted([Need("a", 16, 4), Need("b", 2, 4)], {"a": 1.0, "b": 4.0}, 2.0, 8) == 5


def test_the_nearest_deadlines_decide() -> None:
    later = [Need("b", 100, 1000)]
    assert loaders_wanted([Need("a", 8, 2), *later], {"a": 1.0, "b": 1.0}, 1.0, 16) == 6
    assert loaders_wanted(later, {"a": 1.0, "b": 1.0}, 1.0, 16) == 1
    assert loaders_wanted([], {}, 1.0, 16) == 1 and loaders_wanted([], {}, 1.0, 16, least=2) == 2


def test_no_more_loaders_than_cores_or_blocks() -> None:
    """Late blocks are no reason for more: two blocks keep two loaders busy, however long they take."""
    assert loaders_wanted([Need("a", 100, 1)], {"a": 9.0}, 1.0, 6) == 6
    assert loaders_wanted([Need("a", 1.5, -3)], {"a": 900.0}, 1.0, 6) == 2
    assert loaders_wanted([Need("a", 100, 1)], {"a": 9.0}, 1.0, 0) == 1
    assert loaders_wanted([Need("new", 4, 1)], {"a": 1.0, "b": 3.0}, 1.0, 9) == 4, "as long as others on average"


def test_windows_are_needed_when_the_ones_before_are_used() -> None:
    """a has 30 tokens left and takes 20 a step: its next windows of 4 blocks of 10 begin in steps 1.5, 3.5, ..."""
    states = {"a": SourceState(30, 4, 10, packed_of_window=1), "b": SourceState(1000, 4, 10)}
    assert needs([EVEN] * 5, 40, states) == [Need("a", 3, 1.5), Need("a", 4, 3.5)]
    assert needs([EVEN], 40, states) == []
    late = needs([EVEN], 40, {"a": SourceState(-10, 4, 10), "b": SourceState(0, 1, 5)})
    assert late[0] == Need("a", 4, 0) and [one.source for one in late[1:]] == ["b"] * 4


def test_the_announced_mixture_decides() -> None:
    weights = [{"a": SCALE, "b": 0}] * 3 + [{"a": 0, "b": SCALE}] * 3
    states = {name: SourceState(0, 2, 50) for name in ("a", "b")}
    assert {need.source: need.steps for need in reversed(needs(weights, 100, states))} == {"a": 0, "b": 3}
    assert [need.source for need in needs(weights[:3], 100, states)] == ["a"] * 3


def test_estimates_follow_the_last_blocks_and_decay_without_any() -> None:
    estimates = Estimates({"a": 1.0})
    for _ in range(3):
        estimates.packed("a", 10.0)
    assert estimates.seconds()["a"] > 9
    decayed = list[float]()
    for _ in range(20):
        estimates.step()
        decayed.append(estimates.seconds()["a"])
    assert decayed == sorted(decayed, reverse=True) and decayed[5] < 3
    estimates.step(100)
    assert estimates.seconds()["a"] == pytest.approx(1.0)
    for _ in range(500):
        estimates.packed("a", 10.0)
    estimates.step(100)
    assert estimates.seconds()["a"] == pytest.approx(10.0, rel=0.01), "a wrong prediction is forgotten"


def test_a_slow_block_is_seen_before_it_ends() -> None:
    estimates = Estimates({"a": 1.0})
    assert estimates.seconds([("a", 0.5), ("a", 7.0), ("b", 2.0)]) == {"a": 7.0, "b": 2.0}
    assert estimates.seconds() == {"a": 1.0}


def test_what_is_usual_for_a_source_is_the_median_of_its_blocks() -> None:
    estimates = Estimates()
    assert estimates.seconds() == {}
    for seconds in (1.0, 9.0, 1.0):
        estimates.packed("a", seconds)
    estimates.step(100)
    assert estimates.seconds()["a"] == pytest.approx(1.0)


@dataclass
class Source:
    """A source of a simulated run: tokens that are packed and not used, and the blocks of the next windows."""

    seconds: Callable[[float], float]  # of a block that is begun at a time
    window: int = 16
    block_tokens: int = 100
    left: float = 0.0
    finished: float = 0.0  # blocks of windows that are not complete


@dataclass
class Run:
    """A run whose loaders take blocks in the order of need. `loaders`, `stalls` and `begun` have a row a step."""

    sources: dict[str, Source]
    weights: Callable[[int], dict[str, int]]
    cores: int = 8
    ahead: int = 16  # steps whose windows are packed
    batch: int = 800
    step_s: float = 1.0
    loaders: list[int] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    first_begun: dict[tuple[str, float], int] = field(default_factory=dict)  # step, by source and seconds of a block

    def go(self, steps: int, predicted: float, tick: float = 0.05) -> None:
        estimates, now, pool = Estimates(dict.fromkeys(self.sources, predicted)), 0.0, 1
        running = list[tuple[str, float, float]]()  # source, begin, seconds
        for one in self.sources.values():  # the first windows are packed before the first step
            one.left = one.window * one.block_tokens
        for step in range(steps):
            weights = [self.weights(later) for later in range(step, step + self.ahead)]
            begin, stall, end = now, 0.0, now + self.step_s
            taken = False
            while now < end:
                states = {
                    name: SourceState(one.left, one.window, one.block_tokens, one.finished)
                    for name, one in self.sources.items()
                }
                # In the middle of a step its documents are taken already.
                done = (now - begin - stall) / self.step_s
                needed = [need._replace(steps=need.steps - done) for need in needs(weights[taken:], self.batch, states)]
                seconds = estimates.seconds((name, now - start) for name, start, _ in running)
                pool = loaders_wanted(needed, seconds, self.step_s, self.cores)
                queue = [need.source for need in needed for _ in range(round(need.blocks))]
                for name, _, _ in running:
                    if name in queue:
                        queue.remove(name)
                while queue and len(running) < pool:
                    name, duration = queue[0], self.sources[queue[0]].seconds(now)
                    running.append((queue.pop(0), now, duration))
                    self.first_begun.setdefault((name, duration), step)
                if not taken and all(
                    one.left >= weights[0].get(name, 0) / SCALE * self.batch for name, one in self.sources.items()
                ):
                    taken = True
                    for name, one in self.sources.items():
                        one.left -= weights[0].get(name, 0) / SCALE * self.batch
                now += tick
                if not taken:
                    stall, end = stall + tick, end + tick
                for block in [block for block in running if now - block[1] >= block[2]]:
                    running.remove(block)
                    estimates.packed(block[0], block[2])
                    one = self.sources[block[0]]
                    one.finished += 1
                    if one.finished == one.window:
                        one.left, one.finished = one.left + one.window * one.block_tokens, 0
            estimates.step()
            self.loaders.append(max(pool, len(running)))
            self.stalls.append(stall)


def test_a_source_that_becomes_slow_gets_more_loaders_and_gives_them_back() -> None:
    """Ten times slower for 20 steps. Steps count from the first slow block that is begun, and then from the end."""
    slow = Source(lambda now: 3.0 if 40 <= now < 60 else 0.3)
    sources = {"a": Source(lambda now: 0.3), "b": Source(lambda now: 0.3), "slow": slow}
    run = Run(sources, lambda step: {"a": SCALE // 2, "b": SCALE * 3 // 8, "slow": SCALE // 8})
    run.go(100, predicted=0.3)
    before, first = max(run.loaders[20:40]), run.first_begun["slow", 3.0]
    assert first < 60 and max(run.loaders[first : first + 5]) >= 2 * before
    assert max(run.loaders[62:65]) <= before, "given back"
    assert max(run.loaders[67:]) <= before + 1, "the next window of the source shows at once that it is fast again"
    assert max(run.loaders) <= run.cores and max(run.stalls[:first]) == 0.0


def test_a_weight_that_rises_has_its_loaders_before() -> None:
    """From 5 to 80 % at step 40, until step 60, of a source whose blocks take three times as long."""

    def weights(step: int) -> dict[str, int]:
        rising = SCALE * (80 if 40 <= step < 60 else 5) // 100
        return {"a": SCALE - rising, "rising": rising}

    runs = dict[int, Run]()
    for ahead in (16, 1):
        sources = {"a": Source(lambda now: 0.3), "rising": Source(lambda now: 1.0)}
        runs[ahead] = Run(sources, weights, cores=16, ahead=ahead)
        runs[ahead].go(100, predicted=0.5)
    run = runs[16]
    before = max(run.loaders[15:25])  # the rise is announced 16 steps ahead
    assert run.loaders[40] >= 2 * before and max(run.loaders) < run.cores
    assert max(run.loaders[65:]) <= before + 1, "given back"
    assert max(run.stalls) <= 0.2 < max(runs[1].stalls), "a run that does not look ahead waits"
