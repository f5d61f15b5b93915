"""A fault-injection plan: faults to cause in a run on purpose, to test how the run recovers.

The plan is separate from the job: `ss.launch(job, faults=...)`. Each fault is really injected, exactly once: not
again when a restart repeats its step.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

from shardscope.errors import SpecError, quoted, unknown_name
from shardscope.spec._base import Spec
from shardscope.spec.fault_kinds import KINDS, AnyFault, DropLink, FillDisk, Kill, Slow
from shardscope.spec.units import quantity

if TYPE_CHECKING:
    from shardscope.spec.cluster import EmulatedCluster
    from shardscope.spec.job import Job

_MOST = 10_000
"""Maximum number of faults in a plan."""


class Faults(Spec):
    """Faults to inject into a run, in any order. Immutable: each method returns a longer plan.

    Example:
        >>> faults = Faults().kill(rank=2, step=40).slow(node=1, factor=3, steps=(20, 60))
        >>> print(faults)
        kill rank=2 step=40; slow node=1 factor=3 steps=20-60
        >>> Faults.of(str(faults)) == faults
        True
    """

    _positional = "faults"

    faults: tuple[AnyFault, ...] = ()
    """The faults of the plan."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """Convert a value to a plan: a `Faults`, its text, its JSON fields, or None for no faults.

        Raises:
            SpecError: The value does not describe faults.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            return cls.from_fields(value)
        if isinstance(value, str):
            return cls.from_text(value)
        raise SpecError(
            f"faults={quoted(value)} is not valid; give for example ss.Faults().kill(rank=1, step=40)"
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read a plan from its text, such as ``"kill rank=2 step=40; slow rank=1 factor=3 steps=20-60"``.

        Raises:
            SpecError: A fault is unknown, or not valid.
        """
        found = []
        for part in filter(None, (part.split() for part in text.split(";"))):
            word = part[0].replace("-", "_")
            if word not in KINDS:
                raise unknown_name("fault", part[0], [*KINDS])
            found.append(KINDS[word].from_words(part[1:]))
        return cls(faults=tuple(found))

    def kill(
        self,
        rank: int | None = None,
        *,
        node: int | None = None,
        step: int | None = None,
        at: str | float | None = None,
        during: Literal["step", "checkpoint"] = "step",
    ) -> Self:
        """Kill a rank, or a node of an emulated cluster with all its ranks, with SIGKILL.

        Args:
            rank: The rank; give this or `node`.
            node: The node.
            step: The step before which the rank or node is killed.
            at: Instead of `step`: time after the ranks have begun their first step, in seconds or with a unit.
            during: ``"checkpoint"`` kills the rank while it writes its part of the first checkpoint at or after `step`.

        Raises:
            SpecError: The rank or node, or the time, is missing, given twice, or not valid.
        """
        return self._with(Kill(rank=rank, node=node, step=step, at_s=_seconds(at, "at"), during=during))

    def slow(
        self,
        rank: int | None = None,
        *,
        node: int | None = None,
        factor: float,
        steps: tuple[int, int | None] = (1, None),
    ) -> Self:
        """Slow down a rank, or all ranks of a node: computation takes `factor` times as long.

        Args:
            rank: The rank; give this or `node`.
            node: The node.
            factor: Factor by which the computation time grows.
            steps: First and last slow step; None as the last step stands for the job's last step.

        Raises:
            SpecError: A value is missing or not valid.
        """
        return self._with(Slow(rank=rank, node=node, factor=factor, steps=steps))

    def drop_link(
        self,
        link: str,
        *,
        step: int | None = None,
        at: str | float | None = None,
        lasts: str | float | None = None,
    ) -> Self:
        """Drop all traffic on a link of an emulated cluster for a while.

        Args:
            link: ``"n3"`` for the link of node 3 to its switch; ``"n0-n3"`` for the traffic between nodes 0 and 3.
            step: The step before which the link fails.
            at: Instead of `step`: time after the ranks have begun their first step, in seconds or with a unit.
            lasts: Duration of the outage, in seconds or with a unit; None for the rest of the run.

        Raises:
            SpecError: A value is missing or not valid.
        """
        return self._with(
            DropLink(link=link, step=step, at_s=_seconds(at, "at"), lasts_s=_seconds(lasts, "lasts"))
        )

    def fill_disk(self, rank: int, *, step: int) -> Self:
        """Fill a rank's disk while it writes its part of the first checkpoint at or after `step`.

        Raises:
            SpecError: A value is not valid.
        """
        return self._with(FillDisk(rank=rank, step=step))

    @classmethod
    def random(
        cls,
        *,
        world_size: int,
        steps: int | None = None,
        mtbf_steps: float | None = None,
        duration_s: str | float | None = None,
        mtbf_s: str | float | None = None,
        seed: int = 0,
    ) -> Self:
        """Return kills of random ranks at random times, from the mean time between failures of one rank.

        Failures are independent (a Poisson process), so with n ranks they are n times as frequent as with one.

        Args:
            world_size: Number of ranks.
            steps: Number of steps of the job; needed with `mtbf_steps`.
            mtbf_steps: Mean number of steps between two failures of one rank.
            duration_s: Instead of `steps`: length of the time in which failures occur, in seconds or with a unit.
            mtbf_s: Instead of `mtbf_steps`: mean time between two failures of one rank, in seconds or with a
                unit.
            seed: Seed of the random numbers.

        Raises:
            SpecError: The arguments do not fit together, or there would be more than 10,000 failures.

        Example:
            >>> print(Faults.random(world_size=4, steps=100, mtbf_steps=200, seed=3))
            kill rank=1 step=14; kill rank=3 step=37; kill rank=0 step=86
        """
        by_step = steps, mtbf_steps
        by_time = _seconds(duration_s, "duration_s"), _seconds(mtbf_s, "mtbf_s")
        if (None in by_step) == (None in by_time):
            raise SpecError(
                "random needs either steps and mtbf_steps, or duration_s and mtbf_s; give one pair"
            )
        length, mtbf = by_time if None in by_step else by_step
        assert length is not None
        assert mtbf is not None
        if not (world_size >= 1 and mtbf > 0 and length * world_size / mtbf <= _MOST):
            raise SpecError(
                f"world_size={world_size} with a mean of {mtbf:g} between failures in {length:g} is not valid: give at "
                f"least 1 rank, and at most {_MOST:,} expected failures"
            )
        source, now, found = random_module.Random(seed), 0.0, cls()
        while (now := now + source.expovariate(world_size / mtbf)) < length:
            rank = source.randrange(world_size)
            found = found.kill(rank, at=now) if None in by_step else found.kill(rank, step=int(now) + 1)
        return found

    def check(self, job: Job, cluster: EmulatedCluster | None = None, *, nodes: int | None = None) -> None:
        """Raise `SpecError` if a fault cannot occur in a run of this job.

        Args:
            job: The job.
            cluster: The emulated cluster that the job runs on; None for real machines.
            nodes: Number of real machines; None if the job runs on this machine alone.
        """
        count = len(cluster.nodes) if cluster is not None else nodes
        for fault in self.faults:
            fault.check(job, count, cluster)

    def slows(self, step: int) -> bool:
        """Return whether a rank is slow in `step`."""
        return any(isinstance(fault, Slow) and fault.is_on(step) for fault in self.faults)

    def _with(self, fault: AnyFault) -> Self:
        if len(self.faults) >= _MOST:
            raise SpecError(f"a plan has at most {_MOST:,} faults; leave some out")
        return type(self)(faults=(*self.faults, fault))

    @property
    def text(self) -> str:
        """Description of the faults as text."""
        return "; ".join(fault.text for fault in self.faults) or "no faults"

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))

    def __iter__(self) -> Iterator[AnyFault]:  # type: ignore[override]  # pydantic's own yields fields
        return iter(self.faults)

    def __len__(self) -> int:
        return len(self.faults)


def _seconds(value: str | float | None, field: str) -> float | None:
    return None if value is None else quantity(value, "s", field=field)
