"""Loads numba when this module is imported, as the launch server does before the first compressed run.

Importing numba and initialising its compiler takes most of a second on one core. The ranks are forked from the launch
server, so that none of them has to load numba again. Nothing is loaded if numba is not installed, or if the environment
variable ``SHARDSCOPE_CODECS`` is ``torch``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os

from shardscope.training.compression.route import VARIABLE


def load() -> bool:
    """Load numba and its compiler if compiled loops are to be used; return whether they were loaded."""
    if not importlib.util.find_spec("numba") or os.environ.get(VARIABLE) == "torch":
        return False
    with contextlib.suppress(
        Exception
    ):  # a failure will be reported by the run that uses numba; the launch server must not stop here
        import numba

        from shardscope.training.compression import loops  # noqa: F401

        numba.njit("int64(int64)")(lambda number: number)  # the first compilation loads the compiler
        return True
    return False


IS_READY = load()
