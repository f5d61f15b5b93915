"""Stragglers: ranks that take longer to compute than the other ranks, which therefore wait for them in every step.

Only computation counts: a rank that waits for other ranks is not slow, however long its step takes. Waits for
other ranks within a pass are left out (see `spans.phase_seconds`). A rank is named only if it is the slowest
in most of the newest steps, and in more of them than would happen by chance, so noise and ranks that are slow
in turn raise no alarm. In a pipeline, stages legitimately differ; there the alarm names the stage that the
other stages wait for. Whether other ranks wait at all, and what helps, depends on the job's strategy
(`Circumstances`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb, inf
from statistics import median
from typing import TYPE_CHECKING

from shardscope.errors import SpecError
from shardscope.runlog.alarms import Alarm
from shardscope.runlog.schema import Event
from shardscope.runlog.spans import phase_seconds
from shardscope.runlog.steps import WARM_UP_STEPS
from shardscope.spec.shares import MEASURED
from shardscope.spec.units import duration_text

if TYPE_CHECKING:
    from shardscope.spec.job import Job

MOST_STEPS = 50
"""Number of the newest steps with recorded spans that are compared."""
FEWEST_STEPS = 12
"""Minimum number of steps before a rank is called a straggler; two ranks need about as many to pass `CHANCE`."""
CHANCE = 1e-3
"""Maximum probability that one of several equally fast ranks is the slowest in so many steps by chance (sign test).
Simulated runs of 60 steps whose equal ranks vary by σ = 0.1, 0.2 and 0.3 (log-normal) raise an alarm at some step in 0,
3 and 2 of 1,000 runs of two ranks, and in none of 300 of four or of eight."""
SLOWER = 1.15
"""Minimum compute time of a straggler relative to the median of the other ranks. Ranks that share a machine's cores
differ by up to about 10 % in medians over ten steps."""
MOSTLY = 0.8
"""Minimum fraction of the steps in which a straggler is the slowest rank."""
_SERVES = "server_update"
"""Span of a parameter server's update, which runs in threads in parallel with the passes of a rank."""
_STAGE = "stage"
_FREE = "free its processor"
_SHARES = f"{_FREE}, or share the batch by speed with batch=ss.Batch(..., shares='measured')"


@dataclass(frozen=True)
class Circumstances:
    """Consequences of a straggler in a job.

    Attributes:
        job: The job; None if it is unknown, and its ranks wait for each other.
    """

    job: Job | None = None

    @property
    def unwaited_because(self) -> str | None:
        """Reason, as a clause, why the other ranks do not wait for a straggler; None if they do."""
        return None if self.job is None else self.job.strategy.unwaited_because

    @property
    def remedy(self) -> str:
        """Remedy, as a clause; suggests shares by speed only if the job supports them."""
        if self.job is None or self.unwaited_because is not None or self.job.batch.shares == MEASURED:
            return _FREE
        try:
            self.job.replace(batch=self.job.batch.replace(shares=MEASURED))
        except SpecError:
            return _FREE
        return _SHARES


@dataclass(frozen=True)
class Straggler(Alarm):
    """Alarm about a rank that takes longer to compute than the other ranks, which usually wait for it.

    Attributes:
        rank: The rank.
        phase: The phase of a step in which the rank loses most time, such as ``forward``.
        slower: Time of the rank in this phase relative to the median of the other ranks.
        wait_s: Time that a rank of median speed waits for the straggler in a step, in seconds; 0 if the strategy does
            not wait.
    """

    rank: int = 0
    phase: str = ""
    slower: float = 1.0
    wait_s: float = 0.0


@dataclass
class Phases:
    """Compute times of the newest steps of a run, by rank and phase."""

    _steps: deque[tuple[int, list[dict[str, float]], list[int]]] = field(
        default_factory=lambda: deque(maxlen=MOST_STEPS)
    )
    _num_seen: int = 0
    _newest: dict[int, Event] = field(default_factory=dict)
    """By rank, its newest event with a gradient since the last comparison, where ranks share the gradients of steps."""

    def take(self, number: int, row: Sequence[Event]) -> None:
        """Add a finished step: the events of all ranks, in rank order; ignored unless all have recorded spans.

        Ranks that share the gradients of steps are compared by gradient, once each of them has computed one.
        """
        if not all("spans" in event for event in row):
            return
        if any("gradients" in event for event in row):
            self._newest |= {event["rank"]: event for event in row if event.get("gradients", 1)}
            if len(self._newest) < len(row):
                return
            row = [self._newest[event["rank"]] for event in row]
            self._newest = {}
        while self._steps and self._steps[-1][0] >= number:  # a restarted run repeats steps
            self._steps.pop()
        self._num_seen += 1
        samples = [event["samples"] // event.get("gradients", 1) for event in row]
        self._steps.append((number, [*map(computed_phases, row)], samples))

    def straggler(
        self, roles: Mapping[int, str | None], circumstances: Circumstances | None = None
    ) -> Straggler | None:
        """Return the straggler; None if there is none, or too few steps have been recorded.

        Args:
            roles: Role of each rank in the strategy.
            circumstances: Consequences of a straggler in the job; None if the job is unknown, and its ranks wait for
                each other.
        """
        known = circumstances or Circumstances()
        skipped = max(0, WARM_UP_STEPS - (self._num_seen - len(self._steps)))
        steps = list(self._steps)[skipped:]
        ranks = [rank for rank in range(len(steps[0][1])) if _computes(steps, rank)] if steps else []
        if len(ranks) < 2 or len(steps) < FEWEST_STEPS:
            return None
        seconds = {rank: [sum(phases[rank].values()) for _, phases, _ in steps] for rank in ranks}
        middle = {rank: median(each) for rank, each in seconds.items()}
        slowest = max(ranks, key=lambda rank: middle[rank])
        others = [rank for rank in ranks if rank != slowest]
        usual_s = median(middle[rank] for rank in others)
        first = sum(max(ranks, key=lambda rank: seconds[rank][i]) == slowest for i in range(len(steps)))
        is_mostly = first >= MOSTLY * len(steps) and _chance(first, len(steps), len(ranks)) < CHANCE
        if middle[slowest] < SLOWER * usual_s or not is_mostly:
            return None
        phase, slower = _slowest_phase(steps, slowest, others)
        samples = [steps[-1][2][rank] for rank in (slowest, *others)]
        wait_s = middle[slowest] - usual_s if known.unwaited_because is None else 0.0
        found = Straggler("straggler", (), middle[slowest] / usual_s, "", slowest, phase, slower, wait_s)
        return replace(found, text=_text(found, roles.get(slowest) or "", samples, known))


def _chance(first: int, steps: int, ranks: int) -> float:
    """Return an upper bound on the probability that one of equally fast ranks is slowest in at least `first` steps."""
    ways = (comb(steps, count) * (ranks - 1) ** (steps - count) for count in range(first, steps + 1))
    found: float = ranks * sum(ways) / ranks**steps
    return found


_Steps = Sequence[tuple[int, list[dict[str, float]], list[int]]]


def _computes(steps: _Steps, rank: int) -> bool:
    return any(phases[rank].get("forward", 0.0) > 0 for _, phases, _ in steps)


def computed_phases(event: Event) -> dict[str, float]:
    """Return the time that a rank computes in a step by phase, in seconds; for one gradient where ranks share them.

    Time in which the rank also communicates counts. Waits within passes do not, nor does a server's update, which runs
    in parallel. The event must have recorded spans and at least one gradient.
    """
    phases = phase_seconds(event["spans"], event.get("waited"))
    return {name: each / event.get("gradients", 1) for name, each in phases.items() if name != _SERVES}


def _slowest_phase(steps: _Steps, rank: int, others: Sequence[int]) -> tuple[str, float]:
    """Return the phase in which a rank loses most time, and its time there relative to the median of other ranks."""

    def middle(of: int, phase: str) -> float:
        return median(phases[of].get(phase, 0.0) for _, phases, _ in steps)

    names = dict.fromkeys(name for _, phases, _ in steps for name in phases[rank])
    usual = {name: median(middle(other, name) for other in others) for name in names}
    lost = {name: middle(rank, name) - usual[name] for name in names}
    phase = max(lost, key=lambda name: lost[name])
    return phase, middle(rank, phase) / usual[phase] if usual[phase] > 0 else inf


def _text(found: Straggler, role: str, samples: Sequence[int], known: Circumstances) -> str:
    """Return the message of an alarm.

    Args:
        found: The alarm, without its message.
        role: Role of the rank in the strategy; empty if it has none.
        samples: Samples of the rank in a step, followed by those of the other ranks.
        known: Consequences of a straggler in the job.
    """
    times = "much" if found.slower == inf else f"{found.slower:.2g} times"
    others, wait, do = ("others", "wait", "do") if samples[2:] else ("other", "waits", "does")
    is_slower = f"{times} slower in {found.phase} than the {others}"
    waits = f"the {others} {wait} {duration_text(found.wait_s)} a step for it"
    if known.unwaited_because is not None:
        waits = f"the {others} {do} not wait for it: {known.unwaited_because}"
    if role.startswith(_STAGE):
        return (
            f"{role} (rank {found.rank}) is the bottleneck: it is {is_slower}, and {waits}; give it fewer layers with "
            "split=(...) or split='speed'"
        )
    own, *other = samples
    more, remedy = "", known.remedy
    if own > median(other):
        more = f", with {own} samples instead of {median(other):g}"
        remedy = "reduce its share in batch.shares"
    elif found.phase == "data":
        remedy = "look at its data source"
    return f"rank {found.rank}{f' ({role})' if role else ''} is {is_slower}{more}; {waits}; {remedy}"
