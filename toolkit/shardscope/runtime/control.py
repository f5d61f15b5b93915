"""How all ranks stop after the same step, at no cost a step but one look at the file system.

Whoever wants a run to stop leaves a request in its directory. Rank 0 sees it before some step, writes that this step
is to be the last, and only then takes part in it. A synchronous step cannot end anywhere before rank 0 took part in it,
so every other rank, when it looks before the next step, finds the note. Where other ranks can be a few steps ahead, the
last step is as many steps later. Where they can be any number ahead, each stops as soon as it sees the request; such a
strategy brings its ranks together afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardscope.runtime.rundir import RunDir


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

    def should_stop(self, step: int) -> bool:
        """Whether `step` must not be taken any more. Called by every rank before every step."""
        if self.drift is None:
            return self.run.stop_request.exists()
        last = self._last_step()
        if last is not None:
            return step > last
        if self.rank == 0 and self.run.stop_request.exists():
            if self.world_size == 1:
                return True
            self.run.write_whole(self.run.stop_at, str(step + self.drift).encode())
        return False

    def _last_step(self) -> int | None:
        try:
            return int(self.run.stop_at.read_text())
        except FileNotFoundError:
            return None
