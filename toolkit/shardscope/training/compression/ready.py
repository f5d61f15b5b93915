"""Loads numba on import. The launch server imports this once for all ranks, before the first compressed run.

Importing numba and initialising its compiler takes a core most of a second. Without the server, from which the ranks
are forked, every rank of every compressed run would pay for it. Nothing happens if numba is not installed, or if
codecs are set to run without it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os

from shardscope.training.compression.route import VARIABLE


def load() -> bool:
    """Load numba and return whether it is ready."""
    if not importlib.util.find_spec("numba") or os.environ.get(VARIABLE) == "torch":
        return False
    with contextlib.suppress(
        Exception
    ):  # the run reports any failure; the server must continue to serve others
        import numba

        from shardscope.training.compression import loops  # noqa: F401

        numba.njit("int64(int64)")(lambda number: number)  # the first compilation loads the compiler
        return True
    return False


IS_READY = load()
