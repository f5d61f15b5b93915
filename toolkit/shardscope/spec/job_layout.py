"""Jobs from layouts: translates ``Job(layout=...)`` into the fields of a job.

A job stores no layout: `with_layout` returns the strategy, the number of ranks and the other fields that the layout
stands for, and `Job.layout` builds the layout back from them. A field that the layout leaves out is the job's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from shardscope.errors import SpecError, quoted
from shardscope.spec.compression import Compression
from shardscope.spec.job_parts import Batch, batch_from, full_name
from shardscope.spec.layout import Layout
from shardscope.spec.models import transformer_of
from shardscope.spec.optimizer import Optimizer
from shardscope.spec.strategy import Strategy

if TYPE_CHECKING:
    from shardscope.spec.job import Job

IN_LAYOUTS: Mapping[str, Any] = {"fp32": "fp32", "bf16-mixed": "bf16-autocast", "fp16-mixed": "fp16-autocast"}
"""Layout precision that corresponds to each job precision; all of them keep the weights in fp32."""
_IN_JOBS = {of_layout: of_job for of_job, of_layout in IN_LAYOUTS.items()}
_AXES = ("data", "context", "tensor", "pipeline")
_OF_MESH = ("context", "tensor", "pipeline", "sequence_parallel", "expert")
_STAGES = ("schedule", "virtual_stages")
_SIZES = ("global_batch", "micro_batch")


def with_layout(fields: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Return the fields of a job with ``layout`` replaced by the fields that it stands for.

    Args:
        fields: The given fields, of which ``layout`` is a `Layout` or its JSON fields.
        job: The job whose other fields, and the settings of its strategy that the layout leaves out, stay as they are;
            None for a new job.

    Raises:
        SpecError: The layout is invalid, no job corresponds to it, or a field is given twice with different values.
    """
    layout, given = (
        _layout(fields["layout"]),
        {name: each for name, each in fields.items() if name != "layout"},
    )
    for problem in (*_without_ranks(layout), *_without_setting(layout)):
        raise SpecError(problem)
    ranks = layout.num_devices
    if given.get("world_size", ranks) != ranks:
        degrees = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in _AXES if getattr(layout, axis) > 1)
        raise SpecError(
            f"world_size={quoted(given['world_size'])} is not the {ranks} rank{'s' * (ranks > 1)} of layout"
            f"{f' ({degrees})' if degrees else ''}; leave world_size out"
        )
    strategy = _strategy(layout, given.get("strategy"), None if job is None else job.strategy)
    own = given.get("batch", 64 if job is None else job.batch)
    batch = _batch(layout, own, is_given="batch" in given)
    if isinstance(batch, Batch):
        _check(layout, strategy, batch, given.get("model", None if job is None else job.model))
    return {**given, "world_size": ranks, "strategy": strategy, "batch": batch, **_settings(layout, given)}


def _layout(value: object) -> Layout:
    if isinstance(value, dict):
        return Layout.from_fields(value)
    if not isinstance(value, Layout):
        raise SpecError(
            f"layout={quoted(value)} is not a Layout; give one, such as ss.Layout(data=2, tensor=2, global_batch=16)"
        )
    return value


def _without_ranks(layout: Layout) -> Iterator[str]:
    """Yield a sentence for each combination of degrees that cannot be trained."""
    if layout.shard not in (0, layout.data * layout.context) and layout.zero == 1:
        yield f"layout.shard={layout.shard} with zero=1 is not available in jobs yet; leave shard out"


def _without_setting(layout: Layout) -> Iterator[str]:
    """Yield a sentence for each setting of a layout that no job has."""
    if layout.offload != "none":
        yield f"layout.offload={layout.offload!r} has no counterpart in a job; use offload='none'"
    if layout.recompute_layers:
        yield (
            f"layout.recompute_layers={layout.recompute_layers} has no counterpart in a job, which recomputes every "
            "layer or none; leave recompute_layers out"
        )
    if not layout.flash_attention:
        yield (
            "layout.flash_attention=False has no counterpart in a job, where torch chooses the attention kernel; use "
            "flash_attention=True"
        )
    if "precision" in layout.model_fields_set and layout.precision not in _IN_JOBS:
        yield (
            f"layout.precision={layout.precision!r} keeps weights in 2 bytes, which jobs do not; use "
            "'bf16-autocast', 'fp16-autocast' or 'fp32'"
        )
    if not isinstance(layout.optimizer, Optimizer):
        yield f"layout.optimizer={layout.axis('optimizer')!r} is not available in jobs; use for example 'adamw'"


def _settings(layout: Layout, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the layout states, and that have to be the same if they are also given themselves."""
    found = {}
    for name, read in (
        ("optimizer", Optimizer.resolve), ("compression", Compression.resolve),
        ("precision", full_name), ("recompute", str),
    ):  # fmt: skip
        if name not in layout.model_fields_set:
            continue
        found[name] = _IN_JOBS[layout.precision] if name == "precision" else getattr(layout, name)
        if name in given and read(given[name]) != found[name]:
            raise _twice(name, given[name], layout.axis(name))
    return found


def _batch(layout: Layout, own: Any, *, is_given: bool) -> Any:
    """Return the batch: the sizes that the layout states, and otherwise those of the job's own batch."""
    batch = batch_from(own)
    if not isinstance(batch, Batch):
        return own  # for the job's own message
    stated = {name: getattr(layout, name) for name in _SIZES if name in layout.model_fields_set}
    for name, size in stated.items():
        mine = getattr(batch, name) if is_given and name in batch.model_fields_set else None
        if mine not in (None, size):
            raise _twice(f"batch.{name}", mine, size)
    return batch.replace(**stated)


def _twice(field: str, given: object, stated: object) -> SpecError:
    return SpecError(
        f"{field}={quoted(given)} is given twice, as {quoted(given)} and, in layout, {quoted(stated)}; give it once"
    )


def _strategy(layout: Layout, value: Any, own: Strategy | None) -> Strategy:
    """Return the strategy of a layout, that of its only axis or a mesh of several; `own` is that of a job to change."""
    given: Strategy | None = None if value is None else Strategy.resolve(value)
    mesh: dict[str, Any] = {}
    stated = {
        name: getattr(layout, name) for name in _OF_MESH if name in _AXES or name in layout.model_fields_set
    }
    if own is not None:
        given = _kept(layout, own) if given is None else given
        kept = ("tensor_plan", "context_comm", "sequence_parallel", "expert")
        mesh = {name: each for name, each in own.settings.items() if name in kept and own.is_composite}
    if given is not None and given.is_composite:
        asked = {name: each for name, each in given.settings.items() if name in given.model_fields_set}
        for name, of_layout in stated.items():
            if asked.get(name, of_layout) != of_layout:
                raise SpecError(
                    f"strategy.{name}={asked[name]} is not layout.{name}={of_layout}; leave strategy.{name} out"
                )
        mesh |= asked
        given = mesh.get("data")
    elif _is_mesh(layout) and given is not None and _is_pipeline(given):
        mesh["stages"], given = given, None
    if given is not None:
        _check_given(layout, given)
    if _is_mesh(layout):
        stages = {"stages": _stages(layout, mesh.get("stages"), own)} if layout.pipeline > 1 else {}
        return Strategy("mesh", **{**mesh, "data": given or _of_data(layout), **stated, **stages})
    if given is not None:
        return given
    if layout.pipeline > 1:
        return _stages(layout, mesh.get("stages"), own)
    return Strategy("single") if layout.num_devices == 1 else _of_data(layout)


def _is_mesh(layout: Layout) -> bool:
    """Return whether a layout has several axes, or one that is an axis of a mesh only."""
    is_mesh = layout.tensor * layout.context * layout.expert > 1
    return is_mesh or (layout.pipeline > 1 and layout.data > 1)


def _is_pipeline(strategy: Strategy) -> bool:
    return "pipeline" in (strategy.degrees(2) or {})


def _stages(layout: Layout, given: Strategy | None, own: Strategy | None) -> Strategy:
    """Return the strategy of the pipeline axis: the given one, or that of a job to change with what the layout states.

    Raises:
        SpecError: The given strategy has another schedule than the layout states.
    """
    if given is not None:
        _require_degrees(layout, given, given.degrees(layout.pipeline) or {}, _STAGES)
        return given
    kept: Any = None if own is None else own.settings.get("stages") if own.is_composite else own
    if kept is None or not _is_pipeline(kept):
        return Strategy("pipeline", **{name: getattr(layout, name) for name in _STAGES})
    its = kept.degrees(layout.pipeline)
    changed = [
        name for name in _STAGES if name in layout.model_fields_set and its[name] != getattr(layout, name)
    ]
    return cast(
        "Strategy",
        kept.replace(
            **{name: getattr(layout, name) for name in (_STAGES if "schedule" in changed else changed)}
        ),
    )


def _kept(layout: Layout, own: Strategy) -> Strategy | None:
    """Return a job's own strategy of the data axis, or its pipeline, with what the layout states; None if it does not
    fit.
    """
    stated, data = layout.model_fields_set, own.of_data
    if layout.pipeline > 1 and not _is_mesh(layout):
        return None  # `_stages` keeps the job's own
    its = data.degrees(layout.num_devices) or {}
    stage = data.zero_stage or 0
    is_new = "zero" in stated and stage != layout.zero
    ranks = layout.data * layout.context  # context ranks share states with data ranks
    can_run = ranks > 1 or (_is_mesh(layout) and not stage)
    if not data.composes or is_new or not can_run or not (_is_mesh(layout) or its):
        return None
    if "shard" in stated and "replicas" in data.settings:
        return data.replace(replicas=ranks // (layout.shard or ranks))
    return data


def _of_data(layout: Layout) -> Strategy:
    """Return the strategy of the data axis: a ring, or the layout's ZeRO stage if there are ranks to share states."""
    ranks = layout.data * layout.context  # context ranks share states with data ranks
    if not layout.zero or ranks == 1:
        return Strategy("ring")
    groups = {"replicas": ranks // layout.shard} if layout.shard not in (0, ranks) else {}
    return Strategy(f"zero-{layout.zero}", **groups)


def _check_given(layout: Layout, given: Strategy) -> None:
    """Reject a given strategy that contradicts the layout.

    Raises:
        SpecError: The strategy has another ZeRO stage, schedule or number of replicas than the layout states.
    """
    stage = given.zero_stage or 0
    if "zero" in layout.model_fields_set and stage != layout.zero:
        raise SpecError(
            f"strategy={given.label!r} is ZeRO {stage}, but layout.zero={layout.zero}; use "
            f"strategy={_of_data(layout).label!r}, or leave one of them out"
        )
    if _is_mesh(layout):
        return  # the mesh checks which strategies can be its data axis
    degrees = given.degrees(layout.num_devices)
    if degrees is None:
        raise SpecError(
            f"strategy={given.label!r} has no corresponding layout; give world_size={layout.num_devices} instead of "
            "layout"
        )
    _require_degrees(layout, given, degrees, (*_AXES, "shard", *(_STAGES if layout.pipeline > 1 else ())))


def _require_degrees(
    layout: Layout, given: Strategy, degrees: Mapping[str, Any], names: tuple[str, ...]
) -> None:
    """Reject a given strategy whose degrees of these names are not those that the layout states."""
    found = Layout(**degrees)
    for name in names:
        its, asked = getattr(found, name), getattr(layout, name)
        if name in layout.model_fields_set and its != asked and {its, asked} != {0, layout.data}:
            raise SpecError(
                f"strategy={given.label!r} has {name}={its!r}, but layout.{name}={asked!r}; leave one of them out"
            )


def _check(layout: Layout, strategy: Strategy, batch: Batch, model: Any) -> None:
    """Reject a layout that is infeasible, with the sizes of the batch and those of a model of the catalogue.

    Raises:
        SpecError: The layout breaks a rule; the message states the first and a remedy.
    """
    micro_batch = batch.micro_batch or strategy.suggested_micro_batch(batch.global_batch, layout.num_devices)
    share = max(1, batch.global_batch // layout.data)
    sizes = {"global_batch": batch.global_batch, "micro_batch": micro_batch or share}
    layout.replace(**sizes).check(transformer_of(model))
