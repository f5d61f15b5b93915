"""Faults that are added to a run while it trains.

`inject` replaces the plan in the run directory by a longer one. Each rank looks at the file's time before each step,
and then takes the faults that are new to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardscope.errors import SpecError
from shardscope.runtime.rundir import FAULTS_FILE, RunDir
from shardscope.spec import Job
from shardscope.spec.cluster import EmulatedCluster
from shardscope.spec.faults import Faults


@dataclass
class PlanWatch:
    """A view of the plan of a run that notices when it has grown; each process has its own."""

    run: RunDir
    _seen: int = 0

    def __call__(self) -> Faults | None:
        """Return the plan if it is new or has changed since the last call; else None. Without a plan, None.

        Raises:
            RunUnreadable: The file is damaged.
        """
        try:
            seen = (self.run.path / FAULTS_FILE).stat().st_mtime_ns
        except OSError:
            return None
        if seen == self._seen:
            return None
        self._seen = seen
        return self.run.read_faults()


def inject(run: RunDir, job: Job, cluster: EmulatedCluster | None, faults: Faults | str) -> None:
    """Add faults to the plan of a run.

    Args:
        run: The run directory.
        job: The job of the run.
        cluster: The emulated cluster that it is on; None for this machine itself.
        faults: The faults, or their text.

    Raises:
        SpecError: There is no fault, it cannot occur in this run, or it is at a time.
    """
    added = Faults.of(faults)
    if not added:
        raise SpecError("inject needs a fault; give for example ss.Faults().kill(rank=1, step=40)")
    added.check(job, cluster)
    for fault in added:
        if getattr(fault, "at_s", None) is not None:
            raise SpecError(
                f"fault '{fault}' is at a time, which is counted from the start of the run; give step=... instead"
            )
    run.write_faults(Faults(faults=(*run.read_faults(), *added)))
