"""Compiled loops where numba is installed, plain torch elsewhere; both make bit-identical packets.

Packing is a few arithmetic operations per number. torch makes one pass over memory for each operation; a single loop
that keeps a block in the cache is several times faster. numba (the extra ``fast``) compiles these loops to machine code
on first use, which takes one core one to three seconds per method, and caches them on disk. Loading numba and the loops
takes a second and about 50 MB, which the launch server spends once for all ranks (`ready`). Compiled loops release the
GIL, so packing on the sending thread does not slow the backward pass. A run's start event reports which route ran.
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
"""Environment variable; set it to ``torch`` to avoid numba where it is installed."""
ROUTES = ("numba", "torch")


def choose_route() -> str:
    """Return ``"numba"`` or ``"torch"``, as the environment variable requests or as installed.

    Raises:
        SpecError: The variable holds another value, or requests numba where it is not installed.
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
    """Compile a loop over NumPy arrays to machine code on the first call; later starts load it from disk.

    It is cached next to the source, or in the user's cache directory if that cannot be written, or nowhere.
    """
    import numba

    settings: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        fast: Callable[..., Any] = numba.njit(cache=True, **settings)(loop)
    except RuntimeError:  # no directory is writable: numba then refuses to cache
        fast = numba.njit(**settings)(loop)
    return fast


def inlined(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a helper that is inlined into each compiled loop."""
    import numba

    fast: Callable[..., Any] = numba.njit(forceinline=True, nogil=True, error_model="numpy")(helper)
    return fast


def share_out(loop: Callable[..., None], arguments: Sequence[Any], *, count: int, at_least: int) -> None:
    """Run ``loop(*arguments, first, stop)`` over parts of ``range(count)``, on up to torch's number of threads.

    Args:
        loop: Must release the GIL.
        arguments: Leading arguments of the loop.
        count: Number of items to process.
        at_least: Minimum number of items per part; below it, another thread is not worth starting.
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
