"""How a job is laid out on devices: all degrees of parallelism, and the options that trade memory for time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from shardscope.errors import SpecError
from shardscope.spec import layout_rules, registry
from shardscope.spec._base import Spec
from shardscope.spec.compression import AnyLayoutCompression, Compression
from shardscope.spec.job_parts import full_name
from shardscope.spec.layout_optimizer import AnyLayoutOptimizer
from shardscope.spec.numbers import Count, CountOrZero, Degree
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.pipeline_schedule import PipelineSchedule, schedules

if TYPE_CHECKING:
    from shardscope.spec.cluster import Cluster
    from shardscope.spec.model import LayerTable, Transformer


def schedule_names() -> tuple[str, ...]:
    """Return the names of all pipeline schedules; columns of layouts store the index of a name in this tuple."""
    return _names_of(registry.all_of(PipelineSchedule))


@lru_cache(maxsize=8)
def _names_of(_known: tuple[type[PipelineSchedule], ...]) -> tuple[str, ...]:
    return tuple(schedule.name for schedule in schedules())


def searched_schedules() -> tuple[str, ...]:
    """Return the names of the schedules that layouts accept: those that define `held_terms`."""
    return tuple(schedule.name for schedule in schedules() if schedule.held_terms is not None)


def _known_schedule(name: str) -> str:
    if PipelineSchedule(name).held_terms is None:
        raise SpecError(
            f"schedule={name!r} has no closed form for the micro-batches in flight on a rank; set held_terms in its "
            f"class, or use one of {', '.join(searched_schedules())}"
        )
    return name


LayoutSchedule = Annotated[str, AfterValidator(_known_schedule)]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "states", "activations", "all"]
Precision = Literal["fp32", "bf16-autocast", "fp16-autocast", "fp16-mixed", "bf16-mixed", "fp8-mixed"]

RECOMPUTE_NAMES: tuple[str, ...] = get_args(Recompute)
OFFLOAD_NAMES: tuple[str, ...] = get_args(Offload)


class Layout(Spec):
    """One way to distribute a model over devices. The number of devices is data x tensor x pipeline x context."""

    data: Degree = 1
    """Data-parallel degree: number of replicas, each of which processes a part of the batch."""
    tensor: Degree = 1
    """Tensor-parallel degree: number of devices over which each matrix of a layer is sharded."""
    pipeline: Degree = 1
    """Pipeline-parallel degree: number of devices, each of which holds some of the layers."""
    context: Degree = 1
    """Context-parallel degree: number of devices, each of which processes a part of every sequence."""
    expert: Degree = 1
    """Expert-parallel degree: number of devices over which a layer's experts are distributed. It must
    divide data x context."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 partitions the optimizer state, 2 also gradients, 3 also parameters. Stage 2 reduces gradients for
    every micro-batch, and stage 3 also gathers parameters for each, even in a pipeline (as FSDP does; Megatron does
    not support stages 2 and 3 in pipelines). With one rank to partition over, every stage is the same as 0."""
    shard: CountOrZero = 0
    """Number of ranks over which ZeRO partitions; 0 for all of data x context. A smaller number replicates the shards
    (HSDP)."""
    global_batch: Count = 1
    """Sequences in one optimizer step, over all replicas."""
    micro_batch: Count = 1
    """Sequences in one forward pass of one replica."""
    schedule: LayoutSchedule = "1f1b"
    """Pipeline schedule. It has no effect with pipeline=1."""
    virtual_stages: Count = 1
    """Number of stages on each pipeline rank."""
    recompute: Recompute = "none"
    """What the backward pass recomputes: nothing, core attention, or every layer from its input."""
    recompute_layers: CountOrZero = 0
    """Number of layers, from the first of each stage, that recompute="full" recomputes; 0, or a number larger than the
    stage's, means all layers (in Megatron, 0 means none). Megatron calls it ``--recompute-num-layers``, with
    ``--recompute-method block``."""
    flash_attention: bool = True
    """Use fused attention: one kernel that never stores the attention scores."""
    sequence_parallel: bool = False
    """Also shard, along the sequence, the activations that tensor parallelism would replicate on its ranks."""
    precision: Annotated[Precision, BeforeValidator(full_name)] = "bf16-mixed"
    """``bf16-mixed`` and ``fp16-mixed`` (``"bf16"`` and ``"fp16"`` are aliases) keep weights and gradients in 2 bytes
    and an fp32 master copy, as Megatron and DeepSpeed do. ``bf16-autocast`` and ``fp16-autocast`` keep them in fp32, as
    the mixed precisions of a `Job` do."""
    optimizer: AnyLayoutOptimizer = Field(default_factory=lambda: Optimizer("adamw"))
    """The update rule. An optimizer, or the name of one that jobs accept or that `spec.layout_optimizer` lists."""
    offload: Offload = "none"
    """Tensors offloaded to host memory: none, the optimizer state, all model states, saved activations, or both model
    states and activations."""
    compression: AnyLayoutCompression = Field(default_factory=lambda: Compression("none"))
    """Compression of gradients between replicas, for methods with a closed-form cost. A method, or its name."""

    @property
    def num_devices(self) -> int:
        """Number of devices that the layout needs."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches that each replica processes in one step."""
        return self.global_batch // (self.data * self.micro_batch)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; fields that were left out stay so (see `Job`)."""
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def axis(self, name: str) -> Any:
        """Return the value of a field for tables: the label if the value is a method, else the value itself."""
        value = getattr(self, name)
        return getattr(value, "label", value)

    def __repr_args__(self) -> Iterable[tuple[str, Any]]:
        return [(name, self.axis(name)) for name in type(self).model_fields]

    def check(self, model: Transformer | LayerTable | None = None, cluster: Cluster | None = None) -> None:
        """Reject a layout that is infeasible by itself, for the given model, or on the given cluster.

        Raises:
            SpecError: The layout breaks a rule in `spec.layout_rules`; the message states the first and a remedy.

        Example:
            >>> Layout(data=2, global_batch=3).check()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            shardscope.errors.SpecError: global_batch=3 is not a multiple of data=2 x micro_batch=1 = 2; use ...
        """
        for problem in layout_rules.problems(self, model, cluster):
            raise SpecError(problem)


def short(layout: Layout) -> str:
    """Return a one-line summary of a layout: ``data 64 · tensor 8 · pipeline 32 · ZeRO 1 · zbv · micro-batch 1``."""
    degrees = {
        "data": layout.data,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "expert": layout.expert,
    }
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if layout.zero:
        parts.append(f"ZeRO {layout.zero}" + (f" over {layout.shard}" if layout.shard else ""))
    if layout.pipeline > 1:
        held = f" ×{layout.virtual_stages}" if PipelineSchedule(layout.schedule).most_stages is None else ""
        parts.append(layout.schedule + held)
    parts.append(f"micro-batch {layout.micro_batch}")
    parts.append("no recomputation" if layout.recompute == "none" else f"{layout.recompute} recomputation")
    if layout.recompute_layers:
        each = " per stage" if layout.pipeline > 1 else ""
        parts[-1] += f" of {layout.recompute_layers} layer{'s' * (layout.recompute_layers > 1)}{each}"
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    parts += [text for text, on in ((f"offload {layout.offload}", layout.offload != "none"),
                                    (layout.axis("compression"), layout.compression.is_on)) if on]  # fmt: skip
    return " · ".join(parts)
