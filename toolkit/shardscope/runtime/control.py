"""How all ranks stop after the same step, at no cost a step but one look at the file system.

Whoever wants a run to stop leaves a request in its directory. Rank 0 sees it before some step, writes that this step
is to be the last, and only then takes part in it. A synchronous step cannot end anywhere before rank 0 took part in it,
so every other rank, when it looks before the next step, finds the note. Where other ranks can be a few steps ahead, the
last step is as many steps later. Where they can be any number ahead, each stops as soon as it sees the request; such a
strategy brings its ranks together afterwards.

A run that somebody judges by its evaluations would take a step or two in vain before a verdict reaches it that way. So
after an evaluation its ranks wait for the verdict, but no longer than a step takes, and no more once it has been late
twice running: a judge that is slow, or gone, costs next to nothing. Rank 0 waits for the judge, the others for rank 0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from shardscope.runtime.rundir import RunDir

_LOOK_EVERY_S = 3e-4
"""Ranks go on as far apart, which those that are early then wait in the next step."""
_MOST_LATE = 2
"""Verdicts running that may come too late before none is waited for."""


@dataclass
class StopControl:
    """One rank's view of the stop request.

    Attributes:
        drift: Steps that another rank can be ahead of rank 0; None for any number.
    """

    run: RunDir
    rank: int
    world_size: int
    drift: int | None = 0
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
            self.run.write_whole(self.run.stop_at, str(step + self.drift).encode())
        return False

    def evaluated(self, step: int, patience_s: float) -> None:
        """Wait for the verdict on an evaluation, if there is to be one. Called by every rank after every evaluation.

        Args:
            step: That it followed.
            patience_s: Seconds to wait at most.
        """
        if not self._is_judged:
            return
        if self.rank == 0:
            self._hear(step, patience_s if self._late < _MOST_LATE else 0.0)
        else:
            while (_step_in(self.run.go_on) or 0) < step and _step_in(self.run.stop_at) is None:
                time.sleep(_LOOK_EVERY_S)

    def _hear(self, step: int, patience_s: float) -> None:
        """Rank 0's part: wait for the judge, and tell the others."""
        deadline = time.monotonic() + patience_s
        while not (is_told := self._is_told(step)) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        self._late = 0 if is_told else self._late + 1
        answer = self.run.stop_at if self.run.stop_request.exists() else self.run.go_on
        self.run.write_whole(answer, str(step).encode())

    def _is_told(self, step: int) -> bool:
        return self.run.stop_request.exists() or (_step_in(self.run.judged) or 0) >= step


def _step_in(path: Path) -> int | None:
    """The step that a file holds; None if it is not there."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None
