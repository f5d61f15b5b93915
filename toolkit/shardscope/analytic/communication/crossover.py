"""Crossovers, at which a different collective algorithm becomes the fastest, and scaling efficiency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.communication._checks import numbers
from shardscope.analytic.communication.collective import collective_time
from shardscope.analytic.communication.overlap import exposed_time
from shardscope.analytic.communication.ring import Floats
from shardscope.errors import SpecError, unknown_name

Contender = str | tuple[str, Mapping[str, Any]]
"""Name of an algorithm, or a pair of its name and its options."""
RANGES = {"num_bytes": (1.0, 1e12), "bandwidth": (1e6, 1e13), "workers": (2, 4096)}
"""Default range of each quantity that `crossover` can vary, in bytes, bytes per second and workers."""
POINTS = 800
"""Number of values in the grid on which `frontier` looks for crossovers."""


class Crossing(NamedTuple):
    """A point at which the fastest algorithm changes, as some quantity is varied."""

    value: float
    """Value of the varied quantity; for workers, the smallest number at which `above` is faster."""
    below: str
    """Name of the fastest algorithm just below `value`."""
    above: str
    """Name of the fastest algorithm from `value` on."""
    seconds: float
    """Time of `above` at `value`, in seconds."""


def crossover(
    algorithm_a: Contender,
    algorithm_b: Contender,
    *,
    over: Literal["num_bytes", "workers", "bandwidth"],
    **how: Any,
) -> tuple[Crossing, ...]:
    """Return all points at which one of two algorithms becomes faster than the other, in ascending order.

    Args:
        algorithm_a: A name, or a name and options, such as ``("hierarchical", {"per_node": 8})``.
        algorithm_b: The other algorithm.
        over: Quantity to vary.
        how: The other arguments of `frontier`, and the fixed arguments of `collective_time`.

    Example:
        >>> link = {"bandwidth": 12.5e9, "latency": 5e-6}
        >>> [round(found.value) for found in crossover("tree", "ring", over="num_bytes", workers=64, **link)]
        [710280]
    """
    return frontier((algorithm_a, algorithm_b), over=over, **how)


def frontier(
    algorithms: Sequence[Contender],
    *,
    over: Literal["num_bytes", "workers", "bandwidth"],
    op: str = "all_reduce",
    low: float | None = None,
    high: float | None = None,
    points: npt.ArrayLike | None = None,
    **fixed: Any,
) -> tuple[Crossing, ...]:
    """Return all points from `low` to `high` at which the fastest of several algorithms changes, in ascending order.

    Changes are located on a logarithmic grid of `POINTS` values, and then refined to machine precision. If `over` is
    ``"workers"``, every integer is tried instead. If two algorithms take equally long, the one that was fastest at the
    previous value counts as the fastest. An algorithm that is fastest only between two neighbouring grid values is not
    found.

    Args:
        algorithms: Names, or pairs of a name and options.
        over: Quantity to vary.
        op: Collective operation, as for `collective_time`.
        low: Lower end of the range; None for the default in `RANGES`.
        high: Upper end of the range; None for the default in `RANGES`.
        points: Values to try instead of the grid, in ascending order, for example multiples of 8 workers.
        fixed: The other arguments of `collective_time`: `num_bytes`, `workers`, `bandwidth`, `latency`, ...

    Raises:
        SpecError: `over` or an algorithm is unknown, an argument of `collective_time` is invalid, or `low` is not
            between 0 and `high`.
    """
    if over not in RANGES:
        raise unknown_name("over", over, RANGES)
    ends = zip((low, high), RANGES[over], strict=True)
    first, last = (own if given is None else given for given, own in ends)
    if not 0 < first < last:
        raise SpecError(
            f"low={first:g} is not between 0 and high={last:g}; give a smaller low or a larger high"
        )
    is_whole = over == "workers"
    grid = np.arange(first, last + 1) if is_whole else np.geomspace(first, last, POINTS)
    race = _race(op, algorithms, over, fixed)
    return tuple(race.changes(grid if points is None else np.asarray(points, dtype=np.float64), is_whole))


class _Race(NamedTuple):
    """Algorithms to compare, and functions for their times."""

    names: list[str]
    seconds: list[Callable[[Floats], Floats]]
    """For each algorithm, a function from values of the varied quantity to times in seconds."""

    def changes(self, grid: Floats, is_whole: bool) -> list[Crossing]:
        """Return the points of the grid at which the fastest algorithm changes, refined unless values are integers."""
        leaders = _leaders(np.array([seconds(grid) for seconds in self.seconds]))
        found = []
        for left in np.flatnonzero(np.diff(leaders)):
            pair = leaders[left], leaders[left + 1]
            value = grid[left + 1] if is_whole else self._narrow(grid[left], grid[left + 1], *pair)
            took = float(self.seconds[pair[1]](value))
            found.append(Crossing(float(value), self.names[pair[0]], self.names[pair[1]], took))
        return found

    def _narrow(self, low: float, high: float, below: int, above: int) -> float:
        """Return the value between `low` and `high` at which algorithm `above` becomes faster than algorithm `below`.

        Each iteration replaces the interval with the part of it, on a grid of 65 values, that contains the change.
        """
        while high / low - 1 > 1e-13:
            values = np.geomspace(low, high, 65)
            ahead = self.seconds[above](values) < self.seconds[below](values)
            ahead[0], ahead[-1] = False, True
            place = int(np.argmax(ahead))
            if (values[place - 1], values[place]) == (low, high):
                break
            low, high = values[place - 1], values[place]
        return high


def _leaders(seconds: Floats) -> npt.NDArray[np.int64]:
    """Return the index of the fastest algorithm at each value; differences within rounding error are ignored."""
    fastest: npt.NDArray[np.int64] = np.argmin(seconds, axis=0)
    least = seconds.min(axis=0) * (1 + 1e-12)
    leader = int(fastest[0])
    for place, contender in enumerate(fastest):
        if seconds[leader, place] > least[place]:
            leader = int(contender)
        fastest[place] = leader
    return fastest


def _race(op: str, contenders: Sequence[Contender], over: str, fixed: dict[str, Any]) -> _Race:
    """Return the algorithms to compare, with functions of the quantity `over` for their times."""
    pairs = [(one, {}) if isinstance(one, str) else (one[0], dict(one[1])) for one in contenders]

    def seconds_of(name: str, own: dict[str, Any]) -> Callable[[Floats], Floats]:
        return lambda values: collective_time(op=op, algorithm=name, **(fixed | own | {over: values}))

    return _Race([name for name, _ in pairs], [seconds_of(name, own) for name, own in pairs])


def scaling_efficiency(
    *,
    compute_s: npt.ArrayLike,
    num_bytes: npt.ArrayLike,
    workers: npt.ArrayLike,
    algorithm: str,
    bandwidth: npt.ArrayLike,
    latency: npt.ArrayLike = 0.0,
    scaling: Literal["weak", "strong"] = "weak",
    overlap: npt.ArrayLike = 0.0,
    **options: Any,
) -> Any:
    """Return the fraction of the ideal speed-up that W workers reach if each step ends with an all-reduce of gradients.

    With weak scaling, the batch per worker is constant, and the efficiency is c / (c + e), where e is the exposed time
    of the all-reduce. With strong scaling, the global batch is constant, each worker computes for c/W seconds, and the
    efficiency is (c/W) / (c/W + e).

    Args:
        compute_s: c, compute time of a step on a single worker, in seconds.
        num_bytes: Bytes of all gradients.
        workers: W, the number of workers.
        algorithm: Algorithm of the all-reduce.
        bandwidth: Bytes per second of a worker's link, in one direction.
        latency: Seconds per message.
        scaling: ``"weak"`` or ``"strong"``.
        overlap: Fraction of a worker's computation, 0 to 1, that can hide communication, such as 2/3 for the backward
            pass.
        options: Further arguments of `collective_time`.

    Raises:
        SpecError: `scaling` or the algorithm is unknown, or a number is out of range.
    """
    if scaling not in {"weak", "strong"}:
        raise unknown_name("scaling", scaling, ("weak", "strong"))
    alone = numbers("compute_s", compute_s, least=0, unit="seconds", is_open=True)
    share = numbers("overlap", overlap, least=0, unit="at most 1")
    if (share > 1).any():
        raise SpecError(f"overlap={share.max():g} is out of range; give a fraction of computation, 0 to 1")
    link = {"num_bytes": num_bytes, "workers": workers, "bandwidth": bandwidth, "latency": latency}
    communication = collective_time(op="all_reduce", algorithm=algorithm, **link, **options)
    computing = alone / np.asarray(workers) if scaling == "strong" else alone
    return (computing / (computing + exposed_time(communication, share * computing)))[()]
