"""A population as read from its folder by any process: during training, after a kill, or at any later time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope._experimental import experimental
from shardscope.errors import RunNotFound
from shardscope.runtime import Run
from shardscope.tuning.population.exploit import first_front, ranked
from shardscope.tuning.population.journal import NAME, Course, MemberStart, Outcome, Plan, is_held, read_lines

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class MemberInterval:
    """One interval of one member: how it started and, once it has ended, its outcome."""

    interval: int
    move: MemberStart
    outcome: Outcome | None

    @property
    def member(self) -> int:
        """Index of the member, from 0."""
        return self.move.member


@experimental
class Population:
    """Population that is stored in a folder; returned by `train_population`, or constructed from the folder.

    Args:
        folder: Folder of the population, with its journal and runs.

    Raises:
        RunNotFound: The folder holds no population.

    Example:
        >>> population = Population("runs/20261121-190000-population-ring-mlp")  # doctest: +SKIP
        >>> population.best.move.settings  # doctest: +SKIP
        {'optimizer.lr': 0.012, 'batch': 32}
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        if not (self.folder / NAME).is_file():
            raise RunNotFound(
                f"no population in {self.folder}; ss.train_population(..., folder=...) creates one"
            )

    @property
    def course(self) -> Course:
        """Progress of the population, as read from its journal."""
        return Course.of(read_lines(self.folder / NAME))

    @property
    def plan(self) -> Plan:
        """Arguments with which the population was created."""
        plan = self.course.plan
        if plan is None:
            raise RunNotFound(f"the population in {self.folder} was killed before it started; train it again")
        return plan

    @property
    def state(self) -> str:
        """State: ``running``, ``completed``, ``stopped``, ``failed``, or ``interrupted`` if its process has died."""
        if is_held(self.folder / NAME):
            return "running"
        state = self.course.state
        return "interrupted" if state == "running" else state

    @property
    def stop_request(self) -> Path:
        """Path of the file whose existence requests a stop."""
        return self.folder / "stop"

    def stop(self) -> None:
        """Request a stop from any process, and return at once. Unfinished intervals are repeated on resume."""
        if self.state == "running":
            self.stop_request.touch(mode=0o600)

    # Results.

    def entries(self) -> list[MemberInterval]:
        """Return every interval of every member, in order."""
        course = self.course
        return [
            MemberInterval(interval, move, course.outcomes.get((interval, move.member)))
            for interval, moves in sorted(course.moves.items())
            for move in moves
        ]

    @property
    def best(self) -> MemberInterval:
        """Best member at the end of the last finished interval; with several objectives, a member of the front.

        Raises:
            RunNotFound: No interval has finished.
        """
        costs = self._costs()
        return self._last()[ranked(costs)[0]]

    @property
    def front(self) -> list[MemberInterval]:
        """Members that no other member dominates at the end of the last finished interval."""
        last = self._last()
        return [last[member] for member in first_front(self._costs())]

    def _last(self) -> dict[int, MemberInterval]:
        last = self.course.last_interval
        if not last:
            raise RunNotFound(
                f"no interval of the population in {self.folder} has finished yet; wait for the first"
            )
        return {entry.member: entry for entry in self.entries() if entry.interval == last}

    def _costs(self) -> dict[int, tuple[float, ...]]:
        objectives = self.plan.objectives
        return {
            member: entry.outcome.costs(objectives)
            for member, entry in self._last().items()
            if entry.outcome is not None and entry.outcome.scores is not None
        }

    def run(self, entry: MemberInterval) -> Run:
        """Return the run of one interval of a member."""
        assert entry.outcome is not None
        return Run.attach(self.folder / entry.outcome.run)

    def ancestry(self, entry: MemberInterval | None = None) -> list[MemberInterval]:
        """Return the intervals that trained a member's weights, in order; by default those of the best member."""
        entry = self.best if entry is None else entry
        by_place = {(other.interval, other.member): other for other in self.entries()}
        line = [entry]
        while line[0].move.parent is not None:
            line.insert(0, by_place[line[0].interval - 1, line[0].move.parent])
        return line

    def schedule(self, entry: MemberInterval | None = None) -> pd.DataFrame:
        """Return the schedule of settings that produced a member's weights, with one row per interval.

        Columns: interval, from_step, to_step, member, then one for each setting and each objective. If `entry` is None,
        the best member is used.
        """
        import pandas as pd

        steps = self.plan.interval_steps
        return pd.DataFrame(
            {
                "interval": e.interval, "from_step": (e.interval - 1) * steps + 1, "to_step": e.interval * steps,
                "member": e.member, **e.move.settings, **_scores(e),
            }
            for e in self.ancestry(entry)
        )  # fmt: skip

    def lineage(self) -> pd.DataFrame:
        """Return a frame with a row for every interval of every member.

        Columns: interval, member, parent, origin, run, failure, samples, notes (state that was reinitialised), one for
        each objective and each setting, and ``before:<setting>`` for the member's previous value.
        """
        import pandas as pd

        rows = []
        for e in self.entries():
            told = {} if e.outcome is None else {
                "run": e.outcome.run, "failure": e.outcome.failure, "samples": e.outcome.samples,
                "notes": " ".join(f"{note}." for note in e.outcome.notes),
            }  # fmt: skip
            before = {f"before:{path}": value for path, value in (e.move.before or {}).items()}
            rows.append(
                {
                    "interval": e.interval, "member": e.member, "parent": e.move.parent, "origin": e.move.origin,
                    **told, **_scores(e), **e.move.settings, **before,
                }
            )  # fmt: skip
        return pd.DataFrame(rows).astype({"parent": "Int64"})

    def __repr__(self) -> str:
        plan, done = self.plan, f"{self.course.last_interval} of {self.plan.intervals} intervals"
        return f"<Population of {plan.members} in {self.folder.name}, {done}, {self.state}>"


def _scores(entry: MemberInterval) -> dict[str, Any]:
    return {} if entry.outcome is None or entry.outcome.scores is None else dict(entry.outcome.scores)
