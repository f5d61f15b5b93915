"""What a study says while it runs: a line for each trial that has ended, one for those that run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from shardscope.runtime.bar import bar
from shardscope.spec.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.tuning.records import TrialRecord
    from shardscope.tuning.session import Session

_LOOK_EVERY_S = 0.5
_ENDED = ("complete", "pruned", "impossible", "failed")


def is_watched() -> bool:
    """Whether somebody sees what is printed: standard output is a terminal, or a cell of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return sys.stdout.isatty() or getattr(shell, "kernel", None) is not None


def measuring_text(probe: Job) -> str:
    """What a study does before its first trial, where its batches are left to it."""
    return f"Measuring the gradient noise scale over {probe.last_step} steps, to centre the batches on it."


class StudyProgress:
    """Prints each trial once it has ended; where lines can be rewritten, the last one says what runs now."""

    def __init__(self, session: Session, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._session, self._quiet = session, quiet
        self._stream = stream or sys.stderr
        self._rewrite = self._stream.isatty()
        self._looked_at = 0.0
        self._told = {record.number for record in session.records() if record.state in _ENDED}
        self._done = 0
        if not quiet and session.definition.batches is not None:
            self._stream.write(f"{session.definition.batches}\n")

    def draw(self) -> None:
        """Say what is new; called often, it looks now and then."""
        if self._quiet or time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        self._say_ended()
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}")
        self._stream.flush()

    def line(self) -> str:
        """How far the study is, and its running trials."""
        trials = self._session.driver.trials
        running = [
            f"trial {live.number} step {live.measured.steps}/{live.job.steps}"
            for live in list(self._session.driver.live.values())
        ]
        return "  ".join([f"{bar(self._done / trials)} {self._done}/{trials} trials", *running])

    def close(self) -> None:
        """Say what has ended since, and leave the line standing."""
        if self._quiet:
            return
        self._say_ended()
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}\n")
        self._stream.flush()

    def _say_ended(self) -> None:
        """Say which trials have ended; while the storage is away that waits, as the study does."""
        from shardscope.tuning.storage import outages  # only here, so that help and mistakes need no Optuna

        records = []
        with suppress(*outages()):
            records = self._session.records()
        if not records:
            return
        self._done = sum(record.counted and record.state in _ENDED for record in records)
        start = "\r\x1b[K" if self._rewrite else ""
        for record in records:
            if record.state in _ENDED and record.number not in self._told:
                self._told.add(record.number)
                self._stream.write(f"{start}{trial_line(record)}\n")


def trial_line(record: TrialRecord) -> str:
    """A trial that has ended, in a line."""
    values = [f"{name} {value_text(name, value)}" for name, value in (record.values or {}).items()]
    why = [record.reason] if record.reason and not values else []
    state = record.state if record.counted or record.state == "impossible" else "to be run again"
    return "  ".join([f"trial {record.number}", state, *values, settings_text(record.params), *why])


def settings_text(params: Mapping[str, Any]) -> str:
    """Settings as ``name=value``, numbers to three digits."""
    return " ".join(
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in params.items()
    )


def value_text(objective: str, value: float) -> str:
    """The value of an objective with its unit."""
    if objective == "seconds":
        return seconds_text(value)
    return bytes_text(value) if objective in ("bytes", "memory") else f"{value:.4g}"
