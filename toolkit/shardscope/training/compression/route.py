"""Chooses whether codecs run loops compiled by numba or plain torch; both write bitwise identical packets.

Packing takes a few arithmetic operations per number. torch makes one pass over memory for each operation; a compiled
loop that does all operations while a block is in the cache is several times faster. numba (the extra ``fast``) compiles
the loops on first use, in one to three seconds per method on one core, and caches them on disk. Loading numba and the
loops takes a second and about 50 MB of memory; the launch server does it once for all ranks (`ready`). Compiled loops
release the GIL, so packing on the sending thread does not slow the backward pass. A run's start event reports which
version it used.

The compiled loop of LAMB follows the same choice; its results differ from those in plain torch by rounding errors.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from shardscope.errors import SpecError

VARIABLE = "SHARDSCOPE_CODECS"
"""Environment variable; set it to ``torch`` to use plain torch even if numba is installed."""
ROUTES = ("numba", "torch")


def choose_route() -> str:
    """Return the value of ``SHARDSCOPE_CODECS``; if it is not set, ``"numba"`` if that is installed, else ``"torch"``.

    Raises:
        SpecError: The variable has an unknown value, or is ``"numba"`` although numba is not installed.
    """
    asked = os.environ.get(VARIABLE)
    installed = importlib.util.find_spec("numba") is not None
    if asked is None:
        return "numba" if installed else "torch"
    if asked not in ROUTES:
        raise SpecError(
            f"the environment variable {VARIABLE}={asked!r} is not valid; use {' or '.join(ROUTES)}"
        )
    if asked == "numba" and not installed:
        raise SpecError(
            f"{VARIABLE}='numba', but numba is not installed; run pip install numba, or set {VARIABLE}=torch"
        )
    return asked


def compiled(loop: Callable[..., Any], *, fastmath: Collection[str] = frozenset()) -> Callable[..., Any]:
    """Compile a loop over NumPy arrays to machine code on its first call; later processes load it from a disk cache.

    The cache is next to the source file or, if that folder is read-only, in the user's cache directory. If neither can
    be written, the loop is compiled again in each process.

    Args:
        loop: The loop.
        fastmath: LLVM's fast-math flags for the loop, such as ``reassoc``; some flags make results depend on the
            machine.
    """
    import numba

    settings: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    if fastmath:
        settings["fastmath"] = set(fastmath)
    try:
        fast: Callable[..., Any] = numba.njit(cache=True, **settings)(loop)
    except RuntimeError:  # no directory is writable: numba then refuses to cache
        fast = numba.njit(**settings)(loop)
    return fast


def inlined(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper function so that it is inlined into each compiled loop that calls it."""
    import numba

    fast: Callable[..., Any] = numba.njit(forceinline=True, nogil=True, error_model="numpy")(helper)
    return fast


def share_out(loop: Callable[..., None], arguments: Sequence[Any], *, count: int, at_least: int) -> None:
    """Run ``loop(*arguments, first, stop)`` over parts of ``range(count)``, on at most as many threads as torch uses.

    Args:
        loop: The loop; must release the GIL.
        arguments: Leading arguments of the loop.
        count: Number of items to process.
        at_least: Minimum number of items per thread; with fewer, another thread is not worth starting.
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
def _pool(process: int, size: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked process does not inherit threads
    return ThreadPoolExecutor(size, thread_name_prefix="codec")


def _threads(size: int) -> ThreadPoolExecutor:
    return _pool(os.getpid(), size)
