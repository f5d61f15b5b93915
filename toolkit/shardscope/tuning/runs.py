"""The driver below every study, population, sweep and range test: it starts real runs, watches them and stops them.

    driver.run()        or: while driver.tick(): time.sleep(TICK_S)

A subclass implements a policy. It decides what to start next (`_start`), may stop a run early (`_watch`), and records
the result of a run that has ended (`_finish`):

    TrialDriver         trials of a study: Optuna's ask and tell, in a storage that other drivers share
    HalvingDriver       the same, in pieces between rungs
    Members             an interval of a population
    run_to_end          a single run: a cell of a sweep, a range test, the run that measures the noise scale
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardscope.runtime.record.run import Run
from shardscope.runtime.record.rundir import RunDir
from shardscope.tuning.measured import TrialReader

TICK_S = 0.02
GRACE_S = 1.0
"""Time that a run has to end its step before it is killed, in seconds."""


@dataclass
class Watched:
    """A run that a driver watches, and the reader of its events."""

    run: Run
    meter: TrialReader


AnyWatched = TypeVar("AnyWatched", bound=Watched)


class RunDriver(Generic[AnyWatched]):
    """Driver that watches the runs in `live`, at most `parallel` at a time; this base class starts no runs."""

    live: dict[int, AnyWatched]
    parallel: int

    def tick(self) -> bool:
        """Follow the runs and start new ones; return whether more ticks are needed."""
        for live in list(self.live.values()):
            self._follow(live)
        while len(self.live) < self.parallel and self._start():
            pass
        return bool(self.live)

    def run(self, *, timeout_s: float | None = None, on_tick: Callable[[], None] | None = None) -> None:
        """Tick until all runs have ended, or for at most `timeout_s` seconds. Remaining runs are stopped on return.

        Args:
            timeout_s: Stop after this many seconds. None sets no limit.
            on_tick: Called many times a second.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self.tick():
                if on_tick is not None:
                    on_tick()
                if deadline is not None and time.monotonic() > deadline:
                    break
                time.sleep(TICK_S)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop all runs."""
        for live in self.live.values():
            RunDir(live.run.path).request_stop(GRACE_S)
        for live in self.live.values():
            live.run.stop(GRACE_S)
        self.live.clear()

    def _follow(self, live: AnyWatched) -> None:
        is_alive = live.run.is_alive  # checked before reading, so that the last events are not missed
        live.meter.read()
        if is_alive:
            self._watch(live)
        else:
            self._finish(live)

    # The policy.

    def _start(self) -> bool:
        """Start the next run; return False if none can be started now."""
        return False

    def _watch(self, live: AnyWatched) -> None:
        """Check a run that is still training; called at each tick."""

    def _finish(self, live: AnyWatched) -> None:
        """Record how a run has ended, and remove it from `live`."""
        raise NotImplementedError


class _One(RunDriver[Watched]):
    parallel = 1

    def __init__(self, run: Run, stop_when: Callable[[TrialReader], bool] | None) -> None:
        self.live, self.stop_when, self.was_stopped = {0: Watched(run, TrialReader(run))}, stop_when, False

    def _watch(self, live: Watched) -> None:
        if self.stop_when is not None and self.stop_when(live.meter):
            live.run.stop()
            self.was_stopped = True
            self._finish(live)

    def _finish(self, live: Watched) -> None:
        live.meter.read()
        self.live.clear()


def run_to_end(run: Run, *, stop_when: Callable[[TrialReader], bool] | None = None) -> bool:
    """Watch a run until it has ended or `stop_when` holds; return whether `stop_when` stopped it.

    An error or an interrupt while waiting also stops the run, because nothing else would.
    """
    driver = _One(run, stop_when)
    driver.run()
    return driver.was_stopped
