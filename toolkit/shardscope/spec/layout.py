"""How a job is laid out on devices: every degree of parallelism and what trades memory for time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from shardscope.errors import SpecError
from shardscope.spec import layout_rules, registry
from shardscope.spec._base import Spec
from shardscope.spec.compression import Compression
from shardscope.spec.layout_compression import AnyLayoutCompression
from shardscope.spec.layout_optimizer import AnyLayoutOptimizer
from shardscope.spec.numbers import Count, CountOrZero, Degree
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.pipeline_schedule import PipelineSchedule, schedules
from shardscope.spec.precision import full_name

if TYPE_CHECKING:
    from shardscope.spec.cluster import Cluster
    from shardscope.spec.model import LayerTable, Transformer


def schedule_names() -> tuple[str, ...]:
    """The names of all schedules, in the order in which columns of layouts count them."""
    return _names_of(registry.all_of(PipelineSchedule))


@lru_cache(maxsize=8)
def _names_of(_known: tuple[type[PipelineSchedule], ...]) -> tuple[str, ...]:
    return tuple(schedule.name for schedule in schedules())


def searched_schedules() -> tuple[str, ...]:
    """Those that layouts can have: of which it is known in closed form what a rank holds."""
    return tuple(schedule.name for schedule in schedules() if schedule.held_terms is not None)


def _known_schedule(name: str) -> str:
    if PipelineSchedule(name).held_terms is None:
        raise SpecError(
            f"schedule={name!r} does not say what a rank holds in closed form; give its class held_terms, or use one "
            f"of {', '.join(searched_schedules())}"
        )
    return name


LayoutSchedule = Annotated[str, AfterValidator(_known_schedule)]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "states", "activations", "all"]
Precision = Literal["fp32", "bf16-autocast", "fp16-autocast", "fp16-mixed", "bf16-mixed", "fp8-mixed"]

RECOMPUTE_NAMES: tuple[str, ...] = get_args(Recompute)
OFFLOAD_NAMES: tuple[str, ...] = get_args(Offload)


class Layout(Spec):
    """One way to put a model on devices. The number of devices is data x tensor x pipeline x context."""

    data: Degree = 1
    """Replicas that each take a part of the batch."""
    tensor: Degree = 1
    """Devices that share every matrix of a layer."""
    pipeline: Degree = 1
    """Devices, one behind the other, that each hold some of the layers."""
    context: Degree = 1
    """Devices that each take a part of every sequence."""
    expert: Degree = 1
    """Devices over which the experts of a layer are spread; they are taken from data x context."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO's stage: 1 partitions the optimizer's state, 2 also gradients, 3 also parameters. Stage 2 reduces gradients
    for every micro-batch and 3 gathers parameters too, through a pipeline as well (as FSDP does; Megatron refuses 2 and
    3 there). With nothing to partition over, every stage is as 0."""
    shard: CountOrZero = 0
    """Ranks over which ZeRO partitions (HSDP, replicas of shards); 0 for all of data x context."""
    global_batch: Count = 1
    """Sequences in one optimizer step, over all replicas."""
    micro_batch: Count = 1
    """Sequences in one forward pass of one replica."""
    schedule: LayoutSchedule = "1f1b"
    """Order of a pipeline's passes; with pipeline=1 there is nothing to schedule."""
    virtual_stages: Count = 1
    """Stages that each pipeline rank holds."""
    recompute: Recompute = "none"
    """Activations that are computed again in the backward pass: none, attention's inner part, or every layer from its
    input."""
    flash_attention: bool = True
    """Attention in one kernel that never stores its scores."""
    sequence_parallel: bool = False
    """Split along the sequence, over the tensor ranks, what tensor parallelism leaves whole."""
    precision: Annotated[Precision, BeforeValidator(full_name)] = "bf16-mixed"
    """``bf16-mixed`` and ``fp16-mixed`` (``"bf16"`` and ``"fp16"`` are aliases) keep weights and gradients in 2 bytes
    beside an fp32 master copy, as Megatron and DeepSpeed do; ``bf16-autocast`` and ``fp16-autocast`` keep them in fp32,
    as the mixed precisions of a `Job` do."""
    optimizer: AnyLayoutOptimizer = Field(default_factory=lambda: Optimizer("adamw"))
    """The update rule. An optimizer, or a name of a job's optimizers or of those described in
    `spec.layout_optimizer`."""
    offload: Offload = "none"
    """What lives in the host's memory: the optimizer's state, all model states, saved activations, or all of it."""
    compression: AnyLayoutCompression = Field(default_factory=lambda: Compression("none"))
    """Compression of gradients between replicas, as far as its cost is known in closed form. A method, or its name."""

    @property
    def num_devices(self) -> int:
        """Devices that the layout takes."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one replica in one step."""
        return self.global_batch // (self.data * self.micro_batch)

    def axis(self, name: str) -> Any:
        """A field as tables show it: methods by their labels."""
        value = getattr(self, name)
        return getattr(value, "label", value)

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        return [(name, self.axis(name)) for name in type(self).model_fields]

    def check(self, model: Transformer | LayerTable | None = None, cluster: Cluster | None = None) -> None:
        """Refuse what cannot be: alone, on a model, on a cluster.

        Raises:
            SpecError: The first rule of `spec.layout_rules` that is broken, with the way out.

        Example:
            >>> Layout(data=2, global_batch=3).check()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            shardscope.errors.SpecError: global_batch=3 is not a multiple of data=2 x micro_batch=1 = 2; use ...
        """
        for problem in layout_rules.problems(self, model, cluster):
            raise SpecError(problem)
