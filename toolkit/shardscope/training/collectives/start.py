"""What the ranks of one start under `torchrun` agree on, so that they find nothing of ranks that were started before.

An agent of torch 2.13 that starts its ranks again gives them the same store. There, a rank could find the address of a
peer that has ended, to which it cannot connect. The number of restarts does not tell starts apart: each agent counts
its own, and those that follow a change of nodes not at all.
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
        DistStoreError: Not all ranks came within `timeout`.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    return dist.PrefixStore(agreed_name(store, rank, world_size, timeout), store)


def agreed_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a new name that all ranks agree on, whatever earlier ranks have written to the store.

    Rank 0 makes the name. The others write what only they know under the newest name they find, until rank 0 of that
    name has read it, so it cannot be one that has ended.

    Raises:
        DistStoreError: Not all ranks came within `timeout`.
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
