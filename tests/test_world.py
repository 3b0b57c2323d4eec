"""`run_world`, which other tests run in, reports a rank that fails, dies or hangs."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.world import run_world

pytestmark = pytest.mark.world


def tensor_of(first: int) -> Tensor:
    return torch.full((100_000,), first + dist.get_rank())


def fails() -> None:
    if dist.get_rank() == 1:
        raise KeyError("lost")
    dist.barrier()


def dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


def hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def is_warm() -> bool:
    return "tests.warm" in sys.modules


def test_ranks_start_with_what_most_of_them_import() -> None:
    """The server ignores a module that it does not find, and each rank would import for half a second."""
    assert run_world(2, is_warm) == [True, True]


def test_each_rank_answers_in_its_place() -> None:
    assert [x.unique().tolist() for x in run_world(3, tensor_of, 5)] == [[5], [6], [7]]


def test_a_rank_that_fails_shows_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*in fails.*KeyError: 'lost'"):
        run_world(2, fails)


def test_a_rank_that_dies_fails_the_world_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_world(2, dies)
    assert time.monotonic() - began < 30


def test_a_rank_that_hangs_fails_the_world_in_time() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] did not answer within 4 s"):
        run_world(2, hangs, timeout_s=4)
