"""Step time of a job, computed from its traced operations, for every strategy and every model that can be traced.

The terms have the same names as the measured times of a run: ``data``, ``forward``, ``backward``, ``optimizer``,
``codec`` (compression and decompression of gradients), ``communication`` with a term for each collective, ``idle``.
On this machine, or on a cluster emulated on it, `host_interval` gives the uncertainty of the step time.

A step may also wait for training data from an emulated slow source. A cache that holds all shards is filled in the
first epoch, after which no step waits. The cache is assumed to be empty at the start of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardscope.analytic.communication import Traffic, compression_cost
from shardscope.analytic.communication.network import Network
from shardscope.analytic.communication.plan import Exchange, Flow, StepPlan
from shardscope.analytic.communication.ring import Ints
from shardscope.analytic.communication.traffic import Sent
from shardscope.analytic.job_step import JobStep
from shardscope.analytic.schedules import DURATIONS
from shardscope.analytic.terms import Term
from shardscope.calibration.calibration import Interval
from shardscope.calibration.constants import CONSTANTS
from shardscope.calibration.host_calibration import HostCalibration
from shardscope.methods.strategies.mesh import Mesh
from shardscope.methods.strategies.mesh.pipeline_predictions import blocks
from shardscope.prediction.loads import awaited, rank_loads, rank_updates
from shardscope.prediction.network_time import Load, StepLoads, step_plan
from shardscope.prediction.pipeline_time import Waits, exposed_messages_s, exposed_s, pass_seconds
from shardscope.prediction.rates import RankRates, limit_of, network_of, stated_rates
from shardscope.prediction.step.micro import soft_maximum
from shardscope.prediction.traced import Traced
from shardscope.runlog.axes import TOKENS, collective_of
from shardscope.spec.job_parts import UserCode
from shardscope.spec.models import GPTConfig, model_config
from shardscope.spec.shards import Shards
from shardscope.spec.strategy import Work
from shardscope.storage.formats import open_shards
from shardscope.storage.parts import whole_parts
from shardscope.storage.reader import cache_limit
from shardscope.storage.rows import SEQ, training_parts

if TYPE_CHECKING:
    from shardscope.prediction.job import JobPrediction


SEND = "send"
"""Name, in a strategy's traffic, of the messages between stages."""
_ROOFLINE = "roofline, Williams et al. 2009"
_FIXED = ("messages × time per message", "messages × time per message + hops × latency")
"""Formula for the fixed times of a collective, without and with latency."""
_EVEN_LOAD = "even load of experts, from which a run's load differs by its recorded imbalance"
_UNEVEN = 1e-2
"""Relative difference between ranks' bytes above which ranks may send in turn; nearly equal chunks differ by less."""


def job_time_term(step: JobStep, found: Traced, traffic: Traffic | None, rates: RankRates) -> Term:
    """Return the time of one step, in seconds, as a sum of terms.

    Only two terms overlap with others: reading from a slow source with all other terms, and messages between pipeline
    stages, if they travel over links, with computation.

    Each operation takes the time of its matrix products or of its memory traffic, plus the time of its launch. On GPUs,
    products take longer the smaller their matrices are, and launches overlap with computation, as in layouts; a
    transformer's passes are those of a layout.

    The optimizer takes the time to read and write all states on the rank where that takes longest, plus a time per
    tensor, and the codec the time to read and write the gradient and its packets. Each collective takes as long as its
    slowest rank needs to send or to receive its bytes, or the busiest link if messages share links, and to send its
    messages. Ranks of different speeds wait for the rank that computes longest, not counting ranks whose gradients are
    dropped.

    Args:
        step: The training step to predict.
        found: Trace of the job's model.
        traffic: Bytes and messages that each rank sends in the step; None if unknown.
        rates: Compute, memory and link rates of one rank.
    """
    work = awaited(step, rank_loads(step))
    communication = _communication(step, traffic or {}, rates)
    passes = [
        _pass("forward", step, found, work, rates),
        _pass("backward", step, found, work, rates, gathering_s=_gathering_s(step, communication)),
    ]
    if communication is not None and rates.overlaps:
        communication = _overlapping(
            communication, step, traffic or {}, rates, [each.value for each in passes]
        )
    parts = [
        _data(step, found, rates), *passes, _optimizer(step, rates), _codec(step, rates),
        communication, _idle(step, sum(each.value for each in passes), work, rates),
    ]  # fmt: skip
    kept = tuple(part for part in parts if part is not None and part.value > 0)
    return Term.total("step", with_waiting(kept, step))


def _data(step: JobStep, found: Traced, rates: RankRates) -> Term:
    batch = found.sample_bytes * step.samples * step.micro_batches
    source = "one read and one write of the batch"
    return _term("data", 2 * batch / rates.bandwidth, "2 × bytes / bandwidth", rates, source, bytes=batch)


def _gathering_s(step: JobStep, communication: Term | None) -> float:
    """Return the seconds for which a step's backward passes gather parameters; forward passes gather as many bytes."""
    if step.job.strategy.held_stage != 3 or communication is None:
        return 0.0
    return sum(part.value for part in communication.parts if part.name.endswith("all_gather")) / 2


def _pass(
    name: str, step: JobStep, found: Traced, work: Work, rates: RankRates, *, gathering_s: float = 0.0
) -> Term:
    """Return the term for all forward passes or all backward passes of a step.

    ZeRO-3 gathers each unit's parameters during the backward pass of the previous unit, for `gathering_s` in total.
    Computation during the all-gathers counts towards the time of an emulated processor, so the rank sleeps less; a
    pass takes at least as long as the rank's own computation.
    """
    trace, is_forward = step.trace, name == "forward"
    if rates.passes is not None:
        return _of_transformer(rates.passes.forward if is_forward else rates.passes.backward, step, work)
    count = step.samples * step.micro_batches * work.computing
    directions = 1.0 if is_forward else backward_flops(step)
    flops = directions * found.table.flops * count
    units = len(step.trace.units) * step.micro_batches
    busy_s = units * rates.unit_busy_s
    stated_s = 0.0 if rates.emulated_flops is None else flops / rates.emulated_flops
    overlap_s = max(0.0, min(busy_s, gathering_s, stated_s - busy_s))
    units *= (step.job.strategy.held_stage or 0) >= 2 and rates.unit_s > 0
    formula, unit_s = "units × time per unit / 2", units * rates.unit_s / 2
    if overlap_s:  # the rest is hidden in sleep
        formula, unit_s = f"{formula} - sleep", max(0.0, busy_s + unit_s - stated_s + overlap_s)
    gathered = _term("gathered units", unit_s, formula, rates, "traced", units=units)
    if rates.emulated_flops is not None:
        formula, inputs = "FLOP / rate", {"FLOP": flops, "rate": rates.emulated_flops}
        if overlap_s:
            formula, inputs = "FLOP / rate - overlap with gathers", inputs | {"overlap": overlap_s}
        part = Term("emulated processor", stated_s - overlap_s, "s", formula, inputs, "stated; by sleeping")
        return Term.total(name, (part, gathered) if unit_s else (part,))
    again = 1.0 if is_forward else directions - DURATIONS["B"]  # forward passes, also in a backward pass
    num_bytes, num_operations = again * trace.forward_bytes, again * trace.forward_operations
    if not is_forward:
        num_bytes += trace.moved_bytes - trace.forward_bytes
        num_operations += trace.num_operations - trace.forward_operations
    moved, launched = num_bytes * count, num_operations * step.micro_batches * work.computing
    products = _term(
        "matrix products", flops / rates.flops, "FLOP / rate", rates, _ROOFLINE, FLOP=flops, rate=rates.flops
    )
    others = _term("other operations", moved / rates.bandwidth, "bytes / bandwidth", rates, _ROOFLINE, bytes=moved,
                   bandwidth=rates.bandwidth)  # fmt: skip
    launches = _term(
        "launches",
        launched * rates.operation_s,
        "operations × time per launch",
        rates,
        "traced",
        operations=launched,
    )
    if rates.half_size is not None:
        weights = trace.weight_elements * step.micro_batches * work.computing
        elements = 2 * (trace.product_elements * count + weights) * directions
        slower = flops + rates.half_size * elements
        products = replace(
            products, value=slower / rates.flops, formula="(FLOP + w × 2 × elements) / rate",
            inputs={**products.inputs, "w": rates.half_size, "elements": elements / 2},
        )  # fmt: skip
        busy = products.value + others.value
        waiting = max(0.0, float(soft_maximum(np.array(launches.value), np.array(busy))) - busy)
        launches = replace(launches, value=waiting, formula="(launches³ + work³)^⅓ − work")
    parts = (products, others, launches, gathered)
    return Term.total(name, parts if units else parts[:-1])


def backward_flops(step: JobStep) -> float:
    """Return the FLOPs of a backward pass relative to a forward pass, with what it recomputes."""
    along, once = step.job.strategy.pipeline_step(step), step.job.backward_passes
    if along is None:
        return float(once)
    times: float = along.job.strategy.recomputations(along)
    return DURATIONS["B"] + (once - DURATIONS["B"]) * times


def _of_transformer(each: Term, step: JobStep, work: Work) -> Term:
    """Return the term for all passes of a rank through its share of a transformer, given one pass through all of it."""
    times = step.micro_batches * work.computing
    parts = (
        replace(
            part, value=part.value * times, formula=f"m × {part.formula}", inputs={**part.inputs, "m": times}
        )
        for part in each.parts
    )
    return Term.total(each.name, tuple(parts))


def _optimizer(step: JobStep, rates: RankRates) -> Term:
    share = min(1.0, max(each.computing for each in step.job.strategy.work(step.alike)))
    moved = step.job.optimizer.states.moved_bytes_per_param(step.element_bytes)
    updated = step.num_elements * moved * max(rank_updates(step))
    tensors = len(step.trained) * share
    parts = (
        _term("states", updated / rates.optimizer_bandwidth, "bytes / bandwidth", rates,
              "reads and writes of each state", bytes=updated, bandwidth=rates.optimizer_bandwidth),
        _term("tensors", tensors * rates.tensor_s, "tensors × time per tensor", rates, "traced", tensors=tensors),
    )  # fmt: skip
    return Term.total("optimizer", parts if rates.tensor_s > 0 else parts[:1])


def _codec(step: JobStep, rates: RankRates) -> Term | None:
    """Return the term for packing and unpacking; None if compression is off in this step or has no `codec_passes`."""
    now = step.compression
    if not now.is_on or now.codec_passes is None:
        return None
    strategy, elements = step.job.strategy, step.num_elements
    if isinstance(strategy, Mesh) and strategy.pipeline > 1:
        elements = max(block.num_elements for block in blocks(strategy, step))
    cost = compression_cost(
        now, elements, step.job.num_state_ranks, math.inf,
        codec_bandwidth=rates.codec_bandwidth, element_bytes=step.element_bytes,
    )  # fmt: skip
    source = "passes over the gradient and its packets"
    return _term(
        "codec", float(cost.codec_s), "bytes / bandwidth", rates, source, bandwidth=rates.codec_bandwidth
    )


def _communication(step: JobStep, traffic: Traffic, rates: RankRates) -> Term | None:
    """Return the term for all collectives, with one part for each; None if there are none."""
    parts = _parts(traffic, rates, loads_of(step, traffic, rates))
    if not step.expert_loads:
        parts = [
            replace(part, source=f"{part.source}; {_EVEN_LOAD}") if part.name == TOKENS else part
            for part in parts
        ]
    return Term.total("communication", tuple(parts)) if parts else None


def _parts(traffic: Traffic, rates: RankRates, found: StepLoads | None) -> list[Term]:
    """Return the term for each collective, given the loads on the links; None if they do not affect the time."""
    parts = list[Term]()
    for name, sent in traffic.items():
        load = None if found is None else found.loads.get(name)
        if found is None or (rates.network is None and (load is None or not load.is_bound)):
            parts.append(_collective(name, sent, rates, load))
        else:
            parts.append(_on_network(name, sent, rates, found))
    return parts


def _overlapping(
    communication: Term, step: JobStep, traffic: Traffic, rates: RankRates, passes: Sequence[float]
) -> Term:
    """Return the communication term, with only those messages between stages that ranks wait for.

    Args:
        communication: Result of `_communication`, in which no message overlaps with computation.
        step: The training step.
        traffic: Bytes and messages that each rank sends.
        rates: Link rates.
        passes: Seconds of all forward and of all backward passes of the rank that the step waits for.
    """
    plan = step_plan(step, traffic)
    if plan is None or plan.flow is None:
        return communication
    flow = plan.flow
    seconds = pass_seconds(step.job.strategy.pipeline_step(step), flow, *passes)
    costs, sent = [seconds[op.op][op.stage] for op in flow.table.ops], traffic[flow.sends]
    if flow.copies == 1:  # collectives that follow the passes add up
        exposed = {flow.sends: exposed_messages_s(flow, sent, rates, costs)[0]}
    else:
        waits = Waits.of(plan, partial(_on_copies, flow, traffic, rates))
        exposed = exposed_s(plan, waits, sent, rates, costs)
    parts = (
        replace(part, value=exposed[part.name], formula="passes with messages - passes without")
        if part.name in exposed
        else part
        for part in communication.parts
    )
    return Term.total("communication", tuple(parts))


def _on_copies(flow: Flow, traffic: Traffic, rates: RankRates, plan: StepPlan, rank: int) -> dict[str, float]:
    """Return the seconds of each collective of a plan if only the copies of one pipeline rank communicate."""
    mine, found = traffic_of_copies(flow, traffic, rates, plan, rank)
    return {part.name: part.value for part in _parts(mine, rates, found)}


def traffic_of_copies(
    flow: Flow, traffic: Traffic, rates: RankRates, plan: StepPlan, rank: int
) -> tuple[Traffic, StepLoads | None]:
    """Return what the copies of one pipeline rank send in a plan, and its load on the links, as `loads_of` does.

    Different ranks of a pipeline run different passes, so only copies communicate at the same time.
    """
    own = np.zeros(flow.copies * len(flow.table.ranks), dtype=np.int64)
    own[flow.ranks(rank)] = 1
    names = {each.collective for each in plan.exchanges}
    mine = {name: traffic[name].each(lambda column: column * own) for name in names}
    exchanges = tuple(_among(each, own) for each in plan.exchanges)
    found = _loads(
        mine, rates, len(own), lambda network: StepLoads.of_plan(StepPlan(exchanges), mine, network)
    )
    return mine, found


def _among(exchange: Exchange, own: Ints) -> Exchange:
    """Return an exchange with the messages that the ranks with 1 in `own` send."""
    if exchange.whole is not None:
        return replace(exchange, whole=exchange.whole * own)
    rounds = (each._replace(moves=tuple(m for m in each.moves if own[m.source])) for each in exchange.rounds)
    return replace(exchange, rounds=tuple(each for each in rounds if each.moves))


def loads_of(step: JobStep, traffic: Traffic, rates: RankRates) -> StepLoads | None:
    """Return the load of a step on the links; None if it does not affect the step time.

    On equal links, the load matters if ranks send in turn, as in a tree, or if latencies add up. Ranks that all send
    the same number of bytes are assumed to send all the time.
    """
    is_even = rates.network is None
    return _loads(
        traffic, rates, step.world_size, lambda network: StepLoads.of(step, traffic, network, is_even=is_even)
    )


def _loads(
    traffic: Traffic, rates: RankRates, world_size: int, of: Callable[[Network], StepLoads]
) -> StepLoads | None:
    """Return the load of some traffic on the links, given a function that computes it; see `loads_of`."""
    if rates.network is not None:
        return of(rates.network)
    take_turns = any(np.ptp(each.busiest) > _UNEVEN * np.max(each.busiest) for each in traffic.values())
    if not take_turns and rates.latency_s == 0:
        return None
    return of(Network.even(world_size, rates.link))


def _collective(name: str, sent: Sent, rates: RankRates, load: Load | None) -> Term:
    """Return the term for one collective. Messages wait for other ranks' messages only if their number is known."""
    messages = sent.counted
    seconds = sent.busiest / rates.link + messages * rates.per_message_s(name, sent)
    rank = int(seconds.argmax())
    hops = _hops(messages[rank], load)
    is_sent_ahead = rates.overlaps and collective_of(name) == SEND
    source = (
        "messages travel while ranks compute" if is_sent_ahead else "time of the slowest rank; no overlap"
    )
    return _term(
        name, float(seconds[rank]) + hops * rates.latency_s, f"bytes / bandwidth + {_FIXED[rates.latency_s > 0]}",
        rates, source, bytes=float(sent.busiest[rank]),
        messages=float(messages[rank]), bandwidth=rates.link, **_latency(hops, rates),
    )  # fmt: skip


def _hops(messages: float, load: Load | None) -> float:
    """Return how many messages of a collective are sent one after another, given the messages of its busiest rank."""
    return float(messages) if load is None or load.hops is None else float(load.hops)


def _latency(hops: float, rates: RankRates) -> dict[str, float]:
    return {"hops": hops, "latency": rates.latency_s} if rates.latency_s > 0 else {}


def _on_network(name: str, sent: Sent, rates: RankRates, found: StepLoads) -> Term:
    """Return the term for one collective on links that messages share, which takes as long as the busiest link."""
    network, load = found.network, found.loads.get(name)
    messages = float(np.max(sent.counted))
    hops, fixed = _hops(messages, load), _FIXED[rates.latency_s > 0]
    fixed_s = messages * rates.per_message_s(name, sent, found.carried_s(name, sent)) + hops * rates.latency_s
    if load is None:
        return _term(name, fixed_s, fixed, rates, "no bytes", messages=messages, **_latency(hops, rates))
    link = load.busiest(network)
    source = f"busiest link: {network.names[link]}"
    carried = "time of all levels" if load.is_bound else "bytes / bandwidth"
    return _term(
        name, load.seconds + fixed_s, f"{carried} + {fixed}", rates, source,
        bytes=float(load.bytes[link]), messages=messages, bandwidth=float(network.capacity[link]),
        **_latency(hops, rates),
    )  # fmt: skip


def _idle(step: JobStep, computing_s: float, work: Work, rates: RankRates) -> Term:
    """Return the term for time without spans: the pipeline bubble, and the fixed costs of a schedule and of a step."""
    waits = computing_s * work.waiting / work.computing
    along = step.job.strategy.pipeline_step(step)
    is_scheduled = along is not None and along.world_size > 1  # also where no rank ever waits
    scheduled = step.micro_batches * is_scheduled
    parts = (
        _term("pipeline bubble", waits, "bubble / (1 - bubble) × computing", rates, "closed form of the schedule"),
        _term("schedule", scheduled * rates.stage_s, "micro-batches × time per micro-batch", rates, "schedule",
              micro_batches=scheduled),
        _term("fixed cost", rates.step_s, "once a step", rates, "recording events, Python calls"),
    )  # fmt: skip
    return Term.total("idle", parts)


def _term(name: str, value: float, formula: str, rates: RankRates, source: str, **inputs: float) -> Term:
    return Term(name, float(value), "s", formula, inputs, f"{source}; {rates.source}")


_SLACK = 0.02
"""Relative half width of the interval of times that are emulated by sleeping, because sleeps end slightly late."""


def host_interval(prediction: JobPrediction, host: HostCalibration, step_s: float) -> Interval:
    """Return the 90 % prediction interval of the step time, in seconds; see `JobPrediction.interval`.

    Args:
        prediction: The prediction.
        host: The constants of the CPU ranks.
        step_s: The predicted step time, in seconds.
    """
    stated_s = 0.0 if prediction.emulated is None else _stated_s(prediction)
    low, high = host.interval(step_s - stated_s)
    if not all(row.is_measured for row in host.constants):
        least, most = (_with_unmeasured(prediction, host, times) - stated_s for times in _shipped_ends())
        low, high = min(low, least), max(high, most)
    return Interval(
        stated_s * (1 - _SLACK) + low - _chained_s(prediction, step_s), stated_s * (1 + _SLACK) + high
    )


def _with_unmeasured(prediction: JobPrediction, host: HostCalibration, times: float) -> float:
    """Return the step time with all costs that were not measured on this machine multiplied by `times`."""
    rows = []
    for row in host.constants:
        value = row.value * times if CONSTANTS[row.name].unit in ("s", "x") else row.value / times
        scaled = {"value": value, "low": value, "high": value}
        rows.append(row if row.is_measured else row.model_copy(update=scaled))
    return replace(prediction, host=host.model_copy(update={"constants": tuple(rows)})).step_time_s or 0.0


@lru_cache(maxsize=1)
def _shipped_ends() -> tuple[float, float]:
    """Return the lowest and highest ratio of actual to predicted step time with another machine's constants."""
    return HostCalibration.shipped().interval(1.0)


def _chained_s(prediction: JobPrediction, step_s: float) -> float:
    """Return the seconds of a step in which links are idle because chunks of unequal size end at different times."""
    traffic = prediction.traffic or {}
    if not any(sent.is_uneven for sent in traffic.values()):
        return 0.0
    busy = {name: sent.unchained for name, sent in traffic.items()}
    return max(0.0, step_s - job_time_term(prediction.step, prediction.found, busy, prediction.rates).value)


def _stated_s(prediction: JobPrediction) -> float:
    """Return the part of the step time that the settings of the emulated cluster determine, in seconds."""
    limit = limit_of(prediction.job, prediction.emulated)
    link = math.inf if limit is None else limit.bandwidth
    rates = stated_rates(prediction.emulated, limit)._replace(
        link=link, network=network_of(prediction.emulated), overlaps=prediction.rates.overlaps
    )
    return job_time_term(prediction.step, prediction.found, prediction.traffic, rates).value


WAITING = "waiting for the source"


class StoredRows(NamedTuple):
    """Training rows of shards.

    Attributes:
        rows: Number of rows.
        row_bytes: Mean size of a row in its shard.
        shard_rows: Mean number of rows of a shard.
        cache: Size limit of the cache; None if shards are read in place.
        holds_all: Whether the cache holds all shards.
    """

    rows: int
    row_bytes: float
    shard_rows: float
    cache: float | None
    holds_all: bool


def with_waiting(parts: tuple[Term, ...], step: JobStep) -> tuple[Term, ...]:
    """Return the parts of a step, with the time that a rank waits for an emulated source added to ``data``.

    Batches are prefetched while the rank computes, so a rank waits only if reading a batch takes longer than the rest
    of a step.
    """
    waiting = _waiting(step, sum(part.value for part in parts))
    if waiting is None or waiting.value == 0:
        return parts
    copies = tuple(part for part in parts if part.name == "data")
    others = tuple(part for part in parts if part.name != "data")
    renamed = tuple(
        Term("copies", part.value, part.unit, part.formula, part.inputs, part.source) for part in copies
    )
    return (Term.total("data", (*renamed, waiting)), *others)


def filling_s(step: JobStep, step_time_s: float) -> float:
    """Return the total time that a rank waits while a cache is filled in the first epoch, in seconds.

    0 if no step waits, or if `step_time_s` already includes the wait, because the cache cannot hold all shards or the
    job ends before the cache is full.

    Args:
        step: The step that represents most steps of the job.
        step_time_s: Time of this step.
    """
    stored = _stored_slowly(step)
    if stored is None or not _is_filled(step, stored):
        return 0.0
    return _filling_steps(step, stored) * _reading(step, stored, step_time_s).value


def _waiting(step: JobStep, others_s: float) -> Term | None:
    """Return the time that a rank waits for data; None without an emulated source, or if the cache is already full."""
    stored = _stored_slowly(step)
    return None if stored is None or _is_filled(step, stored) else _reading(step, stored, others_s)


def _filling_steps(step: JobStep, stored: StoredRows) -> int:
    return max(1, stored.rows // step.job.batch.global_batch)


def _is_filled(step: JobStep, stored: StoredRows) -> bool:
    number = step.job.last_step if step.is_usual else step.number
    return stored.holds_all and number > _filling_steps(step, stored)


def _reading(step: JobStep, stored: StoredRows, others_s: float) -> Term:
    """Return how much longer reading a batch from the source takes than the rest of a step.

    Without a cache, a rank reads its own rows. With a cache, each shard is fetched once, and the ranks of a machine
    share this work equally; the latency then applies per shard.
    """
    data = step.job.data
    assert isinstance(data, Shards), "they are stored"
    assert data.slow is not None, "they are stored slowly"
    rows = step.samples * step.micro_batches
    num_bytes = rows * stored.row_bytes
    requests = 1.0 if stored.cache is None else rows / stored.shard_rows
    reading_s = num_bytes / data.slow.bandwidth + requests * data.slow.latency_s
    inputs = {"bytes": num_bytes, "bandwidth": data.slow.bandwidth, "requests": requests,
              "latency": data.slow.latency_s, "others": others_s}  # fmt: skip
    return Term(
        WAITING, max(0.0, reading_s - others_s), "s",
        "max(0, bytes / bandwidth + requests × latency - others)", inputs, "emulated source; read ahead",
    )  # fmt: skip


def _stored_slowly(step: JobStep) -> StoredRows | None:
    """Return the training rows of shards on an emulated source; None for other data."""
    data = step.job.data
    if not isinstance(data, Shards) or data.slow is None:
        return None
    return _stored(data, _seq(step), _written_at(data))


def _seq(step: JobStep) -> int:
    model = step.job.model
    config = None if isinstance(model, UserCode) else model_config(model)
    return config.seq if isinstance(config, GPTConfig) else SEQ


def _written_at(data: Shards) -> int:
    return Path(data.path).expanduser().stat().st_mtime_ns


@lru_cache(maxsize=16)
def _stored(data: Shards, seq: int, _written: int) -> StoredRows:
    shards = open_shards(data)
    whole = whole_parts(shards, seq)
    rows, num_bytes = sum(part.num_rows for part in whole), sum(each.num_bytes for each in shards.shards)
    limit, needed = cache_limit(shards, data), sum(each.unpacked_bytes for each in shards.shards)
    return StoredRows(
        training_parts(data, seq), num_bytes / max(1, rows), rows / len(shards.shards), limit,
        limit is not None and limit >= needed,
    )  # fmt: skip
