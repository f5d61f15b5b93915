"""Compiled loops where numba is installed, plain torch elsewhere: the same packets, to the bit, from both.

Packing is a few arithmetic operations a number. torch runs them as as many passes over memory; one loop that keeps a
block in the cache is several times faster. numba (the extra ``fast``) compiles such loops to machine code on first
use and keeps them on disk. Compiled loops release the interpreter's lock, so that packing on the thread that sends
leaves the backward pass alone. A run's start event says which of the two ran.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from shardscope.errors import SpecError

VARIABLE = "SHARDSCOPE_CODECS"
"""Set it to ``torch`` to do without numba where it is installed."""
ROUTES = ("numba", "torch")


def choose_route() -> str:
    """``"numba"`` or ``"torch"``, as installed or as asked for by the environment.

    Raises:
        SpecError: The environment asks for something else, or for numba where there is none.
    """
    asked = os.environ.get(VARIABLE)
    installed = importlib.util.find_spec("numba") is not None
    if asked is None:
        return "numba" if installed else "torch"
    if asked not in ROUTES:
        raise SpecError(f"{VARIABLE}={asked!r} is not a way to run codecs; use {' or '.join(ROUTES)}")
    if asked == "numba" and not installed:
        raise SpecError(
            f"{VARIABLE}='numba', but numba is not installed; install shardscope[fast], or use 'torch'"
        )
    return asked


def compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    """A loop over NumPy arrays as machine code; compiled on the first call, from disk on later starts."""
    import numba

    fast: Callable[..., Any] = numba.njit(nogil=True, cache=True, boundscheck=False)(loop)
    return fast
