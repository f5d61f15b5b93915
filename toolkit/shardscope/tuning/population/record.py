"""What is written down of a population, and how far it has come by it.

    Plan       what was asked; the first line
    Move       where a member stands at the start of an interval, and by whose checkpoint; all members' on one line
    Outcome    how a member's interval ended; a line each, and the only thing that counts as its end

A population that goes on is read from these lines alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shardscope.errors import ShardscopeError
from shardscope.tuning.population.settings import Settings

Origin = Literal["drawn", "kept", "cloned"]


class PopulationError(ShardscopeError):
    """A population cannot go on: its folder holds another one, somebody else trains it, or all members failed."""


@dataclass(frozen=True)
class Plan:
    """What was asked: `job` and `space` as JSON; the rest as `train_population` takes it.

    `own` are the objectives that are functions of the user's; None in a journal that does not say.
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
    own: tuple[str, ...] | None = field(default=None, compare=False)

    @property
    def steps(self) -> int:
        """Of a member, over all intervals."""
        return self.intervals * self.interval_steps


@dataclass(frozen=True)
class Move:
    """A member's start into an interval.

    Attributes:
        parent: The member whose checkpoint of the interval before it goes on from; None in the first.
        before: Its own settings in the interval before; None in the first.
        settings: Those that it trains with now.
        origin: Whether they were ``drawn``, ``kept``, or come with the parent's checkpoint (``cloned``) and were then
            explored.
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
        run: The run directory, from the population's folder.
        scores: By objective; None where it failed.
        failure: Why it failed, in one sentence; None where it did not.
        samples: Training samples behind its weights, over the whole of its ancestry; None where it failed.
        notes: What did not go on as it was when it went on from its checkpoint.
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
    """How far a population has come. `moves` are by interval, from 1; `outcomes` by interval and member."""

    plan: Plan | None = None
    moves: dict[int, list[Move]] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    state: str = "running"

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Course:
        """What these lines of a journal come to."""
        course = cls()
        for line in lines:
            course.take(line)
        return course

    def take(self, line: Mapping[str, Any]) -> None:
        """One more line. Of two that say the same of a member's interval, the first counts.

        Raises:
            PopulationError: It was begun when ``accuracy`` was an objective, the more the better.
        """
        kind, fields = line["event"], {key: value for key, value in line.items() if key not in ("event", "t")}
        if kind == "plan":
            self.plan = _plan_of(fields)
        elif kind == "moves":
            moves = [Move(**move) for move in fields["moves"]]
            self.moves.setdefault(fields["interval"], moves)
        elif kind == "outcome":
            outcome = Outcome(**{**fields, "notes": tuple(fields["notes"])})
            self.outcomes.setdefault((outcome.interval, outcome.member), outcome)
        elif kind == "state":
            self.state = fields["state"]

    def is_over(self, interval: int) -> bool:
        """Whether all members have ended this interval."""
        moves = self.moves.get(interval, ())
        return bool(moves) and all((interval, move.member) in self.outcomes for move in moves)

    @property
    def last_interval(self) -> int:
        """The last that all members have ended; 0 for none."""
        return max((interval for interval in self.moves if self.is_over(interval)), default=0)


def _plan_of(fields: Mapping[str, Any]) -> Plan:
    own = None if fields.get("own") is None else tuple(fields["own"])
    plan = Plan(**{**fields, "objectives": tuple(fields["objectives"]), "own": own})
    if "accuracy" in plan.objectives and "accuracy" not in (own or ()):
        raise PopulationError(
            "this population was begun with the objective 'accuracy', the more the better, and objectives are now the "
            "less the better; train a new one, in another folder, with objectives='error'"
        )
    return plan


def plan_line(plan: Plan) -> dict[str, Any]:
    """A plan as a line."""
    return {"event": "plan", **asdict(plan)}


def moves_line(interval: int, moves: Iterable[Move]) -> dict[str, Any]:
    """All members' moves into an interval as one line: there as a whole or not at all."""
    return {"event": "moves", "interval": interval, "moves": [asdict(move) for move in moves]}


def outcome_line(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a line."""
    return {"event": "outcome", **asdict(outcome)}
