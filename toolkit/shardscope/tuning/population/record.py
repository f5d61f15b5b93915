"""Records of a population in its journal, and its progress as read from them.

    Plan       the arguments of the population; the first line
    Move       a member's settings and parent checkpoint for an interval; one line holds those of all members
    Outcome    how a member's interval ended; one line per member, without which the interval counts as unfinished

A population is resumed from these lines alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shardscope.errors import ShardscopeError
from shardscope.tuning.population.settings import Settings

Origin = Literal["drawn", "kept", "cloned"]


class PopulationError(ShardscopeError):
    """The population cannot continue: its folder holds a different one, another process trains it, or all failed."""


@dataclass(frozen=True)
class Plan:
    """The arguments of `train_population`, with `job` and `space` as JSON.

    `own` names the user-defined objectives, and `split` is the split on which members are compared.
    """

    job: Mapping[str, Any]
    space: Mapping[str, Any]
    members: int
    intervals: int
    interval_steps: int
    objectives: tuple[str, ...]
    quantile: float
    resample: float
    seed: int
    own: tuple[str, ...] = field(default=(), compare=False)
    split: Literal["validation"] = "validation"

    @property
    def steps(self) -> int:
        """Number of steps of each member, over all intervals."""
        return self.intervals * self.interval_steps


@dataclass(frozen=True)
class MemberStart:
    """Settings and parent of a member at the start of an interval.

    Attributes:
        parent: Member from whose checkpoint of the previous interval this one resumes; None in the first interval.
        before: Settings of this member in the previous interval; None in the first interval.
        settings: Settings that this member trains with in this interval.
        origin: Whether the settings were ``drawn``, ``kept``, or copied from the parent and explored (``cloned``).
    """

    member: int
    parent: int | None
    before: Settings | None
    settings: Settings
    origin: Origin


@dataclass(frozen=True)
class Outcome:
    """How a member's interval ended.

    Attributes:
        run: Run directory, relative to the population's folder.
        scores: Values of the objectives by name; None if the member failed.
        failure: One sentence on why it failed; None if it did not.
        samples: Number of training samples that its weights have seen, over all ancestors; None if it failed.
        notes: Sentences on the state that was not carried over when it resumed from its checkpoint.
    """

    interval: int
    member: int
    run: str
    scores: Mapping[str, float] | None
    failure: str | None = None
    samples: int | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Course:
    """Progress of a population. `moves` are keyed by interval, from 1; `outcomes` by interval and member."""

    plan: Plan | None = None
    moves: dict[int, list[MemberStart]] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    state: str = "running"

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Course:
        """Return the progress recorded in the lines of a journal."""
        course = cls()
        for line in lines:
            course.take(line)
        return course

    def take(self, line: Mapping[str, Any]) -> None:
        """Update the progress with one more line; a second line with the same moves or outcome is ignored."""
        kind, fields = line["event"], {key: value for key, value in line.items() if key not in ("event", "t")}
        if kind == "plan":
            self.plan = Plan(
                **{**fields, "objectives": tuple(fields["objectives"]), "own": tuple(fields["own"])}
            )
        elif kind == "moves":
            moves = [MemberStart(**move) for move in fields["moves"]]
            self.moves.setdefault(fields["interval"], moves)
        elif kind == "outcome":
            outcome = Outcome(**{**fields, "notes": tuple(fields["notes"])})
            self.outcomes.setdefault((outcome.interval, outcome.member), outcome)
        elif kind == "state":
            self.state = fields["state"]

    def is_over(self, interval: int) -> bool:
        """Return whether all members have ended this interval."""
        moves = self.moves.get(interval, ())
        return bool(moves) and all((interval, move.member) in self.outcomes for move in moves)

    @property
    def last_interval(self) -> int:
        """Last interval that all members have completed; 0 if there is none."""
        return max((interval for interval in self.moves if self.is_over(interval)), default=0)


def plan_line(plan: Plan) -> dict[str, Any]:
    """Return a plan as a line of the journal."""
    return {"event": "plan", **asdict(plan)}


def moves_line(interval: int, moves: Iterable[MemberStart]) -> dict[str, Any]:
    """Return all members' moves for an interval as one line, so that they are written atomically."""
    return {"event": "moves", "interval": interval, "moves": [asdict(move) for move in moves]}


def outcome_line(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as a line of the journal."""
    return {"event": "outcome", **asdict(outcome)}
