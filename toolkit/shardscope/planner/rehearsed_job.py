"""The small job of a rehearsal, which keeps what it can of a plan's layout.

Jobs themselves decide what can be combined. The whole layout is tried first, if asked for on fewer and fewer ranks, and
then the layout without one or several of the settings in `_OPTIONAL`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from math import ceil, prod
from typing import Any, NamedTuple

from shardscope.analytic.layouts import Layouts
from shardscope.errors import SpecError, quoted
from shardscope.planner.setting import SearchSettings
from shardscope.prediction.step.step import cut, stage_layers
from shardscope.spec.compression import Compression
from shardscope.spec.divisors import divisors
from shardscope.spec.job import Job
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer
from shardscope.spec.models import MODELS, GPTConfig
from shardscope.spec.partition import even_split
from shardscope.spec.strategy import Strategy

_DEFAULT, _DEFAULT_MIXED = "gpt-nano", "moe-nano"
_MOST_MICRO_BATCHES = 16
"""Most micro-batches of a step, unless stages need more: further ones repeat what the first ones do."""
_OPTIONAL: Mapping[str, Any] = {
    "expert": 1, "context": 1, "sequence_parallel": False, "compression": Compression.by_name("none"),
}  # fmt: skip
"""Settings without which a layout can still be rehearsed, and their values if they are left out."""


class Small(NamedTuple):
    """A plan, and the small model that a rehearsal trains."""

    setting: SearchSettings
    layout: Layout
    name: str
    config: GPTConfig
    steps: int


class Kept(NamedTuple):
    """The job of a rehearsal."""

    small: Small
    layout: Layout
    """The plan's layout, without what the job leaves out."""
    job: Job
    notes: tuple[str, ...]
    """Sentences on what it leaves out of the plan."""


def kept_job(smalls: Sequence[Small], most: int, *, shrinks: bool) -> Kept:
    """Return the job that keeps most of a layout.

    Args:
        smalls: The plan, and a small model; followed by others, for a plan of which no job trains the first.
        most: Largest number of ranks.
        shrinks: Whether fewer ranks are tried if the layout cannot be a job on `most`.

    Raises:
        SpecError: No job keeps the data, tensor and pipeline axes. The reason is that for the whole layout.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise SpecError(f"world_size={quoted(most)} is not a number of ranks; give 2 or more")
    sizes = range(most, 1, -1) if shrinks and most > 1 else range(most, most + 1)
    why: SpecError | None = None
    for small in smalls:
        try:
            kept = _kept(small, sizes)
        except SpecError as error:
            why = why or error
        else:
            whole = smalls[0]._replace(layout=kept.layout)
            others = (
                ()
                if small is smalls[0]
                else (f"The rehearsal trains a model without experts: {_why_not(whole, sizes)}.",)
            )
            return kept._replace(notes=(*others, *kept.notes))
    assert why is not None
    raise why


def _kept(small: Small, sizes: Sequence[int]) -> Kept:
    """Return the job that keeps most of a layout; see `kept_job`."""
    layout, why = small.layout, None
    optional = [field for field, none in _OPTIONAL.items() if getattr(layout, field) != none]
    for fields in chain.from_iterable(combinations(optional, count) for count in range(len(optional) + 1)):
        kept = layout.replace(**{field: _OPTIONAL[field] for field in fields})
        if kept.num_devices == 1:
            continue
        try:
            job = _first_job(small, kept, sizes)
        except SpecError as error:
            why = why or error
        else:
            return Kept(small, kept, job, tuple(_left_out(small, kept, field, sizes) for field in fields))
    assert why is not None
    raise why


def _left_out(small: Small, kept: Layout, field: str, sizes: Sequence[int]) -> str:
    """Return the sentence on a setting that a job leaves out, with the reason why the job cannot have it."""
    value = getattr(small.layout, field)
    reason = _why_not(small._replace(layout=kept.replace(**{field: value})), sizes)
    return f"The rehearsal leaves out {field}={small.layout.axis(field)} of the plan: {reason}."


def _why_not(small: Small, sizes: Sequence[int]) -> str:
    """Return the reason why no job keeps a whole layout, without the remedy that the message names."""
    try:
        _first_job(small, small.layout, sizes)
    except SpecError as error:
        reason, _, remedy = str(error).rpartition("; ")
        return reason or remedy
    raise AssertionError("jobs that keep more are tried first")


def _first_job(small: Small, layout: Layout, sizes: Iterable[int]) -> Job:
    """Return the first job that keeps all axes of a layout, on at most one of the given numbers of ranks.

    Raises:
        SpecError: There is none; the reason is that for the first number.
    """
    why: SpecError | None = None
    for size in sizes:
        try:
            here = smaller(layout, size)
        except SpecError as error:
            raise why or error from None  # fewer ranks cannot keep the axes either
        for shard in dict.fromkeys((here.shard, 0)):
            try:
                return _job_of(small, here.replace(shard=shard))
            except SpecError as error:
                why = why or error
    assert why is not None
    raise why


def _job_of(small: Small, here: Layout) -> Job:
    fits = max(2, small.config.layers // here.pipeline)
    here = here.replace(virtual_stages=min(here.virtual_stages, fits))
    count = num_micro_batches(small.layout, here)
    zero = here.zero if here.data * here.context > 1 else 0  # there is nothing to share states with
    return Job(
        model=small.name, data="python-source", steps=small.steps, name=f"rehearsal-{small.name}",
        layout=here.replace(
            global_batch=here.data * count, micro_batch=1, precision="fp32",
            recompute_layers=0, zero=zero,
        ),
        **_stages(small, here),
    )  # fmt: skip


def num_micro_batches(planned: Layout, here: Layout) -> int:
    """Return the micro-batches of a step of the job: those of the plan, or fewer with the same bubble.

    The bubble of p ranks with v stages each and m micro-batches takes a time of (p - 1) / (m v) of the passes.
    """
    stages, most = here.pipeline, max(_MOST_MICRO_BATCHES, 2 * here.pipeline)
    same_bubble = ceil(
        planned.num_micro_batches * planned.virtual_stages * max(stages - 1, 1)
        / (max(planned.pipeline - 1, 1) * here.virtual_stages)
    )  # fmt: skip
    is_whole = (stages, here.virtual_stages) == (planned.pipeline, planned.virtual_stages)
    if is_whole and same_bubble <= most:
        return max(same_bubble, stages)
    return min(stages * ceil(same_bubble / stages), stages * (most // stages))


def smaller(layout: Layout, world_size: int) -> Layout:
    """Return the layout on at most `world_size` devices: with the same axes, but smaller degrees.

    The largest degree is divided by its smallest prime factor, or a prime number replaced with 2, until the layout
    fits. A degree above 1 stays above 1.

    Raises:
        SpecError: The axes need more devices, or `world_size` is not a number of ranks.

    Example:
        >>> small = smaller(Layout(data=16, tensor=8, zero=1), 8)
        >>> small.data, small.tensor, small.zero
        (2, 4, 1)
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise SpecError(f"world_size={quoted(world_size)} is not a number of ranks; give 2 or more")
    degrees = {name: getattr(layout, name) for name in ("data", "tensor", "pipeline", "context")}
    while prod(degrees.values()) > world_size:
        axis = max(degrees, key=lambda name: (not _is_prime(degrees[name]), degrees[name]))
        if degrees[axis] <= 2:
            planned = ", ".join(
                f"{name}={getattr(layout, name)}" for name, degree in degrees.items() if degree > 1
            )
            raise SpecError(
                f"a plan with {planned} needs {prod(degrees.values())} ranks to keep its axes, not "
                f"world_size={world_size}; give world_size={prod(degrees.values())}"
            )
        degrees[axis] = max(2, *divisors(degrees[axis], largest=degrees[axis] // 2))
    expert, ranks = layout.expert, degrees["data"] * degrees["context"]
    while expert > 2 and degrees["data"] % expert:
        expert = max(2, *divisors(expert, largest=expert // 2))
    is_same = ranks == layout.data * layout.context
    return layout.replace(**degrees, expert=expert, shard=layout.shard if is_same else 0)


def _is_prime(number: int) -> bool:
    return len(divisors(number)) <= 2


def _split(small: Small, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage of the small model, divided as in the plan.

    The number of layers that fit in a device's memory is scaled in proportion to the number of layers of the model.
    """
    if small.config.layers < stages:
        raise SpecError(
            f"a model of {small.config.layers} layers is too small for the plan's {stages} stages; give "
            f"model='gpt-small' or another model with at least {stages} layers"
        )
    blocks = even_split(small.config.layers, stages)
    model, cluster, calibration = small.setting
    if cluster.groups:
        table = Layouts.of([small.layout])
        found = cut(model, table, cluster, calibration, of_layers=small.config.layers)
        if found.stages.any():
            blocks = stage_layers(found, 0, small.config.layers)
    return blocks


def _stages(small: Small, layout: Layout) -> dict[str, Strategy]:
    """Return the job's strategy if its stages are cut as in the plan; nothing if the layout determines the strategy."""
    if layout.pipeline == 1 or layout.virtual_stages > 1:
        return {}
    return {"strategy": staged(layout, _split(small, layout.pipeline))}


def staged(layout: Layout, blocks: Sequence[int]) -> Strategy:
    """Return the strategy of a layout with a pipeline, whose first stage has the embedding and the last one the head.

    Args:
        layout: The layout.
        blocks: Number of the model's layers in each stage.
    """
    split = (1 + blocks[0], *blocks[1:-1], blocks[-1] + 1)
    stages = Strategy("pipeline", schedule=layout.schedule, virtual_stages=layout.virtual_stages, split=split)
    is_alone = layout.num_devices == layout.pipeline
    return stages if is_alone else Strategy("mesh", stages=stages)


def small_models(planned: Transformer, model: str | None) -> dict[str, GPTConfig]:
    """Return the models to try by name: the given one, or those that stand for the plan's model, the closest first."""
    own = [planned.name] if planned.name in MODELS else []
    found = {}
    for name in [model] if model else own or [*[_DEFAULT_MIXED] * bool(planned.mixture), _DEFAULT]:
        config = MODELS.get(name) if isinstance(name, str) else None
        if not isinstance(config, GPTConfig):
            gpts = ", ".join(repr(each) for each, known in MODELS.items() if isinstance(known, GPTConfig))
            raise SpecError(
                f"model={quoted(name)} is not a transformer that a job can train; use one of {gpts}"
            )
        found[name] = config
    return found
