"""Compute speed of this machine, from two NumPy kernels that are timed once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

_SIDE = 256
_ELEMENTS = 1 << 20
_REPEATS = 15


class CoreSpeed(NamedTuple):
    """Speed of one core."""

    flops: float
    """FLOP/s of matrix products in float32."""
    bandwidth: float
    """Bytes per second read and written when a constant is added to 4 MB."""


@cache
def core_speed() -> CoreSpeed:
    """Speed of one core of this machine; measuring takes about 20 ms, once per process.

    The fastest of several repeats counts: other load makes kernels slower, never faster.
    """
    with threadpool_limits(1):
        a = np.random.default_rng(0).random((_SIDE, _SIDE), dtype=np.float32)
        product = np.empty_like(a)
        values = np.zeros(_ELEMENTS, dtype=np.float32)
        total = np.empty_like(values)
        products_s = _best(lambda: np.matmul(a, a, out=product))
        sums_s = _best(lambda: np.add(values, 1.0, out=total))
    return CoreSpeed(2.0 * _SIDE**3 / products_s, 2.0 * values.nbytes / sums_s)


def _best(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS):
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return min(times)
