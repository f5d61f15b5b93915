"""Progress of a study (one line for each finished trial, one for the running trials) and of a batch-size sweep."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TextIO

from shardscope.runtime.record.bar import bar, is_terminal, is_watched
from shardscope.spec.units import bytes_text, duration_text, seconds_text

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.tuning.records import TrialRecord
    from shardscope.tuning.session import StudySession

_READ_EVERY_S = 0.5
_LAST_LOOK_S = 2.0
"""Maximum time that an interrupted study waits for its storage, in seconds; the storage may be unreachable."""
_LINE_WIDTH = 72
"""Width that a rewritten line is padded to; notebooks, unlike terminals, cannot clear a line."""
_ENDED = ("complete", "pruned", "impossible", "failed", "skipped")


def measuring_text(probe: Job) -> str:
    """Return the message for the run that measures the noise scale before the first trial."""
    return f"Measuring the gradient noise scale over {probe.last_step} steps, to choose the range of batch sizes."


class Pace:
    """Estimate of the time left, from the durations of the trials or runs that have ended since this object was
    created.

    Args:
        done: Number of trials or runs that had ended by then, or their work in any unit.
    """

    def __init__(self, done: float = 0) -> None:
        self._done, self._began = done, time.monotonic()

    def left_text(self, done: float, total: float) -> str:
        """Return ``3 min left`` when `done` of `total` have ended; empty if none has ended or none is left."""
        ended = done - self._done
        if ended <= 0 or done >= total:
            return ""
        left_s = (time.monotonic() - self._began) / ended * (total - done)
        return f"{f'{left_s / 60:.0f} min' if left_s >= 90 else f'{left_s:.0f} s'} left"


class StudyProgress:
    """Progress display: prints each trial after it has ended; on a terminal, the last line shows the running trials.

    As a context manager, it closes on exit, without a long wait if the study was interrupted or failed.
    """

    def __init__(self, session: StudySession, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._session, self._quiet = session, quiet
        self._stream = stream or sys.stderr
        self._rewrite = is_terminal(self._stream)
        self._read_at = 0.0
        self._printed: set[int] | None = None  # None until the storage has been read
        self._done = 0
        self._pace = Pace()
        if quiet:
            return
        self._take(self._records())
        if session.definition.batches is not None:
            self._stream.write(f"{session.definition.batches}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(quickly=kind is not None)

    def draw(self) -> None:
        """Print the trials that have ended since the last call. Reads the storage at most twice a second."""
        if self._quiet or time.monotonic() - self._read_at < _READ_EVERY_S:
            return
        self._read_at = time.monotonic()
        self._print_ended(self._records())
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}")
        self._stream.flush()

    def line(self) -> str:
        """Return the line with the study's progress and its running trials."""
        trials = self._session.driver.trials
        running = [
            f"trial {live.number} step {live.meter.num_steps}/{live.job.steps}"
            for live in list(self._session.driver.live.values())
        ]
        left = self._pace.left_text(self._done, trials)
        return "  ".join(
            [
                f"{bar(self._done / trials)} {self._done}/{trials} trials",
                *([f"about {left}"] if left else []),
                *running,
            ]
        )

    def close(self, *, quickly: bool = False) -> None:
        """Print the ended trials not printed yet, and the last line; `quickly` limits the wait for the storage."""
        if self._quiet:
            return
        self._print_ended(self._records_soon() if quickly else self._records())
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}\n")
        if self._session.driver.used_up:
            self._stream.write(f"{self._session.driver.used_up}\n")
        self._stream.flush()

    def _records(self) -> list[TrialRecord] | None:
        """Return the trials; None if the storage is unreachable."""
        from shardscope.tuning.storage import outages  # imported here: help and errors do not load Optuna

        with suppress(*outages()):
            return self._session.records()
        return None

    def _records_soon(self) -> list[TrialRecord] | None:
        """Return the trials; None if the storage is unreachable or has not answered within `_LAST_LOOK_S` seconds."""
        from shardscope.tuning.storage import within

        found: list[list[TrialRecord] | None] = []
        is_done = within(_LAST_LOOK_S, lambda: found.append(self._records()))
        return found[0] if is_done else None

    def _print_ended(self, records: list[TrialRecord] | None) -> None:
        """Print the trials that have ended since the last read."""
        start = "\r\x1b[K" if self._rewrite else ""
        for record in self._take(records):
            self._stream.write(f"{start}{trial_line(record)}\n")

    def _take(self, records: list[TrialRecord] | None) -> list[TrialRecord]:
        """Return the trials that have ended since the last read; none at the first read."""
        if records is None:
            return []
        ended = [record for record in records if record.state in _ENDED]
        self._done = sum(record.counted for record in ended)
        if self._printed is None:
            self._pace = Pace(self._done)
        new = [] if self._printed is None else [one for one in ended if one.number not in self._printed]
        self._printed = {record.number for record in ended}
        return new


class SweepProgress:
    """Progress display of a sweep: a line with the number of runs and the time left, and finally with the total time.

    In a terminal or a notebook, the line is rewritten in place; elsewhere, only the last line is printed.
    """

    def __init__(self, shown: bool | None = None) -> None:
        self._rewrite = is_watched() if shown is None else shown
        self._quiet = shown is False
        self._stream = sys.stdout if self._rewrite else sys.stderr
        self._began = time.monotonic()
        self._done = self._total = self._planned = 0
        self._work_done = self._work = 0.0
        self._pace = Pace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._quiet:
            self._write(self.last_line(time.monotonic() - self._began, is_complete=kind is None), end="\n")

    def expect(self, num_runs: int, work: float) -> None:
        """Set the maximum number of runs left: no rate search ends early, and every optimizer reaches the last size.

        Args:
            num_runs: The number.
            work: Their work, in the unit of `count`.
        """
        self._total, self._work = self._done + num_runs, self._work_done + work
        self._planned = self._planned or self._total

    def count(self, work: float) -> None:
        """Count one more run as done; `work` is proportional to its number of steps."""
        self._done += 1
        self._work_done += work

    def draw(self) -> None:
        """Show the number of the run that starts, and the time left if it can be estimated from earlier runs."""
        if self._done == 1:
            self._pace = Pace(self._work_done)  # the first run also starts the server of all runs
        if self._rewrite:
            self._write(self.line())

    def line(self) -> str:
        """Return the line with the number of runs and the time left."""
        total = max(self._total, self._done + 1)
        text = f"{bar(self._done / total)} run {self._done + 1} of about {total} or fewer"
        left = self._pace.left_text(self._work_done, self._work)
        return f"{text}, about {left}" if left else text

    def last_line(self, elapsed_s: float, *, is_complete: bool = True) -> str:
        """Return the number and total time of the runs, and why a complete sweep needed fewer runs than planned."""
        took = f"{self._done} runs in {duration_text(elapsed_s)}"
        saved = self._planned - self._done if is_complete else 0
        return (
            f"{took}; {saved} fewer than planned, because they could not change the result"
            if saved > 0
            else took
        )

    def _write(self, text: str, end: str = "") -> None:
        self._stream.write(f"\r{text:<{_LINE_WIDTH}}{end}" if self._rewrite else f"{text}{end}")
        self._stream.flush()


def trial_line(record: TrialRecord) -> str:
    """Return the text line for a trial that has ended."""
    values = [f"{name} {value_text(name, value)}" for name, value in (record.values or {}).items()]
    reason = record.reason or ""
    if record.state == "pruned":  # without the figures, which `session.records()` and the Tuning Lab have
        reason = reason.split(", ")[0]
    why = [reason] if reason and not values else []
    state = "to be run again" if record.state == "failed" and not record.counted else record.state
    mark = ["baseline"] if record.origin == "baseline" else []
    return "  ".join([f"trial {record.number}", state, *mark, *values, settings_text(record.params), *why])


def settings_text(params: Mapping[str, Any]) -> str:
    """Return settings as ``name=value`` pairs, floats with three significant digits."""
    return " ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in params.items()
    )


def value_text(objective: str, value: float) -> str:
    """Return the value of an objective as text, with its unit."""
    if objective == "seconds":
        return seconds_text(value)
    return bytes_text(value) if objective in ("bytes", "memory") else f"{value:.4g}"
