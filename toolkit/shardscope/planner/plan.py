"""The planner's entry point, `plan`, which searches all layouts of a model on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from numbers import Integral
from typing import Any, get_args

from shardscope.calibration.host_calibration import AnyCalibration
from shardscope.calibration.software import software_of
from shardscope.errors import SpecError, quoted, require, unknown_name
from shardscope.planner.asked import Asked
from shardscope.planner.candidates import SharedSettings
from shardscope.planner.emulated import EmulatedDevices
from shardscope.planner.filter import fit_of
from shardscope.planner.plans import Plans
from shardscope.planner.pools import Pool, layout_at, searched
from shardscope.planner.rank import Objective, objective_weights
from shardscope.planner.rules import REASONS
from shardscope.planner.search import Found
from shardscope.planner.setting import capacity
from shardscope.planner.shipped import SoftwareLimits, shipped_space, suggested_spaces
from shardscope.planner.space import SearchAxes
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.job_parts import Batch, full_name
from shardscope.spec.layout import Layout, Precision, short
from shardscope.spec.layout_optimizer import LayoutOptimizer, layout_optimizer, optimizer_names
from shardscope.spec.layout_rules import recomputation_faults
from shardscope.spec.model import LayerTable, Model, Transformer
from shardscope.spec.numbers import LARGEST_COUNT
from shardscope.spec.units import gib_text

TOKENS_A_STEP = 1 << 22
"""Maximum number of tokens in the default global batch, similar to the largest published runs."""
MOST_GROWTH = 64
_OF_JOBS: Mapping[str, Any] = {"offload": ("none",), "recompute_layers": (0,)}
"""Values of axes on which jobs have no choice; tried on emulated clusters unless the caller names the axis."""
ANY = "any"
"""Value of `software` that also searches layouts that no framework supports."""


def plan(
    model: Model | str,
    cluster: Cluster | EmulatedCluster | str,
    objective: Objective = "time",
    *,
    global_batch: int | None = None,
    top: int | None = 20,
    fix: Mapping[str, Any] | None = None,
    space: SearchAxes | None = None,
    precision: str | Sequence[str] | None = None,
    optimizer: LayoutOptimizer | str | Sequence[LayoutOptimizer | str] = "adamw",
    flash_attention: bool | Sequence[bool] = True,
    calibration: AnyCalibration | None = None,
    software: str | None = None,
) -> Plans:
    """Search all layouts of `model` on `cluster` and rank those that fit.

    The search is exhaustive: a layout is skipped early only if `top` other layouts are certainly faster and leave at
    least as much memory free. The exception is the number of recomputed layers; see `SearchAxes.recompute_layers`.
    Lossy gradient compression changes the result of training, so it is tried only if `fix` or `space` includes it.
    Offloading to the host is tried only if `fix` or `space` includes it or nothing fits without it, because devices of
    a node share the host links and no calibration has measured the time of offloading.

    On an emulated cluster, plans are jobs: time and memory of a plan are the prediction of its job by `predict`, and
    ``plans.rehearsal(rank).job`` is this job, whose stages have equal numbers of layers. A formula orders all layouts
    by the objective, corrected by the predicted time of one job for each combination of degrees, and jobs are predicted
    in this order until 100 of them fit, or `top` if that is more, or three times as many were predicted. Once a job
    does not fit, others with its degrees are predicted only if the smallest of them fits. All jobs are predicted if
    `top` is None. Layouts that no job can train are left out.

    Args:
        model: A `Transformer`, the name of a preset, or a transformer described by `Model.from_module`; for an emulated
            cluster, the name of a transformer that jobs train, such as ``"gpt-nano"``.
        cluster: A `Cluster`, the name of a cluster in the catalogue, or an emulated cluster
            (`ss.Cluster.emulated`).
        objective: ``"time"``, ``"dollars"``, ``"headroom"``, ``"tokens_per_s"``, or weights of
            several, such as ``{"time": 2, "headroom": 1}``.
        global_batch: Sequences in one optimizer step; None uses the largest power of two with at most 2**22 tokens, and
            on an emulated cluster the default of jobs.
        top: Number of rows in the table; None keeps every layout that fits.
        fix: Axes to restrict to one or more values, such as ``{"tensor": 8, "zero": [1, 2]}``.
        space: Values to try on each axis; None for the default space.
        precision: A value of `Layout.precision` or an alias, or several. None for ``bf16-mixed``, and on an emulated
            cluster, whose ranks are CPU processes, ``fp32``.
        optimizer: A value of `Layout.optimizer`, or several.
        flash_attention: Whether attention is one fused kernel; ``[True, False]`` tries both.
        calibration: Measured constants of the cluster; None to use the constants of its device and the software. For an
            emulated cluster, a `HostCalibration`, or None, as in `predict`.
        software: Name of the framework that runs all layouts; None for the software of the calibration, or else for
            the software that each layout suggests, as in `predict`: DeepSpeed with offload, FSDP2 with ZeRO 2 or 3,
            Megatron-Core otherwise. Only what it ships is searched (schedules, ZeRO stages, context parallelism,
            offloading; see `calibration.software`), except on axes that `fix` or `space` names, and `Plans.caveat` says
            what other layouts would save; ``"any"`` searches those, too. `PlanRow.software` names the software.
            Not for an emulated cluster, where jobs run on plain PyTorch.

    Raises:
        SpecError: A name is unknown or a value is invalid. If no layout fits, see `Plans.problem`.

    Example:
        >>> plans = plan("gpt3-175b", Cluster.of("a100-80gb", nodes=128, per_node=8))  # doctest: +SKIP
        >>> plans.best.layout  # doctest: +SKIP
    """
    cluster = Cluster.of(cluster) if isinstance(cluster, str) else cluster
    is_emulated = isinstance(cluster, EmulatedCluster)
    if not is_emulated:
        require(cluster, Cluster, by="plan", write="ss.Cluster.of('a100-80gb', nodes=...)")
    if space is not None:
        require(space, SearchAxes, by="space", write="fix={'tensor': 8}, or space=SearchAxes(...)")
    if fix is not None:
        require(fix, Mapping, by="fix", write="fix={'tensor': 8}")
    every = (space or SearchAxes()).fixed(fix or {})
    given = {*(fix or {}), *(space.model_fields_set if space is not None else ())}
    usual = "fp32" if is_emulated else "bf16-mixed"
    recipes = _recipes(usual if precision is None else precision, optimizer, flash_attention)
    asked = _asked(known_model(model), cluster, calibration, software, recipes)
    if is_emulated:
        every, software = every.replace(**{name: _OF_JOBS[name] for name in _OF_JOBS.keys() - given}), ANY
    _check_numbers(every, asked.cluster)
    asked.setting(Layout())  # raises before the search, as does the next line
    weights = objective_weights(objective, has_price=asked.cluster.price_per_device_hour is not None)
    if top is not None and not _is_count(top):
        raise SpecError(f"top={quoted(top)} is not a number of rows; give 1 or more, or None for all")
    batch = _known_batch(asked, global_batch)

    def limited(name: str) -> SearchAxes:
        optimizers = [each.optimizer.name for each in recipes]
        return shipped_space(
            every,
            name,
            model=asked.model,
            optimizers=optimizers,
            devices=asked.cluster.num_devices,
            given=given,
        )

    named = software or getattr(calibration, "software", None)
    tried, unlimited, wider = (
        _by_software(every, named, limited),
        _by_software(every, named, lambda _: every),
        every,
    )
    spared = tried if space is not None or "offload" in (fix or {}) else _without_offload(tried, every)
    pools, found = searched(asked, batch, [*spared.values()], recipes, top, weights=weights)
    fits = any(len(each.rows.body) for each in found)
    if needs_offload := spared != tried and not fits:
        spared = tried
        pools, found = searched(asked, batch, [*tried.values()], recipes, top, weights=weights)
        fits = any(len(each.rows.body) for each in found)
    elif spared != tried:
        wider, unlimited = every.replace(offload=("none",)), _without_offload(unlimited, every)
    problem = "" if fits else _nothing_fits(asked, batch, [*tried.values()], pools, found)
    limits = None if software == ANY or spared == unlimited else SoftwareLimits(spared, wider)
    return Plans(
        asked, batch, objective, top, tuple(pools), _rejected(pools, found), problem, limits,
        needs_offload=needs_offload and fits,
    )  # fmt: skip


def _asked(
    model: Transformer,
    cluster: Cluster | EmulatedCluster,
    calibration: AnyCalibration | None,
    software: str | None,
    recipes: Sequence[SharedSettings],
) -> Asked:
    """Return the arguments that determine time and memory; an emulated cluster is replaced by its devices."""
    if isinstance(cluster, Cluster):
        return Asked(model, cluster, calibration, None if software == ANY else software)
    from shardscope.planner.jobs import as_devices  # needs psutil, which web pages lack

    return Asked(model, *as_devices(model, cluster, calibration, recipes, software=software))


def _by_software(
    every: SearchAxes, software: str | None, limited: Callable[[str], SearchAxes]
) -> dict[str, SearchAxes]:
    """Return the spaces to search, by the name of the software that runs their layouts.

    Args:
        every: The values to try on each axis, without regard to any software.
        software: Name of the framework; `ANY` for no limit, None for the one that each layout suggests.
        limited: Returns the part of `every` that a framework ships.
    """
    if software is None:
        parts = {name: suggested_spaces(limited(name)) for name in suggested_spaces(every)}
        return {name: part[name] for name, part in parts.items() if name in part}
    return {software: every} if software in {ANY, ""} else {software_of(software).name: limited(software)}


def _without_offload(spaces: Mapping[str, SearchAxes], every: SearchAxes) -> dict[str, SearchAxes]:
    """Return the spaces without offloading, except for any offloading that the caller has chosen."""
    given = {name: getattr(every, name) for name in ("zero_for_offload", "full_for_offload")}
    return {
        name: space.replace(offload=("none",), **given)
        for name, space in spaces.items()
        if "none" in space.offload
    }


def known_model(model: Model | str) -> Transformer:
    """Return the transformer of a model, given the model or the name of a preset.

    Raises:
        SpecError: The name is unknown, or the model is not a transformer.
    """
    known = Model.of(model) if isinstance(model, str) else model
    found = known.as_transformer if isinstance(known, LayerTable) else known
    if not isinstance(found, Transformer):
        raise SpecError(
            f"model={getattr(known, 'name', known)!r} is not a transformer; the planner supports only "
            "transformers: describe one with Model.transformer(...)"
        )
    return found


def default_batch(model: Transformer, cluster: Cluster | EmulatedCluster | None = None) -> int:
    """Return the default global batch of a plan: the largest power of two with at most 2**22 tokens.

    On an emulated cluster it is the default of a job.
    """
    if isinstance(cluster, EmulatedCluster):
        return Batch().global_batch
    return 1 << max(0, (TOKENS_A_STEP // model.seq).bit_length() - 1)


def _known_batch(asked: Asked, batch: int | None) -> int:
    if batch is None:
        launched_on = asked.cluster.launched_on if isinstance(asked.cluster, EmulatedDevices) else None
        return default_batch(asked.model, launched_on)
    if not _is_count(batch) or batch > LARGEST_COUNT:
        raise SpecError(
            f"global_batch={quoted(batch)} is not a batch size; give the number of sequences in one step, 1 to "
            f"{LARGEST_COUNT:,}"
        )
    return int(batch)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _check_numbers(space: SearchAxes, cluster: Cluster) -> None:
    """Reject numbers of recomputed layers that no layout of the search can have.

    Raises:
        SpecError: `recompute` leaves out full recomputation, or the cluster is mixed.
    """
    kind = "full" if "full" in space.recompute else space.recompute[0]
    layout = Layout(recompute=kind, recompute_layers=max(space.recompute_layers or (0,)))
    for problem in recomputation_faults(layout, cluster):
        raise SpecError(problem)


def _recipes(precision: Any, optimizer: Any, flash: Any) -> list[SharedSettings]:
    precisions = [full_name(name) for name in _several("precision", precision, get_args(Precision))]
    for name in precisions:
        if name not in get_args(Precision):
            raise unknown_name("precision", name, get_args(Precision))
    optimizers = map(layout_optimizer, _several("optimizer", optimizer, optimizer_names()))
    kinds = _several("flash_attention", flash, ("True", "False"))
    for kind in kinds:
        if not isinstance(kind, bool):
            raise SpecError(
                f"flash_attention={quoted(kind)} is neither True nor False; give one, or [True, False]"
            )
    return [SharedSettings(*each) for each in product(precisions, dict.fromkeys(optimizers), kinds)]


def _several(field: str, given: Any, known: Sequence[str]) -> tuple[Any, ...]:
    values = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if not values:
        raise SpecError(f"{field}=[] leaves nothing to try; give at least one of {', '.join(known)}")
    return values


def _rejected(pools: list[Pool], found: list[Found]) -> dict[str, int]:
    counts = dict.fromkeys(REASONS, 0)
    for pool, each in zip(pools, found, strict=True):
        for reason, count in pool.found.rejected.items():
            counts[reason] += count
        counts["does not fit"] += each.too_large
        counts["not timed" if isinstance(pool.setting.cluster, EmulatedDevices) else "beaten"] += each.beaten
    return {reason: count for reason, count in counts.items() if count}


def _nothing_fits(
    asked: Asked, batch: int, spaces: Sequence[SearchAxes], pools: list[Pool], found: list[Found]
) -> str:
    """Return a message that names the layout closest to fitting, and a change that would make a layout fit."""
    near = [
        (each.closest.lacking_bytes, place) for place, each in enumerate(found) if len(each.closest.row.body)
    ]
    if not near:
        return _nothing_valid(asked, pools)
    place = min(near)[1]
    rows, here, setting = found[place].closest.row, pools[place].found, pools[place].setting
    layout = layout_at(here.layouts(*rows[:4]), 0, batch)
    fit = fit_of(setting, layout)
    total = sum(pool.found.num_valid for pool in pools)
    if fit.lacking_bytes <= 0:
        return (
            f"none of {total:,} layouts fits: the closest, {short(layout)}, offloads "
            f"{gib_text(fit.on_drives_bytes)} per device more than the host can store; "
            "set host_memory_bytes, or nvme_bytes with nvme_bandwidth"
        )
    return (
        f"none of {total:,} layouts fits: the closest, {short(layout)}, needs {gib_text(fit.memory_bytes)} of "
        f"{gib_text(capacity(setting))} for tensors, {gib_text(fit.lacking_bytes)} too much, mostly for "
        f"{fit.largest}; "
        f"{_more_nodes(asked, batch, spaces, here.recipe)}"
    )


def _nothing_valid(asked: Asked, pools: list[Pool]) -> str:
    counts: Counter[str] = sum((Counter(pool.found.rejected) for pool in pools), Counter())
    reason = max(counts, key=counts.__getitem__) if counts else "devices"
    last = list(counts)[-1] if counts else reason
    others = "" if last == reason else f", and the last combinations because {REASONS[last]}"
    how_many = "most" if others or len(counts) > 1 else "all"
    return (
        f"no layout of {asked.model.name} on {asked.cluster.num_devices:,} devices is valid: of "
        f"{sum(counts.values()):,} combinations {how_many} fail because {REASONS[reason]}{others}; "
        "loosen fix or space, or change global_batch"
    )


def _more_nodes(asked: Asked, batch: int, spaces: Sequence[SearchAxes], recipe: SharedSettings) -> str:
    """Return advice: the number of nodes on which a layout fits, found by searching larger clusters."""
    if isinstance(asked.cluster, EmulatedDevices):
        return "give the cluster more memory, or try a smaller micro_batch, zero=3 or recompute='full'"
    factor = 2
    while factor <= MOST_GROWTH and not asked.cluster.groups:
        more = asked.cluster.replace(nodes=asked.cluster.nodes * factor)
        _, found = searched(asked._replace(cluster=more), batch, spaces, [recipe], 1)
        if any(len(each.rows.body) for each in found):
            return f"a layout would fit on {more.nodes} nodes ({more.num_devices} devices), or with more device memory"
        factor *= 4 if factor > 4 else 2
    return "use devices with more memory, a smaller micro_batch, zero=3, recompute='full' or offload='all'"
