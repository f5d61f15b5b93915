"""Overlap of communication with computation: the exposed time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import Floats


def exposed_time(communication: npt.ArrayLike, overlappable: npt.ArrayLike) -> Floats:
    """Exposed communication time in seconds: max(0, communication - overlappable). Follows NumPy broadcasting.

    Args:
        communication: Seconds of communication.
        overlappable: Seconds of concurrent computation.
    """
    hidden = np.asarray(overlappable, dtype=np.float64)
    exposed: Floats = np.maximum(np.asarray(communication, dtype=np.float64) - hidden, 0.0)
    return exposed
