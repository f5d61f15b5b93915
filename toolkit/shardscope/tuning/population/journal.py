"""The journal of a population: its records, one JSON object per line, complete lines only, one writer at a time.

    Plan       the arguments of the population; the first line
    Move       a member's settings and parent checkpoint for an interval; one line holds those of all members
    Outcome    how a member's interval ended; one line per member. Without all of its lines, an interval is unfinished

A population is resumed from these lines alone. A line is appended and synced to disk before anything depends on it. A
kill leaves at most one partial line at the end: readers skip it, and the next writer starts a new line. The writer
holds a lock that the operating system releases when the process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from shardscope.errors import ShardscopeError
from shardscope.runlog.writer import encode
from shardscope.tuning.population.explore import Settings

Origin = Literal["drawn", "kept", "cloned"]


class PopulationError(ShardscopeError):
    """The folder holds a different population, another process trains this population, or all its members failed."""


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
        parent: Member from whose last checkpoint this member resumes; None in the first interval.
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
        notes: Sentences on the state that was reinitialised when the member resumed from a checkpoint.
    """

    interval: int
    member: int
    run: str
    scores: Mapping[str, float] | None
    failure: str | None = None
    samples: int | None = None
    notes: tuple[str, ...] = ()

    def costs(self, objectives: Sequence[str]) -> tuple[float, ...]:
        """Return the scores of a member that has not failed, in the order of `objectives`."""
        assert self.scores is not None
        return tuple(self.scores[name] for name in objectives)


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


NAME = "journal.jsonl"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a journal, in order; none if the file does not exist."""
    text = path.read_bytes() if path.is_file() else b""
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        with contextlib.suppress(ValueError):  # a partial line from a killed writer, ended by the next writer
            found = json.loads(line)
            if isinstance(found, dict) and "event" in found:
                yield found


def is_held(path: Path) -> bool:
    """Return whether a process has this journal open for writing."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Journal:
    """Exclusive writer of a population's journal.

    Args:
        path: File of the journal; created if it does not exist.

    Raises:
        PopulationError: Another process holds the journal's lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise PopulationError(
                f"the population in {path.parent} is being trained by another process; wait for it, or stop it with "
                "ss.Population(folder).stop()"
            ) from None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, and wait until it is on disk.

        Raises:
            OSError: The disk is full or missing.
        """
        text = encode({"t": round(time.time(), 6), **line})
        while text:
            text = text[os.write(self._file, text) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file, which releases the lock."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
