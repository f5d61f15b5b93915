"""What a study says while it runs: a line for each trial that has ended, one for those that run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TextIO

from shardscope.runtime.bar import bar, is_terminal
from shardscope.spec.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from shardscope.spec import Job
    from shardscope.tuning.records import TrialRecord
    from shardscope.tuning.session import Session

_LOOK_EVERY_S = 0.5
_LAST_LOOK_S = 2.0
"""How long a study that was interrupted waits for the storage: it may be away, or its server out of reach."""
_ENDED = ("complete", "pruned", "impossible", "failed")


def is_watched() -> bool:
    """Whether somebody sees what is printed: standard output is a terminal, or a cell of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return is_terminal(sys.stdout) or getattr(shell, "kernel", None) is not None


def measuring_text(probe: Job) -> str:
    """What a study does before its first trial, where its batches are left to it."""
    return f"Measuring the gradient noise scale over {probe.last_step} steps, to centre the batches on it."


class StudyProgress:
    """Prints each trial once it has ended; where lines can be rewritten, the last one says what runs now.

    As a context it is closed at the end, in haste where the study was interrupted or failed.
    """

    def __init__(self, session: Session, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._session, self._quiet = session, quiet
        self._stream = stream or sys.stderr
        self._rewrite = is_terminal(self._stream)
        self._looked_at = 0.0
        self._told: set[int] | None = None  # not known before the storage has answered once
        self._done = 0
        if quiet:
            return
        self._take(self._records())
        if session.definition.batches is not None:
            self._stream.write(f"{session.definition.batches}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close(in_haste=kind is not None)

    def draw(self) -> None:
        """Say what is new; called often, it looks now and then."""
        if self._quiet or time.monotonic() - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        self._say_ended(self._records())
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}")
        self._stream.flush()

    def line(self) -> str:
        """How far the study is, and its running trials."""
        trials = self._session.driver.trials
        running = [
            f"trial {live.number} step {live.meter.num_steps}/{live.job.steps}"
            for live in list(self._session.driver.live.values())
        ]
        return "  ".join([f"{bar(self._done / trials)} {self._done}/{trials} trials", *running])

    def close(self, *, in_haste: bool = False) -> None:
        """Say what has ended since, and leave the line standing; in haste also while the storage does not answer."""
        if self._quiet:
            return
        self._say_ended(self._records_soon() if in_haste else self._records())
        if self._rewrite:
            self._stream.write(f"\r\x1b[K{self.line()}\n")
        self._stream.flush()

    def _records(self) -> list[TrialRecord] | None:
        """The trials; None while the storage is away, for which this waits as the study does."""
        from shardscope.tuning.storage import outages  # only here, so that help and mistakes need no Optuna

        with suppress(*outages()):
            return self._session.records()
        return None

    def _records_soon(self) -> list[TrialRecord] | None:
        """The same; None also where the storage takes its time to say that it is away."""
        from shardscope.tuning.storage import within

        found: list[list[TrialRecord] | None] = []
        is_done = within(_LAST_LOOK_S, lambda: found.append(self._records()))
        return found[0] if is_done else None

    def _say_ended(self, records: list[TrialRecord] | None) -> None:
        """Say which trials have ended since the last look."""
        start = "\r\x1b[K" if self._rewrite else ""
        for record in self._take(records):
            self._stream.write(f"{start}{trial_line(record)}\n")

    def _take(self, records: list[TrialRecord] | None) -> list[TrialRecord]:
        """Those that have ended since the last look; of the first look, none."""
        if records is None:
            return []
        ended = [record for record in records if record.state in _ENDED]
        self._done = sum(record.counted for record in ended)
        new = [] if self._told is None else [one for one in ended if one.number not in self._told]
        self._told = {record.number for record in ended}
        return new


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
