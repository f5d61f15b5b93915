"""Predicted parts of a step as a function of the constants, taken from the formulas of `prediction.job_time`.

Each part is a sum of terms, and each term is a count (of FLOP, bytes, operations, messages) times one constant or
divided by one constant. The count is the value of the part if this constant is 1 and all other constants cost nothing.
A constant that depends on the number of ranks is interpolated between measured numbers of ranks, so its logarithm is a
weighted sum of the logarithms of the *knots*. If x contains the logarithms of all knots, a part is the sum of
``count · exp(weights · x)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardscope.analytic.terms import Term
from shardscope.calibration.constants import CONSTANTS, NOT_FITTED
from shardscope.calibration.host_calibration import HostCalibration, knot_shares
from shardscope.machine import usable_cores
from shardscope.measure.calibrate.observed import PARTS, part_sums
from shardscope.prediction.job import JobPrediction
from shardscope.prediction.job_time import job_time_term
from shardscope.prediction.rates import (
    FREE,
    active_ranks,
    is_limited_by_link,
    limit_of,
    network_of,
    shared_slowdown,
    stated_rates,
    transport_of,
)

Floats = NDArray[np.float64]
Knot = tuple[str, int | None, str | None]
"""Name of a constant, number of ranks and transport; None where the constant does not depend on them."""
_TINY = 1e-29
"""Times below this, in seconds, count as 0."""
_SLEEPING = FREE._replace(emulated_flops=inf)
"""`FREE` for ranks on emulated processors, whose passes take a known time."""
_UPDATING = ("optimizer_bandwidth", "tensor_s")
_COMPUTING = ("flops", "bandwidth", "operation_s", "optimizer_bandwidth", "tensor_s", "codec_bandwidth")
"""Constants whose times are multiplied by the slowdown of ranks that share cores."""
_FIELDS = {"message_bandwidth": "link", "link_efficiency": "link"}
"""Fields of `RankRates` whose names differ from the names of the constants."""


class Counts(NamedTuple):
    """Counts of one run by part and constant, and weights of the knots by constant."""

    counts: Floats
    """Shape `(parts, constants)`."""
    weights: Floats
    """Shape `(constants, knots)`; negative for rates, by which counts are divided."""


class Design:
    """The predicted parts of several runs as a function of the logarithms of the knots.

    Attributes:
        knots: The constants to fit.
        counts: Counts by run, part and constant.
        weights: Weights by run, constant and knot.
    """

    def __init__(self, predictions: Sequence[JobPrediction], knots: Sequence[Knot]) -> None:
        self.knots = tuple(knots)
        rows = [counts_of(prediction, self.knots) for prediction in predictions]
        self.counts = np.stack([row.counts for row in rows])
        self.weights = np.stack([row.weights for row in rows])

    def parts(self, x: Floats) -> tuple[Floats, Floats]:
        """Return the seconds of each part, shape `(runs, parts)`, and their derivatives, `(runs, parts, knots)`."""
        terms = self.counts * np.exp(self.weights @ x)[:, None, :]
        return terms.sum(axis=2), terms @ self.weights


def knots_of(predictions: Iterable[JobPrediction]) -> list[Knot]:
    """Return the constants on which the step times of these jobs depend, at the jobs' numbers of ranks."""
    known: dict[Knot, None] = {}
    for prediction in predictions:
        ranks = prediction.job.world_size
        for name in terms_of(prediction):
            needs = CONSTANTS[name].needs
            known.setdefault((name, ranks if "ranks" in needs else None, _transport(prediction, name)))
        if ranks > 1 and not _node_slowdown(prediction):
            known.setdefault(("slowdown", ranks, None))
    return list(known)


def terms_of(prediction: JobPrediction) -> list[str]:
    """Return the constants that appear in some part of this job's step time."""
    names = [name for name in CONSTANTS if name not in ("slowdown", *NOT_FITTED)]
    return [name for name in names if _count(prediction, name).any()]


def counts_of(prediction: JobPrediction, knots: Sequence[Knot]) -> Counts:
    """Return the counts of a job's step, and the weights of the knots.

    The first constant is 1 second: its counts are known times, such as the latency of an emulated link.
    """
    names = terms_of(prediction)
    every = [name for name in CONSTANTS if name in {knot[0] for knot in knots} and name != "slowdown"]
    counts, weights = np.zeros((len(PARTS), 1 + len(every))), np.zeros((1 + len(every), len(knots)))
    stated = stated_rates(prediction.emulated, limit_of(prediction.job, prediction.emulated))
    counts[:, 0] = _seconds(job_time_term(prediction.step, prediction.found, prediction.traffic, stated))
    for column, name in enumerate(every, start=1):
        if name in names:
            counts[:, column] = _count(prediction, name)
            weights[column] = _weights(prediction, name, knots)
    return Counts(counts, weights)


def _count(prediction: JobPrediction, name: str) -> Floats:
    """Return the seconds of each part if this constant is 1 and all other constants cost nothing."""
    emulated = prediction.emulated
    limit = limit_of(prediction.job, emulated)
    if emulated is not None and emulated.memory_bandwidth is not None and name in _UPDATING:
        return np.zeros(len(PARTS))
    by_link = _is_limited_by_link(prediction)
    if name in _FIELDS and (name == "link_efficiency") != by_link:
        return np.zeros(len(PARTS))  # the slower of link and memory sets the rate
    value = limit.bandwidth if limit is not None and by_link and name in _FIELDS else 1.0
    if name == "flops":
        value = float(min(prediction.job.threads, usable_cores()))
    if name in _COMPUTING and (slow := _node_slowdown(prediction)):
        value *= slow if CONSTANTS[name].unit == "s" else 1.0 / slow
    changed: dict[str, Any] = {_FIELDS.get(name, name): value}
    if name in _FIELDS:
        changed["network"] = (
            network_of(emulated) if by_link else network_of(emulated, efficiency=inf, memory=1.0)
        )
    rates = (FREE if emulated is None or emulated.flops is None else _SLEEPING)._replace(**changed)
    return _seconds(job_time_term(prediction.step, prediction.found, prediction.traffic, rates))


def _host(prediction: JobPrediction) -> HostCalibration:
    assert prediction.host is not None
    return prediction.host


def _transport(prediction: JobPrediction, name: str) -> str | None:
    """Return the transport whose value of this constant a job uses; None if the constant is the same for all."""
    if "transport" not in CONSTANTS[name].needs:
        return None
    over = transport_of(prediction.job, prediction.emulated)
    return "tcp" if (name, over) == ("message_bandwidth", "network") else over


def _is_limited_by_link(prediction: JobPrediction) -> bool:
    """Whether an emulated link limits the rate of messages, according to the prediction's own calibration."""
    emulated = prediction.emulated
    if emulated is None:
        return False
    return is_limited_by_link(prediction.job, _host(prediction), prediction.rates.link, emulated)


def _node_slowdown(prediction: JobPrediction) -> float | None:
    """Return the slowdown of the slowest emulated node; None if ranks that share cores are slower anyway."""
    if prediction.emulated is None:
        return None
    active = active_ranks(prediction.job.strategy.work(prediction.step.alike))
    slow = prediction.emulated.slowdown
    return slow if slow > shared_slowdown(_host(prediction), active, usable_cores()) else None


def _seconds(time: Term) -> Floats:
    sums = part_sums({part.name: part.value for part in time.parts})
    rest = time.value - sum(sums.values())
    found = np.array([*(sums.get(name, 0.0) for name in PARTS[:-1]), rest])
    return np.where(found < _TINY, 0.0, found)


def _weights(prediction: JobPrediction, name: str, knots: Sequence[Knot]) -> Floats:
    sign = 1.0 if CONSTANTS[name].unit == "s" else -1.0
    found = sign * _shares(name, prediction.job.world_size, _transport(prediction, name), knots)
    if name in _COMPUTING and not _node_slowdown(prediction):
        found += _shares(
            "slowdown", active_ranks(prediction.job.strategy.work(prediction.step.alike)), None, knots
        )
    return found


def _shares(name: str, ranks: float, transport: str | None, knots: Sequence[Knot]) -> Floats:
    """Return the weights of a constant's knots at a number of ranks; the slowdown of a single rank is 1."""
    mine = sorted(
        (size or 1, place)
        for place, (known, size, over) in enumerate(knots)
        if (known, over) == (name, transport)
    )
    found = np.zeros(len(knots))
    if not mine:
        return found
    sizes = [size for size, _ in mine]
    if name == "slowdown":
        sizes = [1, *sizes]
    shares = knot_shares(max(1.0, ranks), sizes)
    for share, (_, place) in zip(shares[-len(mine) :], mine, strict=True):
        found[place] = share
    return found
