"""Failures and checkpoints: mean time between failures, optimal checkpoint intervals and expected goodput.

Devices fail independently and at a constant rate, so times between failures are exponentially distributed. A job fails
when any of its devices fails, and then restarts from the newest complete checkpoint::

    step step step | save | step step step | save | step ✗  restart | step step step | save | ...
    └── interval ──┘                        └───┘       └─────────┘
                                           save_s        restart_s

    mtbf = job_mtbf_s(LLAMA_3_DEVICE_MTBF_S, devices=16384)
    interval = daly_interval_s(save_s=10, mtbf_s=mtbf)
    found = expected(mtbf_s=mtbf, save_s=10, restart_s=300)     found.goodput, found.lost_s, found.interval_s

All times are in seconds. All functions accept arrays, which are broadcast against each other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.large_batch.scaling import positive
from shardscope.errors import SpecError
from shardscope.spec.checkpoint import daly_interval

__all__ = [
    "LLAMA_3_DEVICE_MTBF_S",
    "Reliability",
    "daly_interval_s",
    "expected",
    "job_mtbf_s",
    "young_interval_s",
]

Floats = npt.NDArray[np.float64]

LLAMA_3_DEVICE_MTBF_S = 54 * 86400 * 16384 / 419
"""Mean time between failures of one H100 with its share of host and network, about 5.8 years: in 54 days, 16,384 of
them had 419 unexpected interruptions (Llama 3, arXiv 2407.21783, section 3.3.4)."""


class Reliability(NamedTuple):
    """Expected use of the time of a job that fails and restarts; see `expected`.

    For each second of useful training, the job takes ``1 / goodput`` seconds: one second of training,
    `saving_share` of saving checkpoints, `lost_share` of work lost to failures, and `restart_share` of restarting.
    """

    mtbf_s: Floats
    """Mean time between two failures of the job."""
    interval_s: Floats
    """Training time between two checkpoints."""
    save_s: Floats
    """Time for which saving a checkpoint delays training."""
    restart_s: Floats
    """Time from a failure to the first step after it."""
    goodput: Floats
    """Fraction of the time that is spent on training that is not lost to failures, from 0 to 1."""
    lost_s: Floats
    """Mean time of training and saving that is lost in one failure."""
    saving_share: Floats
    """Seconds spent on saving complete checkpoints per second of useful training."""
    lost_share: Floats
    """Seconds of lost work per second of useful training."""
    restart_share: Floats
    """Seconds of restarting per second of useful training."""

    @property
    def failures_per_day(self) -> Floats:
        """Mean number of failures in a day."""
        return np.asarray(86400 / self.mtbf_s)


def job_mtbf_s(device_mtbf_s: npt.ArrayLike, *, devices: npt.ArrayLike) -> Floats:
    """Return the mean time between failures of a job, any of whose devices may fail, in seconds.

    Failure rates add up, so this is the time of one device divided by the number of devices.

    Args:
        device_mtbf_s: Mean time between failures of one device, with its share of host and network, in seconds.
        devices: Number of devices.

    Raises:
        SpecError: A value is not above 0.

    Example:
        >>> round(float(job_mtbf_s(LLAMA_3_DEVICE_MTBF_S, devices=16384)) / 3600, 2)  # hours
        3.09
    """
    return np.asarray(positive("device_mtbf_s", device_mtbf_s) / positive("devices", devices), np.float64)


def young_interval_s(*, save_s: npt.ArrayLike, mtbf_s: npt.ArrayLike) -> Floats:
    """Return the optimal training time between two checkpoints to first order, in seconds.

    It is sqrt(2 δ M) for checkpoints that take δ and a mean time M between failures (Young 1974, A first order
    approximation to the optimum checkpoint interval, Communications of the ACM 17(9)).

    Args:
        save_s: δ, the time for which saving a checkpoint delays training.
        mtbf_s: M, the mean time between failures.

    Raises:
        SpecError: A time is not above 0.

    Example:
        >>> float(young_interval_s(save_s=10, mtbf_s=7200)).__round__(1)
        379.5
    """
    return np.asarray(np.sqrt(2 * positive("save_s", save_s) * positive("mtbf_s", mtbf_s)), np.float64)


def daly_interval_s(*, save_s: npt.ArrayLike, mtbf_s: npt.ArrayLike) -> Floats:
    """Return the optimal training time between two checkpoints to higher order, in seconds.

    For δ < 2 M, it is sqrt(2 δ M) (1 + sqrt(δ / 2M) / 3 + δ / 18M) - δ, and otherwise M (Daly 2006, A higher order
    estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3), equation
    37). It depends neither on the restart time nor on the time until a checkpoint written in the background is
    complete.

    Args:
        save_s: δ, the time for which saving a checkpoint delays training.
        mtbf_s: M, the mean time between failures.

    Raises:
        SpecError: A time is not above 0.

    Example:
        >>> float(daly_interval_s(save_s=10, mtbf_s=7200)).__round__(1)
        372.8
    """
    return np.asarray(daly_interval(positive("save_s", save_s), positive("mtbf_s", mtbf_s)), np.float64)


def expected(
    *,
    mtbf_s: npt.ArrayLike,
    save_s: npt.ArrayLike,
    restart_s: npt.ArrayLike = 0.0,
    interval_s: npt.ArrayLike | None = None,
    write_s: npt.ArrayLike = 0.0,
) -> Reliability:
    """Return the expected goodput of a job that fails and restarts from its checkpoints, with a breakdown of the time.

    A job that has restarted runs for an exponentially distributed time U of mean M. Its k-th checkpoint is complete
    k (τ + δ) + w after the restart, so a failure leaves on average N = Σ P(U > k (τ + δ) + w) complete intervals, or
    exp(-w / M) / (exp((τ + δ) / M) - 1). A restart, which may fail as well, takes M (exp(R / M) - 1). So a second of
    useful training takes M exp(R / M) / (τ N) seconds. Without w, this is the complete model of Daly 2006 (Future
    Generation Computer Systems 22(3), equation 20).

    Args:
        mtbf_s: M, the mean time between failures of the job.
        save_s: δ, the time for which saving a checkpoint delays training. 0 or more.
        restart_s: R, the time from a failure to the first step after it. 0 or more.
        interval_s: τ, the training time between two checkpoints; None for `daly_interval_s`.
        write_s: w, the additional time until a checkpoint that is written in the background is complete. 0 or more.

    Raises:
        SpecError: A time is negative, or `mtbf_s` or `interval_s` is 0; without `interval_s`, `save_s` must not be 0.

    Example:
        >>> found = expected(mtbf_s=3 * 3600, save_s=20, restart_s=600)
        >>> round(float(found.goodput), 3), round(float(found.interval_s))
        (0.89, 644)
    """
    if interval_s is None:
        interval_s = daly_interval_s(save_s=save_s, mtbf_s=mtbf_s)
    mtbf, interval = positive("mtbf_s", mtbf_s), positive("interval_s", interval_s)
    save, restart, write = (
        not_negative(name, value)
        for name, value in (("save_s", save_s), ("restart_s", restart_s), ("write_s", write_s))
    )
    mtbf, interval, save, restart, write = np.broadcast_arrays(mtbf, interval, save, restart, write)
    with np.errstate(
        over="ignore"
    ):  # infinite where failures are so frequent that no checkpoint is ever complete
        intervals = np.exp(-write / mtbf) / np.expm1(
            (interval + save) / mtbf
        )  # complete intervals between two failures
        useful = interval * intervals
        restarting = mtbf * np.expm1(restart / mtbf)
        goodput = useful / (mtbf + restarting)
    lost = mtbf - (interval + save) * intervals
    with np.errstate(divide="ignore", invalid="ignore"):
        restart_share = np.where(
            restarting == 0, 0.0, restarting / useful
        )  # also if nothing useful is done: 0 / 0
        shares = [save / interval, lost / useful, restart_share]
    return Reliability(*map(np.asarray, (mtbf, interval, save, restart, goodput, lost, *shares)))


def not_negative(name: str, values: npt.ArrayLike) -> Floats:
    """Return values as an array; raise `SpecError` if a value is negative."""
    found = np.asarray(values, np.float64)
    if not (found >= 0).all():
        raise SpecError(f"{name}={values!r} must be 0 or more")
    return found
