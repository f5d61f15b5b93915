"""Callables timed against each other in one run: interleaved, so that a busy moment of the machine meets them all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """What one callable took over all rounds."""

    name: str
    median_ms: float
    ratio: float
    """Median of the ratios to the baseline of the same round."""


def compare(
    callables: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    baseline: str,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every callable once a round and print medians and ratios to the baseline.

    `clock` may be `time.process_time` for what runs in this process alone: seconds that it had a core for.

    Example:
        >>> _ = compare({"sum": lambda: sum(range(10**5)), "nothing": lambda: None}, rounds=3, baseline="sum")
    """
    for _ in range(warm_up):
        for call in callables.values():
            call()
    seconds = _interleaved(callables, rounds, clock)
    timings = {
        name: Timing(name, 1e3 * statistics.median(times), _median_ratio(times, seconds[baseline]))
        for name, times in seconds.items()
    }
    width = max(len(name) for name in timings)
    for timing in timings.values():
        print(f"{timing.name:<{width}}  {timing.median_ms:9.3f} ms  {timing.ratio:6.2f} x {baseline}")
    return timings


def _interleaved(
    callables: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in callables}
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in callables.items():
                start = clock()
                call()
                seconds[name].append(clock() - start)
    finally:
        gc.enable()
    return seconds


def _median_ratio(times: list[float], base_times: list[float]) -> float:
    return statistics.median(time / base for time, base in zip(times, base_times, strict=True))
