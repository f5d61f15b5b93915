"""Collectives within a pass, over connections that do not take tensors of every shape as shared memory does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from conformance.ranks import RankPool
from shardscope.training.context import RankContext
from shardscope.training.sequence import SequenceAxis


def _exchanged(context: RankContext) -> tuple[int, list[Tensor]]:
    """The results of all collectives, where rank r has sequences `(1, 2)` of r, and terms `(size, 1, 2)` of r + 1."""
    axis = SequenceAxis(context.world_size, context.rank, context.group)
    own, terms = torch.full((1, 2), float(axis.rank)), torch.full((axis.size, 1, 2), axis.rank + 1.0)
    terms *= torch.arange(1.0, axis.size + 1)[:, None, None]
    found = [
        axis.all_gather(own), axis.reduce_scatter(terms), axis.all_to_all(terms), axis.gather(own)
    ]  # fmt: skip
    return axis.rank, found


@pytest.mark.ranks(3)
def test_collectives_give_over_tcp_what_they_say(tcp_pool: RankPool, tmp_path: Path) -> None:
    ranks = torch.arange(3.0)
    for rank, (gathered, summed, exchanged, sequences) in tcp_pool.run(_exchanged, tmp_path):
        assert torch.equal(gathered, ranks[:, None, None].expand(3, 1, 2))
        assert torch.equal(summed, torch.full((1, 2), 6.0 * (rank + 1)))
        assert torch.equal(exchanged, ((rank + 1) * (ranks + 1))[:, None, None].expand(3, 1, 2))
        assert torch.equal(sequences, ranks.repeat_interleave(2)[None])
