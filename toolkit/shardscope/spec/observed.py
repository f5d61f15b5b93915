"""A training loop of the user's own that `ss.observe` recorded: the fields of a job, as far as they are known."""

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
"""How torch shares the work between the ranks: `DistributedDataParallel`, `fully_shard`, `FullyShardedDataParallel`."""


class ShardedUnit(Spec):
    """One module that `fully_shard` (FSDP2) gathers and reduces as a whole."""

    gathered_element_bytes: Count
    """Bytes of one gathered weight."""
    reduced_element_bytes: Count
    """Bytes of one reduced gradient element."""
    gathers: Literal[1, 2]
    """All-gathers for one forward and backward pass: 2 if parameters are freed after the forward pass."""


class ObservedJob(Job):
    """What is known of an observed training loop, in the terms of a job.

    It can be read, listed, shown and predicted like any job, but not launched: the script that it describes is not part
    of it. Its JSON holds only the fields that are known; all others are at their defaults.
    """

    steps: CountOrZero = 0
    """Steps that the loop took; 0 while it trains."""
    observed: bool = True
    """Marks the JSON of an observed training loop."""
    wrapper: Wrapper = "none"
    """How the ranks share the work; ``none`` for one process, or for collectives that the script calls itself."""
    backend: str = "none"
    """Backend of the collectives, ``gloo`` or ``nccl``; ``none`` without a process group."""
    parameters: tuple[ParameterRow, ...] = ()
    """The model's parameters, whole, in the module's order; `unit` is the index in `units`."""
    units: tuple[ShardedUnit, ...] = ()
    """FSDP2's units; empty under other wrappers."""
    weight_bytes: CountOrZero = 0
    """Bytes of one weight; 0 if the model mixes formats, or has no parameters."""
    buffer_bytes: Total = 0
    """Bytes of the model's buffers."""
    broadcast_bytes: Total = 0
    """Bytes of buffers that DDP broadcasts before a forward pass."""
    replicas: Count = 1
    """Groups of ranks that each hold the whole model in shards (HSDP)."""
    forwards: Count = 1
    """Forward and backward passes of a rank in its first step."""
    exchanges: Annotated[int, Field(ge=0)] = 1
    """Those of the first step after whose backward pass gradients were exchanged."""

    @model_validator(mode="before")
    @classmethod
    def _suited_to_the_strategy(cls, fields: Any) -> Any:
        """Leave fields that are not known at their defaults, in place of the job's own suggestions."""
        return {**fields, "observed": True} if isinstance(fields, dict) else fields  # also written to JSON

    @property
    def num_micro_batches(self) -> int:
        """Forward and backward passes of a rank in one step."""
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
        """The fields that are written to JSON: those that are known."""
        return self.model_dump(mode="json", exclude_unset=True)
