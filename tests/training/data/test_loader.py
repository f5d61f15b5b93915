"""The loader: the right rows, on demand or ahead, and no thread left behind."""

from __future__ import annotations

import threading

import pytest
import torch

from shardscope.training.data import GlobalSampler, Loader, load_data, shard


class Rows:
    def __init__(self, fail_at=None):
        self.read, self.fail_at = [], fail_at

    def __len__(self):
        return 40

    def batch(self, indices):
        self.read.append(indices)
        if len(self.read) == self.fail_at:
            raise RuntimeError("unreadable row")
        return indices, indices


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardscope-loader")]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("steps", [range(12), [3, 4, 9, 2, 2, 3]], ids=["in order", "with jumps"])
def test_each_rank_gets_its_own_rows(prefetch, steps):
    sampler, reference = GlobalSampler(40, 8, seed=0), GlobalSampler(40, 8, seed=0)
    with Loader(Rows(), sampler, rank=1, world_size=4, prefetch=prefetch) as loader:
        for step in steps:
            x, _ = loader.batch(step)
            assert torch.equal(x, shard(reference.indices(step), 1, 4))


def test_a_rank_reads_no_rows_of_others():
    source = Rows()
    with Loader(source, GlobalSampler(40, 8, seed=0), rank=2, world_size=4, prefetch=False) as loader:
        loader.batch(0)
    assert [len(rows) for rows in source.read] == [2]


def test_embedded_data_needs_no_thread():
    dataset = load_data("digits")
    with Loader(dataset.train, GlobalSampler(len(dataset.train), 8, seed=0)) as loader:
        loader.batch(0)
        assert not loader_threads()


def test_code_of_the_users_runs_ahead_in_a_thread_that_ends():
    dataset = load_data(Rows)
    with Loader(dataset.train, GlobalSampler(len(dataset.train), 8, seed=0)) as loader:
        loader.batch(0)
        assert loader_threads()
    assert not loader_threads()
    loader.close()


def test_an_error_in_the_thread_reaches_the_step_that_needs_it():
    with Loader(Rows(fail_at=2), GlobalSampler(40, 8, seed=0), prefetch=True) as loader:
        loader.batch(0)
        with pytest.raises(RuntimeError, match="unreadable row"):
            loader.batch(1)
    assert not loader_threads()
