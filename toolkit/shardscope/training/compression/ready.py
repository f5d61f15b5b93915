"""Imported to have numba ready: by the launch server before the first run that compresses, once for all ranks.

To import numba and have it learn what it knows of Python takes most of a second of a core, and would in every rank of
every run that compresses; the ranks are forked from the server. Nothing happens where there is no numba, or where
codecs are to do without.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os

from shardscope.training.compression.route import VARIABLE


def load() -> bool:
    """Whether it is ready now."""
    if not importlib.util.find_spec("numba") or os.environ.get(VARIABLE) == "torch":
        return False
    with contextlib.suppress(Exception):  # whatever ails it: the run says so, and the server serves others
        import numba

        from shardscope.training.compression import loops  # noqa: F401

        numba.njit("int64(int64)")(lambda number: number)  # the first one that it compiles loads its compiler
        return True
    return False


IS_READY = load()
