"""A study in a terminal: a line for each trial that has ended, one for those that run, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from shardscope.commands._progress import BAR_WIDTH
from shardscope.commands._table import aligned, human_bytes
from shardscope.spec.units import seconds_text

if TYPE_CHECKING:
    from shardscope.tuning.records import TrialRecord
    from shardscope.tuning.session import Session

_LOOK_EVERY_S = 0.5
_ENDED = ("complete", "pruned", "impossible", "failed")


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
        filled = min(BAR_WIDTH, round(BAR_WIDTH * self._done / trials))
        running = [
            f"trial {live.number} step {live.measured.steps}/{live.job.steps}"
            for live in list(self._session.driver.live.values())
        ]
        bar = "█" * filled + "░" * (BAR_WIDTH - filled)
        return "  ".join([f"{bar} {self._done}/{trials} trials", *running])

    def close(self) -> None:
        """Say what has ended since, and leave the line standing."""
        if self._quiet:
            return
        self._say_ended()
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}\n")
        self._stream.flush()

    def _say_ended(self) -> None:
        records = self._session.records()
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
    return human_bytes(value) if objective in ("bytes", "memory") else f"{value:.4g}"


def as_text(session: Session, records: Sequence[TrialRecord]) -> str:
    """The front as a table, the report, and where the study is."""
    names, front = session.definition.objectives, session.front()
    rows = [
        [str(one.number), *(value_text(n, (one.values or {})[n]) for n in names), settings_text(one.params)]
        for one in front
    ]
    parts = [aligned(["trial", *names, "settings"], rows)] if rows else []
    if records:
        parts.append(str(session.report()))
    parts.append(f"The study is in {session.where}\nOn Optuna's dashboard: {session.dashboard_command()}")
    return "\n\n".join(parts)


def as_json(session: Session, records: Sequence[TrialRecord]) -> dict[str, Any]:
    """The same for machines."""
    report = session.report()
    front = {record.number for record in report.front}
    return {
        "study": report.name, "where": session.where, "dashboard": session.dashboard_command(),
        "trials_wanted": session.driver.trials, "objectives": list(session.definition.objectives),
        "states": dict(report.states), "samplers": dict(report.samplers), "batches": report.batches,
        "verdict": report.verdict, "front": sorted(front),
        "trials": [
            {
                "number": record.number, "state": record.state, "counted": record.counted,
                "params": dict(record.params), "values": dict(record.values or {}), "reason": record.reason,
                "alarms": list(record.alarms), "origin": record.origin, "sampler": record.sampler, "run": record.run,
            }
            for record in records
        ],
    }  # fmt: skip
