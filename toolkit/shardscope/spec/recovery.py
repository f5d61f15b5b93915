"""Recovery of a run when one of its ranks fails."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from shardscope.errors import SpecError, quoted
from shardscope.spec._base import Spec
from shardscope.spec.numbers import Count, CountOrZero


class Recovery(Spec):
    """Recovery of a run when a rank dies or fails: all ranks are restarted, up to `restarts` times.

    The ranks resume in the same run directory: from the newest copy of their state in memory, if `replica_every` keeps
    any, else from the run's newest complete checkpoint, or from the first step if there is neither. If the only copy in
    memory is corrupt and there is no checkpoint, the run ends with an error. After an error in your own code, the
    ranks are restarted once, unless it occurs before the first step; if the error recurs at the same step, the run
    ends with that error.

    Example:
        >>> Recovery(2).restarts
        2
    """

    _positional = "restarts"

    restarts: CountOrZero = 3
    """Maximum number of restarts during the whole run; at least 0."""
    replica_every: Count | None = None
    """Steps between two copies of the ranks' state in the memory of this host (Linux), from which ranks restart without
    reading the disk; None makes no copies. On an emulated cluster, each rank also sends its copy to the next node, so
    the run survives the loss of one node. With 1, at most the step in flight is repeated. Training waits for each copy,
    and asynchronous strategies synchronise their ranks for it. A resize of an elastic run also copies the state to
    memory instead of saving a checkpoint, unless the memory is too small."""

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.replica_every is not None and not self.restarts:
            raise SpecError(
                f"recovery.replica_every={self.replica_every} needs restarts of at least 1; allow a restart, or leave "
                "replica_every out"
            )
        return self


def recovery_from(value: Any) -> Any:
    """Convert a value of `Job.recovery`: a `Recovery`, its JSON fields, a number of restarts, or None.

    Raises:
        SpecError: The value is none of these.
    """
    if value is None or isinstance(value, Recovery):
        return value
    if isinstance(value, dict):
        return Recovery.from_fields(value)
    if isinstance(value, str) and value.strip() == "none":
        return None
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if type(value) is not int:
        raise SpecError(
            f"recovery={quoted(value)} is not valid; give the number of restarts such as 3, ss.Recovery(3), or 'none'"
        )
    return Recovery(restarts=value)


RecoveryOrNumber = Annotated[Recovery | None, BeforeValidator(recovery_from)]
"""A field that accepts a `Recovery`, a number of restarts, or None."""
