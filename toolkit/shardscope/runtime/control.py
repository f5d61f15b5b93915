"""How all ranks stop after the same step, at no cost a step but one look at the file system.

Whoever wants a run to stop leaves a request in its directory. Rank 0 sees it before some step, writes that this step
is to be the last, and only then takes part in it. A synchronous step cannot end anywhere before rank 0 took part in it,
so every other rank, when it looks before the next step, finds the note. Where other ranks can be a few steps ahead, the
last step is as many steps later. Where they can be any number ahead, each stops as soon as it sees the request; such a
strategy brings its ranks together afterwards.

A run that somebody judges by its evaluations would take a step or more in vain before a verdict reaches it that way. So
after an evaluation ranks that are in step wait for the verdict: rank 0 for the judge, the others for rank 0. They wait
no longer than a step takes, and no more at all once a verdict has been late twice running. At worst a judge that is
just in time makes every evaluation a step longer; one that is gone costs two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shardscope.errors import RunUnreadable, ShardscopeError
from shardscope.runtime.files import OutOfReach, read_text
from shardscope.runtime.rundir import RunDir

_MOST_LATE = 2
"""Verdicts running that may come too late before none is waited for."""
_SOON_S, _SOON_EVERY_S, _LATER_EVERY_S = 20e-3, 3e-4, 2e-3
"""How often to look, at first and later on. Ranks go on up to so far apart, for which the early ones wait in the next
step."""
_PATIENCE_S = 5.0
"""With a file that is there and cannot be opened."""


class NoVerdictError(ShardscopeError):
    """Rank 0 has not told the others whether to go on."""


@dataclass
class StopControl:
    """One rank's view of what is asked of the run from outside: to stop, or to go on after an evaluation.

    Attributes:
        drift: Steps that another rank can be ahead of rank 0; None for any number.
        timeout_s: Seconds that the others wait for rank 0 beyond its own patience.
    """

    run: RunDir
    rank: int
    world_size: int
    drift: int | None = 0
    timeout_s: float = 60.0
    _is_judged: bool = field(init=False)
    _late: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._is_judged = self.drift == 0 and self.run.judged.exists()

    def should_stop(self, step: int) -> bool:
        """Whether `step` must not be taken any more. Called by every rank before every step."""
        if self.drift is None:
            return self.run.stop_request.exists()
        last = _step_in(self.run.stop_at)
        if last is not None:
            return step > last
        if self.rank == 0 and self.run.stop_request.exists():
            if self.world_size == 1:
                return True
            self.run.write_control(self.run.stop_at, str(step + self.drift))
        return False

    def evaluated(self, step: int, patience_s: float) -> None:
        """Wait for the verdict on an evaluation, if there is to be one. Called by every rank after every evaluation.

        Args:
            step: That it followed.
            patience_s: Seconds to wait for the judge at most.

        Raises:
            NoVerdictError: Rank 0 does not answer.
        """
        if not self._is_judged:
            return
        if self.rank == 0:
            self._hear(step, patience_s if self._late < _MOST_LATE else 0.0)
        elif not _wait(lambda: self._is_answered(step), patience_s + self.timeout_s):
            raise NoVerdictError(
                f"rank 0 has said nothing for {patience_s + self.timeout_s:.0f} s after the evaluation at step {step}; "
                f"raise timeout_s={self.timeout_s:g} if it may take that long"
            )

    def _hear(self, step: int, patience_s: float) -> None:
        """Rank 0's part: wait for the judge, and tell the others."""
        is_told = _wait(lambda: self._is_told(step), patience_s)
        self._late = 0 if is_told else self._late + 1
        answer = self.run.stop_at if self.run.stop_request.exists() else self.run.heard
        self.run.write_control(answer, str(step))

    def _is_told(self, step: int) -> bool:
        return self.run.stop_request.exists() or (_step_in(self.run.judged) or 0) >= step

    def _is_answered(self, step: int) -> bool:
        return (_step_in(self.run.heard) or 0) >= step or _step_in(self.run.stop_at) is not None


def _wait(condition: Callable[[], bool], patience_s: float) -> bool:
    """Wait until it holds; whether it does."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > patience_s:
            return False
        time.sleep(_SOON_EVERY_S if waited < _SOON_S else _LATER_EVERY_S)
    return True


def _step_in(path: Path) -> int | None:
    """The step that a file holds; None if it is not there, or does not hold one.

    A file that is out of reach is looked at again: a rank that took it for absent would go on alone.

    Raises:
        OutOfReach: It stays so.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return int(read_text(path))
        except OutOfReach:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LATER_EVERY_S)
        except (FileNotFoundError, RunUnreadable, ValueError):
            return None
