"""The restarts of a run and the work lost, as the reducer keeps them from events of faults and restarts."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardscope.runlog.schema import Event


@dataclass
class Restart:
    """One restart of a run's ranks after a failure.

    Attributes:
        t: Time at which the agent started the ranks again, in Unix seconds.
        attempt: Number of the restart, from 1.
        cause: Description of the failure, as a sentence.
        failed_rank: The rank that had failed; None if unknown.
        failed_step: Step that the failed rank was in, or had finished last; None if unknown.
        step: Step after which training continued; 0 if it started from scratch.
        source: Source of the state: ``"disk"``, ``"replica"``, or ``"start"`` if training started from scratch.
        failed_t: Time at which the agent noticed the failure, in Unix seconds.
        lost_steps: Number of finished steps that had to be repeated.
        recovered_t: Time at which all ranks had finished their first step after the restart; None until then.
        first_steps_s: Durations of the first steps after the restart, which take longer than usual steps, in seconds.
    """

    t: float
    attempt: int
    cause: str
    failed_rank: int | None
    failed_step: int | None
    step: int
    source: str
    failed_t: float
    lost_steps: int = 0
    recovered_t: float | None = None
    first_steps_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, event: Event) -> Restart:
        """Return the restart that an event describes, before the ranks have recovered."""
        return cls(
            event["t"], event["attempt"], event["cause"], event.get("failed_rank"), event.get("failed_step"),
            event["step"], event["source"], event.get("failed_t", event["t"]),
        )  # fmt: skip

    def went_on_from(self, event: Event) -> None:
        """Set step and source from the resume event of rank 0 after this restart."""
        self.step, self.source = event["step"], event.get("source", self.source)

    @property
    def took_s(self) -> float | None:
        """Time from the failure until all ranks had finished their first step after it, in seconds; None until then."""
        return None if self.recovered_t is None else self.recovered_t - self.failed_t
