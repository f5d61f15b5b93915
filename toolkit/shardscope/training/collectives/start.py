"""A unique name for each start of ranks under `torchrun`, so that they do not read store keys of earlier ranks.

An agent of torch 2.13 that restarts its ranks gives them the same store. There, a rank could find the address of a peer
that has ended, to which it cannot connect. The number of restarts does not identify a start: each agent counts its own
restarts, and does not count restarts that follow a change of nodes.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_POLL_S = 0.005


def store_of_this_start(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store at `MASTER_ADDR` and `MASTER_PORT`, under keys that only the ranks of this start use.

    Raises:
        DistStoreError: Not all ranks joined within `timeout`.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    return dist.PrefixStore(agreed_name(store, rank, world_size, timeout), store)


def agreed_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a new name that all ranks agree on, whatever earlier ranks have written to the store.

    Rank 0 creates the name. Each other rank writes a unique value under the newest name that it finds, until the rank 0
    behind that name has read the value, which proves that this rank 0 has not ended.

    Raises:
        DistStoreError: Not all ranks joined within `timeout`.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        answers = [f"{own}/{other}" for other in range(1, world_size)]
        store.set("newest start", own)
        store.wait(answers, timeout)
        store.set(f"{own}/all", ",".join(store.get(answer).decode() for answer in answers))
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get("newest start").decode()
        store.set(f"{name}/{rank}", own)
        if store.check([f"{name}/all"]) and own in store.get(f"{name}/all").decode():
            return name
        time.sleep(_POLL_S)
    raise dist.DistStoreError(
        f"rank {rank} has waited {timeout.total_seconds():g} s for rank 0 and the others to start"
    )
