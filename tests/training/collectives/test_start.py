"""Ranks that an agent starts again do not read what those before them left in the agent's store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardscope.training.collectives.start import agreed_name

TIMEOUT = timedelta(seconds=20)
RANKS = 3


def started(store: dist.Store, *, last: int) -> set[str]:
    """The names that the ranks of one start agree on; one rank comes after the others."""

    def join(rank: int) -> str:
        time.sleep(0.1 * (rank == last))
        return agreed_name(store, rank, RANKS, TIMEOUT)

    with ThreadPoolExecutor(RANKS) as ranks:
        return set(ranks.map(join, range(RANKS)))


@pytest.mark.parametrize("last", range(RANKS))
def test_each_start_has_a_name_of_its_own(last: int) -> None:
    store = dist.HashStore()
    names = [started(store, last=last) for _ in range(3)]
    assert [len(each) for each in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_a_start_that_did_not_get_so_far_is_forgotten() -> None:
    """Rank 0 and another one had ended before the last one came."""
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError):
        agreed_name(store, 0, RANKS, timedelta(milliseconds=50))
    with pytest.raises(dist.DistStoreError, match="rank 1 has waited 0.05 s"):
        agreed_name(store, 1, RANKS, timedelta(milliseconds=50))
    assert len(started(store, last=0)) == 1
