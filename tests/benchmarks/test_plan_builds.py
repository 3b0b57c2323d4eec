"""Execution plans that training would build, counted without tensors."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import plan_builds
from benchmarks.plan_builds import CORPORA, SETTINGS, ThreadCall, hindsight, measure, new_rule, old_rule, rank_calls
from engine.attention.kernels.call import Call
from engine.config.load import load
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings

CONFIG = load([*SETTINGS, "model.layers=4", "recompute=none"])
LARGE = ThreadCall(False, False, Call((0, 65536), (0, 65536), causal=True))


def test_the_calls_of_all_ranks_cover_each_pair_of_a_step_once_forward_and_once_backward() -> None:
    """Also where rings and unsplit sequences share a micro-batch. A causal block counts half of its square."""
    settings = PlanSettings.of(CONFIG)
    lengths = np.array([65536, 20000, 5000, 4000, 3000, 100], dtype=np.int64)
    plan = plan_step(lengths, settings)
    assert int(plan.degrees.max()) >= 8
    calls = [one for rank in range(plan.ranks) for one in rank_calls(plan, rank, CONFIG)]
    for backward in (False, True):
        pairs = sum(one.pairs for one in calls if one.backward == backward)
        assert pairs == pytest.approx(float((lengths**2).sum()) / 2, rel=1e-3)
    assert {(one.autograd, one.backward) for one in calls} == {(False, False), (True, True)}


def test_recomputed_layers_run_their_forward_pass_in_autograds_thread() -> None:
    config = CONFIG.model_copy(update={"recompute": "layer"})
    plan = plan_step(np.array([9000], dtype=np.int64), PlanSettings.of(config))
    calls = list(rank_calls(plan, 0, config))
    assert {(one.autograd, one.backward) for one in calls} == {(False, False), (True, False), (True, True)}


def test_each_rule_counts_plans_and_pairs() -> None:
    """20 steps; the last ten count. A large shape comes in all of them, small ones come once each."""
    once = [ThreadCall(True, True, Call((0, 4096 + step), (0, 4096 + step), causal=True)) for step in range(20)]
    steps = [[LARGE, one] for one in once]
    old, new, best = (rule(steps, CONFIG) for rule in (old_rule, new_rule, hindsight))
    assert (old["builds"], new["builds"], best["builds"]) == (1.0, 0.0, 0.0)
    assert (old["cudnn_pairs"], old["lost_s"], new["build_s"]) == (1.0, 0.0, 0.0)
    assert 0.99 < new["cudnn_pairs"] == best["cudnn_pairs"] < 1
    assert 0 < new["lost_s"] < old["build_s"]


def test_sequences_that_share_a_call_count_what_a_call_of_their_own_saves() -> None:
    """The longer one, which comes in all steps, beside others that save less than a call of their own costs."""
    mixes = [Call((0, 500 + step, 66036 + step), (0, 500 + step, 66036 + step), causal=True) for step in range(20)]
    steps = [[ThreadCall(True, True, call)] for call in mixes]
    old, new, best = (rule(steps, CONFIG) for rule in (old_rule, new_rule, hindsight))
    assert old["cudnn_pairs"] == 0 < 0.99 < new["cudnn_pairs"] == best["cudnn_pairs"] < 1
    assert new["lost_s"] == best["lost_s"] == 0, "the rest saves nothing"


def test_lengths_of_a_corpus_are_planned_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builds, "FIRST_STEPS", 1)
    rows = measure("github", 3, (*SETTINGS, "model.layers=4"))
    assert [(row["corpus"], row["rule"]) for row in rows] == [("github", rule) for rule in ("old", "new", "hindsight")]
    old, new, _ = rows
    assert old["builds"] > new["builds"] and old["cudnn_pairs"] > new["cudnn_pairs"] and "github" in CORPORA
