"""Communication behind computation: what of it is left to wait for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import Floats


def exposed_time(communication: npt.ArrayLike, overlappable: npt.ArrayLike) -> Floats:
    """Seconds of communication that nothing hides: max(0, communication - overlappable). Broadcasts.

    Args:
        communication: Seconds.
        overlappable: Seconds of computation that go on meanwhile.
    """
    hidden = np.asarray(overlappable, dtype=np.float64)
    exposed: Floats = np.maximum(np.asarray(communication, dtype=np.float64) - hidden, 0.0)
    return exposed
