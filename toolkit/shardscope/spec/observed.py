"""A user's own training loop, recorded by `ss.observe` and described by the known fields of a job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardscope.errors import SpecError
from shardscope.spec._base import Spec
from shardscope.spec.job import Job
from shardscope.spec.job_parts import UserCode
from shardscope.spec.model.step import ParameterRow
from shardscope.spec.numbers import Count, CountOrZero, Degree, Total

Wrapper = Literal["none", "DDP", "FSDP2", "FSDP1", "mesh"]
"""How torch distributes the work over the ranks: `DistributedDataParallel`, `fully_shard`,
`FullyShardedDataParallel`; ``mesh`` if ranks also divide the model along other axes, as with `parallelize_module`."""


class ShardedUnit(Spec):
    """One module that `fully_shard` (FSDP2) gathers and reduces as a whole."""

    gathered_element_bytes: Count
    """Bytes per element of gathered weights."""
    reduced_element_bytes: Count
    """Bytes per element of reduced gradients."""
    gathers: Literal[1, 2]
    """Number of all-gathers in one forward and backward pass: 2 if parameters are freed after the forward pass."""


class ObservedJob(Job):
    """The known properties of an observed training loop, as the fields of a job.

    It can be read, listed, shown and predicted like any job, but not launched, because it does not contain the training
    script. Its JSON contains only the fields that are known; all others have their defaults.
    """

    world_size: Degree = 1
    """Number of ranks."""
    name: str | None = None
    """A name for the run, of any length; None derives it from the wrapper and the model."""
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
    """Bytes per element of the weights; 0 if the model mixes dtypes, or has no parameters."""
    gradient_bytes: Total | None = None
    """Bytes of the gradients of all trained parameters; None if unknown."""
    num_optimizers: Count = 1
    """Number of optimizers that update the model and keep state of their own."""
    stateful: tuple[Total, ...] | None = None
    """Indices of `parameters` with optimizer state; None if unknown, or if the optimizer also updates other tensors."""
    buffer_bytes: Total = 0
    """Bytes of the model's buffers."""
    broadcast_bytes: Total = 0
    """Bytes of buffers that DDP broadcasts before a forward pass."""
    replicas: Count = 1
    """Number of groups of ranks, each of which holds the whole model in shards (HSDP)."""
    forwards: Count = 1
    """Number of forward and backward passes that a rank runs in its first step."""
    exchanges: Annotated[int, Field(ge=0)] = 1
    """Number of passes, out of `forwards`, after which gradients were exchanged."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_for_strategy(cls, fields: Any) -> Any:
        """Keep unknown fields at their defaults, instead of filling in a job's suggested values."""
        return {**fields, "observed": True} if isinstance(fields, dict) else fields  # set for JSON

    @property
    def num_micro_batches(self) -> int:
        """Number of forward and backward passes that a rank runs in one step."""
        return self.forwards

    @property
    def element_bytes(self) -> int:
        """Bytes per element of the weights, gradients and optimizer moments."""
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
        """Raise an error, because an observed training loop cannot be launched.

        Raises:
            SpecError: Always.
        """
        raise SpecError(
            f"{self.label!r} was observed in a training script (ss.observe), which is not saved with the run, so it "
            "cannot be launched or reproduced; run the script again"
        )

    def _fields(self) -> dict[str, Any]:
        """Return the known fields, which are written to JSON."""
        return self.model_dump(mode="json", exclude_unset=True)
