"""Compiled loops where numba is installed, plain torch elsewhere: the same packets, to the bit, from both.

Packing is a few arithmetic operations a number. torch runs them as as many passes over memory; one loop that keeps a
block in the cache is several times faster. numba (the extra ``fast``) compiles such loops to machine code on first
use, one to three seconds of a core a method, and keeps them on disk; to load numba and them takes a second and some 50
MB, which the launch server spends once for all ranks (`ready`). Compiled loops release the interpreter's lock, so that
packing on the thread that sends leaves the backward pass alone. A run's start event says which of the two ran.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

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
    """A loop over NumPy arrays as machine code; compiled on the first call, from disk on later starts.

    It is kept beside the source, or in the user's cache directory where that cannot be written, or nowhere.
    """
    import numba

    settings: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        fast: Callable[..., Any] = numba.njit(cache=True, **settings)(loop)
    except RuntimeError:  # no directory can be written: numba then refuses to keep anything
        fast = numba.njit(**settings)(loop)
    return fast


def inlined(helper: Callable[..., Any]) -> Callable[..., Any]:
    """A helper of compiled loops that becomes part of each of them."""
    import numba

    fast: Callable[..., Any] = numba.njit(forceinline=True, nogil=True, error_model="numpy")(helper)
    return fast


def share_out(loop: Callable[..., None], arguments: Sequence[Any], *, count: int, at_least: int) -> None:
    """Run ``loop(*arguments, first, stop)`` over parts of ``range(count)``, on as many threads as torch computes with.

    Args:
        loop: Must release the interpreter's lock.
        arguments: For it.
        count: Of what is worked through.
        at_least: Fewest elements per part for which starting another thread pays.
    """
    parts = max(1, min(torch.get_num_threads(), count // at_least))
    bounds = [count * i // parts for i in range(parts + 1)]
    if parts == 1:
        loop(*arguments, 0, count)
        return
    others = [_threads(parts - 1).submit(loop, *arguments, *part) for part in itertools.pairwise(bounds[1:])]
    loop(*arguments, 0, bounds[1])
    for other in others:
        other.result()


@cache
def _pool(process: int, size: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a fork leaves threads behind
    return ThreadPoolExecutor(size, thread_name_prefix="codec")


def _threads(size: int) -> ThreadPoolExecutor:
    return _pool(os.getpid(), size)
