"""Rehearsal of a plan: a small job on an emulated cluster, in which each part takes its planned share of a step.

A plan is for devices that this machine does not have, and for a model that is too large to train here. A rehearsal
trains a small model in slow motion. With the slowdown T (seconds in the rehearsal per second of the plan), each rate of
the emulated cluster follows from the plan:

    FLOP/s of a node          FLOPs of the small model / (T × planned time of the passes on that device)
    updates of a node         bytes of a small update / (T × planned time of the update), faster on faster memory
    rate of a link            planned rate × (bytes of a small message / planned bytes of a message) / T

A step of the job may have fewer micro-batches than one of the plan. What happens once in a step, as the update does, is
then shortened by the same factor. Different devices keep their proportions, and the run shows whether the planned
division of the layers pays off. Parts that are relatively larger in a small model, or that differ between job and plan,
make steps longer or shorter. T is therefore chosen so that the predicted step of the job takes the requested time, and
a note names the parts of a step whose share then differs from the plan. Links inside a node are this machine's own, and
memory is not emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardscope.analytic.compute.flops import model_flops
from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.states import known_recipe
from shardscope.analytic.recomputation import layers_of_stage
from shardscope.analytic.terms import Term
from shardscope.calibration.host_calibration import chosen
from shardscope.errors import SpecError, quoted
from shardscope.machine import usable_cores
from shardscope.planner.emulated import EmulatedDevices
from shardscope.planner.jobs import devices_of, job_of, step_parts
from shardscope.planner.proportions import proportion_notes
from shardscope.planner.rehearsed_job import Small, kept_job, small_models
from shardscope.planner.setting import SearchSettings
from shardscope.prediction.job import predict_job
from shardscope.prediction.rates import relative_speed
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.step import StepParts, step_time, step_work
from shardscope.prediction.traced import traced
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.cluster.emulated import PAYLOAD
from shardscope.spec.divisors import divisors
from shardscope.spec.job import Job
from shardscope.spec.layout import Layout
from shardscope.spec.link import PACED_UP_TO
from shardscope.spec.models import GPTConfig
from shardscope.spec.units import flops_text, seconds_text

_BYTES = 4
"""Bytes of one element in the job, which trains in fp32."""
_MOST_BUSY = 0.5
"""Fraction of this machine's FLOP/s that the emulated devices may need in total without a warning."""
_EXACT, _TRIES = 1e-6, 8
"""Relative error of the predicted step time that ends the search for the slowdown, and maximum number of tries."""


@dataclass(frozen=True)
class Rehearsal:
    """A plan in slow motion: ``ss.launch(rehearsal.job, rehearsal.cluster)`` trains it on this machine.

    Attributes:
        job: The small job.
        cluster: The emulated cluster, one rank for each device.
        planned_s: Step time of the plan, in seconds.
        step_time_s: Predicted step time of the job on the emulated cluster, in seconds.
        notes: Sentences that say what the rehearsal leaves out, and where it differs from the plan.
        planned_axes_s: Time that a step of the plan waits along each axis, in seconds; the pipeline's includes its
            bubble.
    """

    job: Job
    cluster: EmulatedCluster
    planned_s: float
    step_time_s: float
    notes: tuple[str, ...] = ()
    planned_axes_s: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        told = " ".join(self.notes)
        return (
            f"<Rehearsal: {self.job.strategy.label} of {self.job.model} on {self.cluster.name}; a planned step of "
            f"{seconds_text(self.planned_s)} takes {seconds_text(self.step_time_s)} here"
            f"{f'. {told}' if told else ''}>"
        )


def rehearsal_of(
    setting: SearchSettings, layout: Layout, *, model: str | None, step_s: float, steps: int,
    world_size: int | None = None,
) -> Rehearsal:  # fmt: skip
    """Return the rehearsal of a layout; see `Plans.rehearsal` for the arguments and errors."""
    if isinstance(step_s, bool) or not isinstance(step_s, int | float) or not 0 < step_s < float("inf"):
        raise SpecError(f"step_s={quoted(step_s)} is not a step time; give a number of seconds above 0")
    if isinstance(setting.cluster, EmulatedDevices):
        return _as_planned(setting, layout, model=model, steps=steps, world_size=world_size)
    _check(layout, setting.cluster)
    table = Layouts.of([layout])
    planned = step_time(setting.model, table, setting.cluster, setting.calibration)
    smalls = [
        Small(setting, layout, name, config, steps)
        for name, config in small_models(setting.model, model).items()
    ]
    kept = kept_job(
        smalls, layout.num_devices if world_size is None else world_size, shrinks=world_size is not None
    )
    job, small, left_out = kept.job, kept.small.config, kept.notes
    if job.world_size != layout.num_devices and setting.cluster.groups:
        why = f"on unlike devices each rank stands for one of the plan's {layout.num_devices} devices"
        if world_size is None:
            raise SpecError(
                f"{why}, but its axes cannot all be kept: {'; '.join(left_out)}; rehearse a plan without that axis"
            )
        raise SpecError(f"world_size={world_size} is not possible: {why}; leave world_size out")
    planned_s = float(planned.total[0])
    staged, found = _slowed(
        lambda slow: _staged(setting, layout, job, small, planned=planned, slow=slow),
        job,
        step_s,
        step_s / planned_s,
    )
    notes = (
        *staged.notes,
        *left_out,
        *_job_notes(setting, layout, job.layout()),
        *proportion_notes(planned, found),
    )
    return Rehearsal(job, staged.cluster, planned_s, found.value, notes, dict(_axes_s(layout, planned)))


def _axes_s(layout: Layout, planned: StepParts) -> Iterator[tuple[str, float]]:
    """Yield each axis of a layout with the time that a planned step waits along it, in seconds.

    Context ranks exchange gradients as data ranks do.
    """
    waits = {
        "data": planned.data_comm, "tensor": planned.tensor_comm, "pipeline": planned.pipeline_comm + planned.bubble,
        "context": planned.context_comm, "expert": planned.expert_comm,
    }  # fmt: skip
    degrees = {**{axis: getattr(layout, axis) for axis in waits}, "data": layout.data * layout.context}
    yield from ((axis, float(wait[0])) for axis, wait in waits.items() if degrees[axis] > 1)


def _as_planned(
    setting: SearchSettings, layout: Layout, *, model: str | None, steps: int, world_size: int | None
) -> Rehearsal:
    """Return the job of a plan for an emulated cluster.

    Raises:
        SpecError: The caller asks for another model or another number of ranks.
    """
    given = {"model": (model, setting.model.name), "world_size": (world_size, layout.num_devices)}
    for name, (asked, planned) in given.items():
        if asked not in (None, planned):
            raise SpecError(
                f"{name}={quoted(asked)} is not the {planned!r} of a plan for an emulated cluster, which is rehearsed "
                f"as it is; leave {name} out"
            )
    job = job_of(setting.model, layout).replace(steps=steps)
    planned = step_parts(setting, Layouts.of([layout]))
    step_time_s = float(planned.total[0])
    axes_s = dict(_axes_s(layout, planned))
    return Rehearsal(job, devices_of(setting).launched_on, step_time_s, step_time_s, planned_axes_s=axes_s)


def _slowed(
    staged_at: Callable[[float], _Staged], job: Job, step_s: float, slow: float
) -> tuple[_Staged, Term]:
    """Return the cluster on which a step of the job takes `step_s`, and the predicted time of the step.

    The step time grows almost linearly with the slowdown, from an offset that does not depend on the cluster, so each
    new slowdown is read off the line through the last two results (secant method).

    Args:
        staged_at: Function that returns the cluster for a slowdown.
        job: The job.
        step_s: The desired step time, in seconds.
        slow: Slowdown of the first try.

    Raises:
        SpecError: A step takes longer than `step_s` at any speed of the cluster.
    """
    line, before = step_s / slow, (0.0, 0.0)
    for _ in range(_TRIES):
        staged = staged_at(slow)
        found = predict_job(job, staged.cluster).time
        assert found is not None  # every transformer that jobs train has a step time on an emulated cluster
        if abs(found.value / step_s - 1) < _EXACT:
            return staged, found
        line, before = (found.value - before[1]) / (slow - before[0]), (slow, found.value)
        slow += (step_s - found.value) / line
        if slow <= 0:
            break
    least_s = before[1] - line * before[0]
    raise SpecError(
        f"step_s={step_s} is too short for {job.world_size} ranks on this machine, which needs about "
        f"{seconds_text(least_s)} for messages and fixed costs, however fast the emulated cluster is; give a larger "
        "step_s"
    )


class _Staged(NamedTuple):
    """The emulated cluster of a rehearsal, and notes on what it leaves out."""

    cluster: EmulatedCluster
    notes: tuple[str, ...]


def _staged(
    setting: SearchSettings, layout: Layout, job: Job, small: GPTConfig, *, planned: StepParts, slow: float
) -> _Staged:
    """Return the cluster whose nodes and links are slower than planned by the factor `slow`."""
    held = _held(job, small)
    flops = held.flops / slow
    fewer = layout.num_micro_batches / job.layout().num_micro_batches
    moved = _moved_bytes(job, held) * fewer / (slow * float(planned.optimizer[0]))
    per_node = _per_node(job.layout(), layout, setting.cluster)
    nodes = _nodes(setting, Layouts.of([layout]), flops, moved)
    nodes = nodes[: job.world_size // per_node] if job.world_size < layout.num_devices else nodes
    bandwidth, latency_s = _link(setting, layout, small, held, planned=planned, slow=slow, fewer=fewer)
    cluster = Cluster.emulated(
        nodes=len(nodes), per_node=per_node, bandwidth=min(bandwidth, PACED_UP_TO), latency=latency_s,
        node_flops={node: rates.flops for node, rates in enumerate(nodes)},
        node_memory_bandwidth={node: rates.memory_bandwidth for node, rates in enumerate(nodes)},
    )  # fmt: skip
    notes = (*_link_note(nodes, bandwidth), *_speed_note(per_node * sum(rates.flops for rates in nodes)))
    return _Staged(cluster, notes)


class _Held(NamedTuple):
    """The part of the small model that a tensor, context or expert rank computes, before it is cut into stages."""

    flops: float
    """FLOPs of a forward and a backward pass of one sequence."""
    num_params: int


def _held(job: Job, small: GPTConfig) -> _Held:
    flops, found = float(model_flops(small.transformer(str(job.model)), 1)), traced(job)
    return _Held(flops * found.table.flops / found.model.flops, found.table.num_params)


def _per_node(here: Layout, planned: Layout, cluster: Cluster) -> int:
    """Return the number of ranks on a node: as in the cluster, or fewer.

    They are whole tensor and context groups, if those of the plan are.
    """
    if here.num_devices == planned.num_devices:
        return cluster.per_node
    inner = (planned.tensor, planned.tensor * planned.context), (here.tensor, here.tensor * here.context)
    group = max((size for whole, size in zip(*inner, strict=True) if whole <= cluster.per_node), default=1)
    sizes = divisors(here.num_devices // group, largest=max(1, cluster.per_node // group))
    several = [size for size in sizes if cluster.nodes == 1 or group * size < here.num_devices]
    return group * max(several, default=1)


class _Rates(NamedTuple):
    """Rates of the ranks of a node, in FLOP/s and in bytes per second."""

    flops: float
    memory_bandwidth: float


def _nodes(setting: SearchSettings, table: Layouts, flops: float, moved_bytes_per_s: float) -> list[_Rates]:
    """Return the rates of all nodes, in pipeline order.

    Args:
        setting: Model, cluster and calibration.
        table: The layout, as a table of one row.
        flops: FLOP/s of an emulated device whose passes are planned to take one second.
        moved_bytes_per_s: Rate of updates of the slowest device, in bytes per second.
    """
    groups = setting.cluster.groups or (setting.cluster,)
    slowest = min(group.device.memory_bandwidth for group in groups)
    found = []
    for group in groups:
        updates = moved_bytes_per_s * group.device.memory_bandwidth / slowest
        found += [_Rates(flops / _pass_s(setting, table, group), updates)] * group.nodes
    return found


def _pass_s(setting: SearchSettings, table: Layouts, group: Cluster) -> float:
    """Return the planned time of one micro-batch in the whole model on the devices of a group, in seconds.

    This includes the forward and backward pass, embedding, head and waits for kernel launches, but no messages.
    """
    alone = setting.cluster.replace(device=group.device, intra=group.intra, groups=())
    one = step_work(setting.model, table, alone, setting.calibration, None).micro.take(slice(0, 1))
    held = np.ceil(setting.model.layers / table.pipeline[0])
    in_stage = one["forward compute"] + one["backward compute"] + one["waiting"]
    whole = in_stage / held * setting.model.layers + one["edge compute"]
    return float(np.ravel(whole)[0])


def _link_note(nodes: Sequence[_Rates], bandwidth: float) -> Iterator[str]:
    if len(nodes) == 1:
        yield "All devices are in one node, whose links are not emulated."
    elif bandwidth > PACED_UP_TO:
        yield "Links are as fast as can be emulated, which is slower than planned; give a larger step_s."


def _speed_note(needed: float) -> Iterator[str]:
    """Yield a warning if this machine's cores may be slower than all emulated devices together."""
    host = chosen().calibration
    here = usable_cores() * host.value("flops") * relative_speed(host).flops
    if needed > _MOST_BUSY * here:
        yield (
            f"The ranks compute {flops_text(needed)} together, too much for the {flops_text(here)} of this machine; "
            "give a larger step_s or a smaller model."
        )


def _job_notes(setting: SearchSettings, layout: Layout, here: Layout) -> Iterator[str]:
    """Yield a sentence for each setting of the plan that differs in the job."""
    if layout.shard not in {here.shard, layout.data * layout.context}:
        yield f"The job shares its states over all replicas, and the plan over groups of {layout.shard}."
    if layout.num_micro_batches != here.num_micro_batches:
        yield f"The job has {here.num_micro_batches} micro-batches in a step, and the plan {layout.num_micro_batches}."
    if layout.virtual_stages != here.virtual_stages:
        yield f"The job has {here.virtual_stages} stages on a rank, and the plan {layout.virtual_stages}."
    if layout.recompute_layers:
        held = layers_of_stage(setting.model.layers, layout.pipeline * layout.virtual_stages)
        yield (
            f"The job recomputes every layer, but the plan only {layout.recompute_layers} of the {held} "
            "layers of a stage."
        )


def _check(layout: Layout, cluster: Cluster) -> None:
    """Reject layouts without a corresponding job, and clusters that cannot be emulated."""
    if layout.num_devices == 1:
        raise SpecError(
            "a plan for one device has nothing to rehearse; plan for a cluster with several devices"
        )
    if layout.offload != "none":
        raise SpecError(
            f"a plan with offload={layout.offload!r} cannot be rehearsed, because jobs on CPU ranks have nowhere to "
            "offload to; plan with fix={'offload': 'none'}"
        )
    sizes = {group.per_node for group in cluster.groups or (cluster,)}
    if len(sizes) > 1:
        raise SpecError(
            f"groups with {' and '.join(map(str, sorted(sizes)))} devices per node cannot be rehearsed, because "
            "nodes of an emulated cluster have equally many ranks; give all groups the same per_node"
        )


def _moved_bytes(job: Job, held: _Held) -> float:
    """Return the bytes that the update of one rank reads and writes, if all ranks update equally many elements."""
    layout = job.layout()
    parts = layout.pipeline * (layout.data * layout.context if layout.zero else 1)
    return job.optimizer.states.moved_bytes_per_param(_BYTES) * held.num_params / parts


def _link(
    setting: SearchSettings, layout: Layout, small: GPTConfig, held: _Held, *, planned: StepParts, slow: float,
    fewer: float,
) -> tuple[float, float]:  # fmt: skip
    """Return the rate of a node's link, in bytes per second with headers, and its latency in seconds.

    Pipeline stages send activations, for which the plan assumes no link latency; replicas send gradients; ranks of a
    context, expert or tensor group send activations. In a plan with several axes, the rate is that of the messages for
    which the plan waits longest; those of a tensor group stay in a node, unless there is no other axis.
    """
    model, cluster, calibration = setting
    machine = Machine.of(cluster, calibration, layout.precision)
    waits = {
        "pipeline": planned.pipeline_comm, "data": planned.data_comm, "context": planned.context_comm,
        "expert": planned.expert_comm,
    }  # fmt: skip
    degrees = {**{name: getattr(layout, name) for name in waits}, "data": layout.data * layout.context}
    axis = max(
        (name for name in waits if degrees[name] > 1),
        key=lambda name: float(waits[name][0]),
        default="tensor",
    )
    there: float = layout.micro_batch * model.seq * model.hidden * machine.value_bytes
    here = small.seq * small.hidden * _BYTES
    if axis == "pipeline":
        rate, latency_s = cluster.inter.bandwidth * calibration.pipeline_efficiency, 0.0
    else:
        group, stride = (layout.tensor, 1) if axis == "tensor" else (degrees[axis], layout.tensor)
        rate, latency_s = map(float, machine.link(group, stride))
    if axis == "data":
        there = model.num_params * known_recipe(layout.precision).gradient / layout.tensor
        here = held.num_params * _BYTES
        if layout.zero < 2:  # gradients are reduced once in a step, not for each micro-batch
            slow /= fewer
    return rate * (here / there) / slow / PAYLOAD, latency_s * slow
