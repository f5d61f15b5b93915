"""The speed of one core of this machine, by timing two NumPy kernels."""

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
    """FLOP/s of float32 matrix products."""
    bandwidth: float
    """Memory bandwidth in bytes per second, reads plus writes, measured by adding a constant to a 4 MB array."""


@cache
def core_speed() -> CoreSpeed:
    """Return the speed of one core of this machine; the first call in a process measures it, which takes about 20 ms.

    The fastest of several repeats is used, because other load makes kernels slower, never faster.
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
