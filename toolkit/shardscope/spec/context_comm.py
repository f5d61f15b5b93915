"""How the attention of context-parallel ranks communicates, and how sequences are divided for it."""

from __future__ import annotations

from typing import Literal

ContextComm = Literal["all-gather", "ring", "ulysses"]
"""``all-gather`` of keys and values, keys and values around a ``ring``, or Ulysses' all-to-all, which divides heads.

Megatron's ``--cp-comm-type`` calls them ``all_gather``, ``p2p`` and ``a2a``."""


def parts_per_rank(comm: ContextComm) -> int:
    """Return how many parts of each sequence a rank has: an early and a late one, or one if heads are divided."""
    return 1 if comm == "ulysses" else 2
