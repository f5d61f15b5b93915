"""What tests of collectives share: sizes that do not divide, and tensors whose sums are exact in any order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardscope.training.context import RankContext

ODD_SIZES = [0, 1, 2, 3, 5, 7, 1001, 65_537, 500_009]


def filled(num_elements: int, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Different on every rank, small integers: sums are exact in any order."""
    return ((torch.arange(num_elements) % 251) * (rank + 1)).to(dtype)


def check_sums(collective: object, context: RankContext, dtype: torch.dtype) -> bool:
    """Hold `all_reduce_` of a collective of ours against the backend's own, at every odd size."""
    for n in ODD_SIZES:
        ours = (filled(n, context.rank) % 8).to(dtype)
        theirs = ours.clone()
        collective.all_reduce_(ours)  # type: ignore[attr-defined]
        dist.all_reduce(theirs)
        assert torch.equal(ours, theirs), n
    return True
