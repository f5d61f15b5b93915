"""Plans for an emulated cluster: each candidate is a job, whose own prediction gives its time and memory.

`as_devices` describes the ranks to the planner's formula, which orders the candidates. `search_jobs` predicts the jobs
of the first ones. `step_parts` and `memory_of` return predictions of jobs in the form of the formula's results.

Jobs differ from the software that the formula describes. Their messages between stages travel while ranks compute, and
where stages share a node, few of them leave it. Tensor ranks all compute the whole output projection, and exchange the
gradients of the whole vocabulary. Shards are summed over replicas once per step instead of in each micro-batch, and
gloo's reduce-scatters, which sequence parallelism and ZeRO use, take longer than a ring's. A message takes less time if
fewer ranks send at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory import MemoryParts
from shardscope.analytic.schedules import DURATIONS
from shardscope.analytic.terms import Term
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.host_calibration import AnyCalibration, HostCalibration
from shardscope.errors import SpecError
from shardscope.machine import usable_memory_bytes
from shardscope.planner.candidates import Candidates, SharedSettings
from shardscope.planner.emulated import EmulatedDevices, JobFigures
from shardscope.planner.pools import layout_at
from shardscope.planner.rank import Floats, scores
from shardscope.planner.rehearsed_job import staged
from shardscope.planner.rules import Ints, Mask
from shardscope.planner.search import EMPTY, Closest, Found, RankedRows
from shardscope.planner.setting import SearchSettings, capacity
from shardscope.prediction.axis_waits import axis_waits, bubble_s
from shardscope.prediction.job import AGENT_BYTES, RANK_BYTES, JobPrediction, predict_job
from shardscope.prediction.job_time import backward_flops
from shardscope.prediction.rates import RankRates
from shardscope.prediction.step.machine import memory_with
from shardscope.prediction.step.step import StepParts, step_time
from shardscope.prediction.traced import tracing_together
from shardscope.spec.cluster import Device, EmulatedCluster
from shardscope.spec.job import Job
from shardscope.spec.layout import Layout
from shardscope.spec.link import Link
from shardscope.spec.model import Transformer
from shardscope.spec.models import transformer_of
from shardscope.spec.partition import even_split

TIMED = 100
"""Number of fitting candidates whose jobs are predicted, unless the caller wants more rows."""
_TRIED = 3
"""Largest number of jobs to predict for each one that should fit."""
_FAST = 1e15
"""Rate in bytes per second at which nothing takes noticeable time."""


def job_of(model: Transformer, layout: Layout) -> Job:
    """Return the job of a plan, whose stages have the layers that the plan assumes.

    Raises:
        SpecError: No job corresponds to the layout.
    """
    stages: dict[str, Any] = {}
    if layout.pipeline > 1:
        blocks = even_split(model.layers, layout.pipeline * layout.virtual_stages)
        stages = {"strategy": staged(layout, blocks)}
    return Job(model=model.name, data="python-source", layout=layout, **stages)


def as_devices(
    model: Transformer,
    cluster: EmulatedCluster,
    host: AnyCalibration | None,
    recipes: Sequence[SharedSettings],
    *,
    software: str | None,
) -> tuple[EmulatedDevices, Calibration]:
    """Return the ranks of an emulated cluster as devices, and constants with which the formula orders layouts.

    The rates are those of the job of a layout with a data axis only. Every message takes the time that it takes if all
    ranks send at once.

    Args:
        model: The model that the jobs train.
        cluster: The emulated cluster.
        host: Constants of this machine's ranks; None for those that `predict` chooses.
        recipes: Settings that the layouts of a search share.
        software: The software that the caller names.

    Raises:
        SpecError: No job trains the model or has the settings, the caller names software for GPUs, or `host` is not a
            calibration of this machine's ranks.
    """
    if transformer_of(model.name) != model:
        raise SpecError(
            f"model={model.name!r} is not a model that jobs train by its name, and plans for an emulated cluster are "
            "jobs; use one such as 'gpt-nano', or plan for ss.Cluster.of(...)"
        )
    ranks = cluster.num_devices
    jobs = [
        job_of(model, Layout(data=ranks, zero=0, global_batch=ranks, **recipe._asdict()))
        for recipe in recipes
    ]
    rates = predict_job(jobs[0], cluster, host, software=None if software == "any" else software).rates
    flops = rates.emulated_flops or rates.flops
    moved = _FAST if rates.emulated_flops else rates.bandwidth
    message_s = rates.message_s if rates.idle is None else rates.idle.at(ranks)
    near, far = _bandwidths(rates, cluster)
    device = Device(
        name="cpu", memory_bytes=_memory_of(cluster), memory_bandwidth=moved, source="emulated",
        peak_flops=dict.fromkeys(("fp32", "fp16", "bf16"), flops),
    )  # fmt: skip
    devices = EmulatedDevices(
        name=cluster.name, device=device, nodes=len(cluster.nodes), per_node=cluster.per_node,
        intra=Link(name="memory", bandwidth=near, latency_s=message_s),
        inter=Link(name="uplink", bandwidth=far, latency_s=message_s + rates.latency_s),
        launched_on=cluster, host=host if isinstance(host, HostCalibration) else None,
    )  # fmt: skip
    constants = Calibration(
        name=f"predictions of jobs, {rates.source}", source="the job of a layout with a data axis only",
        matmul_efficiency=1, attention_efficiency=1, unfused_efficiency=1, half_size=0, memory_efficiency=1,
        launch_s=0, intra_efficiency=1, inter_efficiency=1, pipeline_efficiency=1, shard_overlap=0,
        collective_s=0, optimizer_efficiency=min(1.0, rates.optimizer_bandwidth / moved), step_s=rates.step_s,
    )  # fmt: skip
    return devices, constants


def _bandwidths(rates: RankRates, cluster: EmulatedCluster) -> tuple[float, float]:
    """Return the rates at which a rank sends to ranks of its node, and to other nodes if all of its node do so."""
    network = rates.network
    if network is None:
        return rates.link, rates.link
    shared = [(network.nodes, cluster.per_node), (network.racks, cluster.num_devices / cluster.racks)]
    far = [float(network.capacity[links].min()) / ranks for links, ranks in shared if links.size]
    return float(network.capacity[network.ranks].min()), min(far)


def _memory_of(cluster: EmulatedCluster) -> float:
    """Return the bytes that the fullest rank may hold: the stated memory of the smallest node, if this machine has
    enough, or else an equal share of this machine's memory.
    """
    ranks = cluster.num_devices
    share = (usable_memory_bytes() - AGENT_BYTES) / ranks - RANK_BYTES
    return max(1.0, min([share, *(node.memory for node in cluster.nodes if node.memory is not None)]))


def search_jobs(
    setting: SearchSettings, found: Candidates, weights: Mapping[str, float], *, keep: int | None
) -> tuple[Candidates, Found]:
    """Predict the jobs of the candidates that are expected to be best, until enough of them fit.

    The formula is further off for some axes than for others, because jobs communicate differently than the software
    that it describes. Its times are therefore multiplied by a factor for each combination of degrees: the predicted
    time of the combination's fastest job, relative to its time by the formula. Few jobs need less memory than by the
    formula, so candidates that exceed the memory by the formula come last. Once a job does not fit, others with its
    degrees are predicted only if the one with the least memory by the formula fits.

    Args:
        setting: Model, devices of the emulated cluster, and constants of the formula.
        found: The candidates.
        weights: Weight of each metric in the objective.
        keep: Number of rows to keep, or `TIMED` if that is more; None for every layout that fits.

    Returns:
        The candidates, with those that no job can train among the rejected ones, and the rows of all that were timed.
    """
    rows, room = _all_rows(setting, found), capacity(setting)
    most = np.inf if keep is None else max(keep, TIMED)
    known: dict[int, JobFigures | None] = {}

    def figures(row: int) -> JobFigures | None:
        if row not in known:
            layout = _layout(found.layouts(*rows.at(np.array([row]))[:4]))
            try:
                known[row] = figures_of(setting, layout)
            except SpecError:
                known[row] = None  # no job has this layout
        return known[row]

    grid, too_large, fitting = found.bodies.grid[rows.body], dict[int, bool](), 0
    with tracing_together():
        expected_s = rows.time_s * _factors(rows.time_s, grid, figures)
        score = scores(weights, expected_s, rows.memory_bytes, capacity_bytes=room)
        for row in np.lexsort((score, rows.memory_bytes > room)).tolist():
            some_fit = fitting > 0 or False in too_large.values()
            if fitting >= most or (some_fit and len(known) >= _TRIED * most):
                break
            if too_large.get(grid[row], False):
                continue
            each = figures(row)
            if each is not None and each.fits:
                fitting += 1
            elif each is not None and keep is not None and grid[row] not in too_large:
                too_large[grid[row]] = not _smallest_fits(rows.memory_bytes, grid == grid[row], figures)
    return _kept(found, rows, known, room)


def _smallest_fits(formula_bytes: Floats, alike: Mask, figures: Callable[[int], JobFigures | None]) -> bool:
    """Return whether the job with the least memory by the formula fits, of the candidates in a mask."""
    in_turn = np.flatnonzero(alike)[np.argsort(formula_bytes[alike], kind="stable")].tolist()
    return any(found.fits for found in islice(filter(None, map(figures, in_turn)), 1))


def _factors(formula_s: Floats, grid: Ints, figures: Callable[[int], JobFigures | None]) -> Floats:
    """Return the predicted time of the fastest job of each candidate's combination of degrees, relative to the
    formula's; 1 for combinations without jobs.

    Args:
        formula_s: Time of each candidate by the formula, in seconds.
        grid: Number of the combination of degrees of each candidate.
        figures: Function that predicts the job of a candidate.
    """
    factor = np.ones(len(grid))
    for one in np.unique(grid):
        alike = np.flatnonzero(grid == one)
        in_turn = alike[np.argsort(formula_s[alike], kind="stable")].tolist()
        first = next((row for row in in_turn if figures(row) is not None), None)
        if first is not None and (found := figures(first)) is not None:
            factor[alike] = found.step_time_s / formula_s[first]
    return factor


def _kept(
    found: Candidates, rows: RankedRows, known: Mapping[int, JobFigures | None], room: float
) -> tuple[Candidates, Found]:
    """Return the result of a search, given the figures of the rows that were predicted; None for rows without jobs."""
    jobs = {row: figures for row, figures in sorted(known.items()) if figures is not None}
    places = np.array([*jobs], np.int64)
    timed = rows.at(places)._replace(
        time_s=np.array([each.step_time_s for each in jobs.values()]),
        memory_bytes=np.array([each.held_bytes for each in jobs.values()]),
    )
    fits = np.array([each.fits for each in jobs.values()], bool)
    closest = Closest(EMPTY, np.inf)
    if len(places) and not fits.any():
        least = np.array([timed.memory_bytes.argmin()])
        closest = Closest(timed.at(least), float(timed.memory_bytes[least][0]) - room)
    without_job, too_large = len(known) - len(jobs), int((~fits).sum())
    rejected = found.rejected | ({"no job": without_job} if without_job else {})
    beaten = found.num_valid - without_job - len(jobs)
    return found._replace(rejected=rejected), Found(timed.at(fits), too_large, beaten, closest)


def _all_rows(setting: SearchSettings, found: Candidates) -> RankedRows:
    """Return all candidates with their times and memory by the formula."""
    body, way = np.nonzero(found.ways_of(np.arange(len(found.bodies.grid))))
    choices = found.compressions[found.bodies.grid[body]]
    body, way = np.repeat(body, choices), np.repeat(way, choices)
    compression = np.arange(len(body)) - np.repeat(np.cumsum(choices) - choices, choices)
    layouts = found.layouts(body, way, compression)
    held = memory_with(setting.model, layouts, setting.cluster, setting.calibration.software)
    return RankedRows(body, way, compression, np.zeros_like(body), formula_s(setting, layouts), held.total)


def formula_s(setting: SearchSettings, layouts: Layouts) -> Floats:
    """Return the step time of each layout by the formula, in seconds, as far as it holds for jobs: without messages
    between stages, which jobs send while they compute.
    """
    parts = step_time(setting.model, layouts, setting.cluster, setting.calibration)
    return np.asarray(parts.total - parts.pipeline_comm)


def figures_of(setting: SearchSettings, layout: Layout) -> JobFigures:
    """Return the predicted time, memory and utilization of the job of a layout.

    Raises:
        SpecError: No job corresponds to the layout, or it cannot be predicted.
    """
    devices = devices_of(setting)
    known, key = devices.predicted, (setting.model.name, layout)
    if key not in known:
        found = predict_job(job_of(setting.model, layout), devices.launched_on, devices.host)
        assert found.time is not None, "ranks of emulated clusters compute on CPUs"
        known[key] = JobFigures(
            _seconds(found.time, found), {} if found.memory is None else _bytes(found.memory),
            np.nan if found.mfu is None else found.mfu, found.fits is not False,
        )  # fmt: skip
    return known[key]


def devices_of(setting: SearchSettings) -> EmulatedDevices:
    """Return the devices of an emulated cluster for which a search plans."""
    assert isinstance(setting.cluster, EmulatedDevices)
    return setting.cluster


_OTHERS = {"data": "overhead", "forward": "compute", "optimizer": "optimizer", "codec": "data_comm"}
"""Part of a step by the name of a term that is not divided among parts."""


def _seconds(step: Term, found: JobPrediction) -> dict[str, float]:
    """Return the terms of a job's step as the parts of a layout's step."""
    parts = dict.fromkeys(StepParts._fields[:-1], 0.0)
    parts |= {f"{axis}_comm": seconds for axis, seconds in axis_waits(found).items()}
    repeated = 1 - DURATIONS["B"] / backward_flops(found.step)
    for term in step.parts:
        if term.name == "backward":
            parts["recompute"] += repeated * term.value
            parts["compute"] += (1 - repeated) * term.value
        elif term.name == "idle":
            parts["bubble"] += bubble_s(found)
            parts["overhead"] += term.value - bubble_s(found)
        elif term.name != "communication":
            parts[_OTHERS[term.name]] += term.value
    return parts


def _bytes(peak: Term) -> dict[str, float]:
    """Return the terms of a rank's peak memory by type."""
    held = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "buffers"), 0.0)
    for term in peak.parts:
        kind = term.name.partition(" ")[0]
        held[kind if kind in held else "buffers"] += term.value
    return held


def step_parts(setting: SearchSettings, layouts: Layouts) -> StepParts:
    """Return the predicted step time of the job of each layout by part, in seconds.

    Raises:
        SpecError: No job corresponds to a layout.
    """
    found = [figures_of(setting, each) for each in _each(layouts)]
    columns = {name: np.array([each.seconds[name] for each in found]) for name in StepParts._fields[:-1]}
    return StepParts(**columns, total=np.array([each.step_time_s for each in found]))


def memory_of(setting: SearchSettings, layouts: Layouts) -> MemoryParts:
    """Return the predicted peak bytes of the fullest rank of the job of each layout, by type.

    Raises:
        SpecError: No job corresponds to a layout.
    """
    found = [figures_of(setting, each).memory for each in _each(layouts)]
    none = np.zeros(len(found))
    return MemoryParts(
        **{name: np.array([each[name] for each in found]) for name in MemoryParts._fields[:-2]},
        host=none,
        nvme=none,
    )


def _each(layouts: Layouts) -> Iterator[Layout]:
    return (_layout(layouts, row) for row in range(len(layouts)))


def _layout(layouts: Layouts, row: int = 0) -> Layout:
    sizes = (layouts.data, layouts.micro_batch, layouts.num_micro_batches)
    return layout_at(layouts, row, int(np.prod([size[row] for size in sizes])))
