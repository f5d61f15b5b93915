"""A user's own training loop, as recorded by `ss.observe`: the fields of a job, as far as they are known."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.job import Job
from shardscope.spec.model.step import ParameterRow
from shardscope.spec.numbers import Count, CountOrZero, Total
from shardscope.spec.user_code import UserCode

Wrapper = Literal["none", "DDP", "FSDP2", "FSDP1"]
"""How torch distributes the work over the ranks: `DistributedDataParallel`, `fully_shard`,
`FullyShardedDataParallel`."""


class ShardedUnit(Spec):
    """One module that `fully_shard` (FSDP2) gathers and reduces as a whole."""

    gathered_element_bytes: Count
    """Bytes per element of gathered weights."""
    reduced_element_bytes: Count
    """Bytes per element of reduced gradients."""
    gathers: Literal[1, 2]
    """Number of all-gathers in one forward and backward pass: 2 if parameters are freed after the forward pass."""


class ObservedJob(Job):
    """What is known about an observed training loop, as the fields of a job.

    It can be read, listed, shown and predicted like any job, but not launched: the script that it describes is not part
    of it. Its JSON holds only the fields that are known; all others are at their defaults.
    """

    steps: CountOrZero = 0
    """Number of steps that the loop took; 0 while it is training."""
    observed: bool = True
    """Marks the JSON of an observed training loop."""
    wrapper: Wrapper = "none"
    """How the work is distributed; ``none`` for one process, or if the script calls the collectives itself."""
    backend: str = "none"
    """Backend of the collectives, ``gloo`` or ``nccl``; ``none`` without a process group."""
    parameters: tuple[ParameterRow, ...] = ()
    """The model's parameters with their unsharded shapes, in the module's order; `unit` is the index in `units`."""
    units: tuple[ShardedUnit, ...] = ()
    """FSDP2's units; empty under other wrappers."""
    weight_bytes: CountOrZero = 0
    """Bytes of one weight; 0 if the model mixes dtypes, or has no parameters."""
    buffer_bytes: Total = 0
    """Bytes of the model's buffers."""
    broadcast_bytes: Total = 0
    """Bytes of buffers that DDP broadcasts before a forward pass."""
    replicas: Count = 1
    """Number of groups of ranks, each of which holds the whole model in shards (HSDP)."""
    forwards: Count = 1
    """Number of forward and backward passes that a rank runs in its first step."""
    exchanges: Annotated[int, Field(ge=0)] = 1
    """Number of those passes after which gradients were exchanged."""

    @model_validator(mode="before")
    @classmethod
    def _suited_to_the_strategy(cls, fields: Any) -> Any:
        """Keep unknown fields at their defaults, instead of filling in a job's suggested values."""
        return {**fields, "observed": True} if isinstance(fields, dict) else fields  # also written to JSON

    @property
    def num_micro_batches(self) -> int:
        """Number of forward and backward passes that a rank runs in one step."""
        return self.forwards

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight, and of its gradient and moments."""
        return self.weight_bytes

    @property
    def user_functions(self) -> dict[str, UserCode]:
        """Empty: the script's functions are known by name only."""
        return {}

    @property
    def user_code(self) -> dict[str, UserCode]:
        """Empty: the script's code is not part of the run."""
        return {}

    def require_code(self) -> None:
        """Refuse to launch an observed training loop.

        Raises:
            SpecError: Always.
        """
        raise SpecError(
            f"{self.label!r} was observed in a training script (ss.observe), which is not part of the run, so it "
            "cannot be launched or reproduced from here; run the script again"
        )

    def _fields(self) -> dict[str, Any]:
        """Return the fields that are written to JSON: those that are known."""
        return self.model_dump(mode="json", exclude_unset=True)
