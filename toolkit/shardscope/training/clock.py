"""Clock for time spans (see `shardscope.runlog.clock`), aligned exactly between the ranks of a host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.runlog.clock import adopt, now, offset_text

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["align", "now"]
_KEY = "shardscope/clock"


def align(store: Store, rank: int) -> None:
    """Share rank 0's clock offset with all ranks on its host. Every rank of the group must call this once."""
    if rank == 0:
        store.set(_KEY, offset_text())
    else:
        adopt(store.get(_KEY))
