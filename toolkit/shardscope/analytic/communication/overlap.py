"""Overlap of communication with computation: the communication time that remains exposed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication.ring import Floats


def exposed_time(communication: npt.ArrayLike, overlappable: npt.ArrayLike) -> Floats:
    """Return the exposed communication time in seconds: max(0, communication - overlappable).

    Args:
        communication: Seconds of communication; a number or an array.
        overlappable: Seconds of computation that can run at the same time; a number or an array.
    """
    hidden = np.asarray(overlappable, dtype=np.float64)
    exposed: Floats = np.maximum(np.asarray(communication, dtype=np.float64) - hidden, 0.0)
    return exposed
