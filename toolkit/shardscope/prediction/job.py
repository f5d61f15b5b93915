"""Predict a job before it runs: bytes sent and memory of each rank, and the step time, as sums of terms."""
# Long because it is one result: all that is predicted for a job, and what it shows.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardscope.analytic.communication import Traffic
from shardscope.analytic.communication.traffic import Sent, sent_bytes
from shardscope.analytic.job_step import JobStep, settled_step
from shardscope.analytic.memory import RankStates, is_cpu
from shardscope.analytic.reliability import Reliability
from shardscope.analytic.terms import Term
from shardscope.calibration.calibration import Calibration, Interval
from shardscope.calibration.choice import calibration_of
from shardscope.calibration.host_calibration import (
    THIS_MACHINE,
    Chosen,
    HostCalibration,
    chosen,
)
from shardscope.calibration.spread import Floats, Widened, widened
from shardscope.errors import SpecError, require
from shardscope.machine import Place, usable_memory_bytes
from shardscope.prediction.budget import Budgeted
from shardscope.prediction.expert_loads import with_loads
from shardscope.prediction.failures import job_failures
from shardscope.prediction.job_memory import held_at_once, kinds_by_rank, rank_memory
from shardscope.prediction.job_time import (
    WAITING,
    filling_s,
    host_interval,
    job_time_term,
    loads_of,
    with_waiting,
)
from shardscope.prediction.layout import uncertainty_of
from shardscope.prediction.loads import (
    backend_on,
    memory_on,
    run_seconds,
    slowness_on,
    step_seconds,
    update_slowness_on,
    used_samples_per_s,
)
from shardscope.prediction.rates import RankRates
from shardscope.prediction.step.term import time_term
from shardscope.prediction.traced import Traced, traced
from shardscope.prediction.utilization import AtPeak, at_peak
from shardscope.runlog.summary import utilization
from shardscope.show import Part, Sentences, Shown, Table, Tree
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.job_parts import label_of
from shardscope.spec.layout import Layout
from shardscope.spec.model import Transformer
from shardscope.spec.units import bytes_text, figure, plural, work_text

if TYPE_CHECKING:
    import pandas as pd


AGENT_BYTES = 200e6
RANK_BYTES = 80e6
"""Memory of the agent process and of a rank with a tiny model, in bytes (proportional set size on Linux, 4 ranks)."""
Tracer = Callable[[Job], Traced]
_NO_RATES = (
    "the ranks compute on GPUs, whose rates are unknown without a cluster; give a cluster that describes them, such as "
    "ss.Cluster.of('h100', per_node={world_size})"
)
_SHIPPED_IDLE = (
    "It has no woken_message_s: for messages between ranks that sleep on emulated processors, the times "
    "that ship with Shardscope are used. On Linux, ss.calibrate() measures them."
)
_PACKED = "The peak memory leaves out the copies in which gradients are packed and unpacked."
_UNEVEN = (
    "The chunks of {name} are uneven, and ranks wait for messages of different sizes. Ranks that finish early begin "
    "the next step early, and messages to other ranks can hide slow processors, so this is an upper bound; the "
    "interval reaches down to links that are busy all the time. The next collective may start on some ranks before "
    "this one has ended on other ranks, which ss.simulate takes into account."
)


@dataclass(frozen=True, repr=False)
class JobPrediction(Shown, Budgeted):
    """Prediction for one job, computed lazily; `time` and `memory` are trees of terms.

    Attributes:
        job: The job.
        cluster: The cluster that the job runs on; None if it runs on this machine.
        step: The training step that `traffic` and `states` describe; `predict_job` chooses one after all warm-ups.
        found: Trace of the job's model in one training step.
        calibration: The cluster's constants; None if the job runs on this machine.
        emulated: The emulated cluster that the ranks run on, on this machine's cores; None otherwise.
        host: The constants of this machine's CPU ranks; None if the job runs on a cluster.
        is_calibrated: Whether `host` was measured here by `ss.calibrate`, or given; otherwise it ships with Shardscope.
        ignored: Sentence on why a saved calibration is not used; None if it is used or there is none.
        place: Cores and shared memory of the machine on which `host` was measured; None for those of this process.
    """

    job: Job
    cluster: Cluster | None
    step: JobStep
    found: Traced
    calibration: Calibration | None = None
    emulated: EmulatedCluster | None = None
    host: HostCalibration | None = None
    is_calibrated: bool = False
    ignored: str | None = None
    place: Place | None = None

    @property
    def where(self) -> str:
        """Name of the cluster, or ``this machine``, with the date of its calibration or the origin of its constants."""
        at = self.cluster or self.emulated
        where = THIS_MACHINE if at is None else at.name
        if self.host is None or not (self.is_calibrated and self.has_rates):
            return where
        if self.host.is_of_this_machine:
            return f"{where}, calibrated on {self.host.measured_at[:10]}"
        return f"{where}, with constants of {self.host.label}"

    @property
    def has_rates(self) -> bool:
        """Whether the compute and link rates of the ranks are known; False if they run on this machine's GPUs."""
        return self.cluster is not None or not self.step.is_on_gpus

    @cached_property
    def traffic(self) -> Traffic | None:
        """Bytes and messages that each rank sends in one step, by collective; None if the strategy has no formula."""
        said: Traffic | None = self.job.strategy.traffic(self.step)
        return said

    @cached_property
    def states(self) -> RankStates | None:
        """Bytes of parameters, gradients and optimizer state on each rank; None if unknown."""
        said: RankStates | None = self.job.strategy.states(self.step)
        return said

    def at_step(self, number: int) -> JobPrediction:
        """Return the prediction for a different step. Only the times of traffic and compression differ between steps.

        Args:
            number: Number of the step, from 1.
        """
        return replace(self, step=replace(self.step, number=number, is_usual=False))

    def with_expert_loads(self, loads: Sequence[Sequence[float]]) -> JobPrediction:
        """Return the prediction for ranks whose experts are not equally busy. Memory stays that of an even load.

        Args:
            loads: Fraction of the choices of tokens that each expert gets and keeps, by layer with experts, or one row
                for all layers.

        Raises:
            SpecError: The job has no expert axis, or the loads do not fit its layers and experts.
        """
        return replace(self, step=with_loads(self.step, self.found, loads))

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """Peak bytes of each type of memory, as arrays of shape `(world_size,)`; unknown types are left out.

        The types are those of `Run.memory`. Different types may reach their peaks at different times.
        """
        return kinds_by_rank(self.step, self.states)

    @cached_property
    def by_rank(self) -> list[Term] | None:
        """Peak memory of each rank, in bytes; None if the strategy has no formula or the loss was not traced."""
        device = None if self.cluster is None else self.cluster.device
        return rank_memory(self.step, self.found, self.states, device)

    @property
    def memory(self) -> Term | None:
        """Peak memory of the rank with the highest peak, in bytes; None if unknown.

        This is the peak of the job's own program. The layout behind `time` may differ in the split of a pipeline's
        layers and in selective recomputation; see `Job.layout`.
        """
        return None if self.by_rank is None else max(self.by_rank, key=lambda term: term.value)

    @cached_property
    def time(self) -> Term | None:
        """Time of one step, in seconds; None if the job runs on GPUs of this machine, whose rates are unknown.

        On a cluster, if the model is a transformer and the strategy corresponds to a valid layout, this is
        the step time for that layout. Otherwise it is the sum over the model's operations, in which only
        messages between pipeline stages overlap with computation.
        """
        if not self.has_rates:
            return None
        if self.cluster is None or self.calibration is None:
            return job_time_term(self.step, self.found, self.traffic, self.rates)
        if self.as_layout is not None:
            layout = time_term(*self.as_layout, self.cluster, self.calibration)
            parts = with_waiting(layout.parts, self.step)
            return layout if parts is layout.parts else Term.total("step", parts)
        return job_time_term(self.step, self.found, self.traffic, self.rates)

    @cached_property
    def rates(self) -> RankRates:
        """Compute, memory and link rates of one rank."""
        if self.cluster is not None and self.calibration is not None:
            is_divided = (
                self.found.whole is not None
            )  # passes through a part of it are sums over its operations
            model = None if is_divided else self.found.table.as_transformer
            return RankRates.of_cluster(self.step, self.cluster, self.calibration, model)
        host = self.host or HostCalibration.shipped()
        return RankRates.of_this_machine(
            self.job, self.job.strategy.work(self.step.alike), host, emulated=self.emulated, place=self.place
        )

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences on what the trace of the model leaves out, and on what was assumed about messages and the links."""
        is_left_out = self.step.is_compressed and self.job.strategy.pipeline_step(self.step) is not None
        return (*self.found.table.notes, *[_PACKED] * is_left_out, *self._of_links)

    @property
    def _of_links(self) -> tuple[str, ...]:
        if not self.has_rates or self.traffic is None or self.as_layout is not None:
            return ()
        loads = loads_of(self.step, self.traffic, self.rates)
        if loads is not None:
            return loads.assumptions
        return tuple(_UNEVEN.format(name=name) for name, sent in self.traffic.items() if sent.is_uneven)

    @cached_property
    def interval(self) -> Interval | None:
        """90 % prediction interval of the step time, in seconds; None if not `has_rates`.

        On this machine, the interval follows from the errors on runs left out of the fit. Constants that no run on this
        machine determined may be as inaccurate as those that ship with Shardscope. On a cluster, see `uncertainty`. On
        an emulated cluster, the emulated processor times, latencies and link rates are nearly certain. With uneven
        shards, the interval is widened to include the time of a step in which no message waits for another.
        """
        if self.uncertainty is not None:
            return self.uncertainty.interval
        if self.step_time_s is None or self.host is None:
            return None
        return host_interval(self, self.host, self.step_time_s)

    @cached_property
    def uncertainty(self) -> Widened | None:
        """90 % prediction interval of the step time, and the constants that contribute most to its width.

        None if the job runs on this machine.
        """
        if self.calibration is None or self.step_time_s is None:
            return None

        assert self.time is not None
        assert self.cluster is not None
        if self.as_layout is not None and self.time.parts[0].name != "data":  # without waits for data
            model, layout = self.as_layout
            return uncertainty_of(model, self.cluster, layout, self.calibration)

        def seconds(calibrations: Sequence[Calibration]) -> Floats:
            times = (replace(self, calibration=each).step_time_s for each in calibrations)
            return np.array([np.nan if time is None else time for time in times])

        return widened(seconds, self.calibration)

    @cached_property
    def as_layout(self) -> tuple[Transformer, Layout] | None:
        """The transformer and the layout whose step time is `time`; None if it is the sum over the operations."""
        model = self.found.model.as_transformer
        if self.cluster is None or model is None:
            return None
        try:
            layout = self.job.layout()
            layout.check(model, self.cluster)
        except SpecError:
            return None  # no valid layout corresponds to this strategy and batch
        return model, layout

    @property
    def step_time_s(self) -> float | None:
        """Time of one step, in seconds, once a cache of training data is full; None if not `has_rates`.

        This equals `time`, except for asynchronous workers: `time` is how long the slowest worker takes for its own
        gradient, and `step_time_s` is how long all workers together take for as many gradients as a step has.
        """
        return None if self.time is None else step_seconds(self.step, self.time)

    @cached_property
    def at_peak(self) -> AtPeak:
        """Seconds of a step if computation, or sending, always ran at the peak rate."""
        return at_peak(self)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: model FLOPs (3 x forward) divided by the processors' peak FLOPs in one step.

        The peak is the device's, or the stated rate of an emulated processor; for this machine's cores, it is
        the rate of matrix products that a calibration measured. None if unknown.
        """
        return utilization(self.at_peak.compute_s, self.step_time_s)

    @property
    def link_utilization(self) -> float | None:
        """Bytes that the busiest rank sends in a step, divided by the capacity of its link in that time; None if
        unknown.
        """
        return utilization(self.at_peak.sending_s, self.step_time_s)

    @property
    def run_time_s(self) -> float | None:
        """Time of all steps, in seconds, without start-up, evaluations and checkpoints; None if not `has_rates`.

        Steps of the first epoch also wait for a slow source of training data while its cache is filled (`filling_s`).
        """
        return None if self.time is None else run_seconds(self.step, self.time) + self.filling_s

    @cached_property
    def filling_s(self) -> float:
        """Total time that a rank waits while an empty cache of training data is filled, in seconds."""
        return 0.0 if self.time is None else filling_s(self.step, self.time.value)

    @property
    def held_bytes(self) -> float | None:
        """Peak memory of the fullest rank as runs measure it, in bytes; None if unknown. See `Summary.held_bytes`.

        `peak_bytes`, which decides whether the job fits, also counts the batch, intermediate results and gradients of
        activations.
        """
        return (
            None if self.by_rank is None else float(held_at_once(self.step, self.kinds, self.by_rank).max())
        )

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of the rank with the highest peak, intermediate results included, in bytes; None if unknown."""
        return None if self.memory is None else self.memory.value

    @property
    def sent_bytes(self) -> Any:
        """Bytes that each rank sends in one step, as an array of shape `(world_size,)`; None if unknown."""
        return None if self.traffic is None else sent_bytes(self.traffic) + np.zeros(self.job.world_size, int)

    @property
    def fits(self) -> bool | None:
        """Whether each rank fits on its device or, on this machine's CPUs, all fit together; None if unknown.

        On GPUs, the driver's context and the allocator take part of the memory, as for layouts. On an emulated cluster,
        each rank must also fit into the memory that the cluster specifies.
        """
        if self.by_rank is None or not self.has_rates:
            return None
        if self.overfull:
            return False
        if self.cluster is not None:
            return True
        return self.machine_bytes is not None and self.machine_bytes <= usable_memory_bytes()

    @property
    def overfull(self) -> tuple[int, ...]:
        """Ranks whose tensors exceed the memory for tensors on their device, or on the emulated cluster."""
        room = self.step.memory
        if self.by_rank is None or not room:
            return ()
        pairs = enumerate(zip(self.by_rank, room, strict=True))
        return tuple(rank for rank, (term, each) in pairs if term.value > each)

    @property
    def machine_bytes(self) -> float | None:
        """Memory of all processes of a run on this machine's CPUs, in bytes, including libraries; None if unknown."""
        if self.by_rank is None or not self.has_rates:
            return None
        return AGENT_BYTES + self.job.world_size * RANK_BYTES + sum(term.value for term in self.by_rank)

    @property
    def samples_per_s(self) -> float:
        """Samples per second whose gradients are used, over all ranks.

        Raises:
            SpecError: The ranks run on GPUs of this machine.
        """
        if self.step_time_s is None:
            raise SpecError(f"device={self.job.device!r} has no step time: {self.note}")
        assert self.time is not None
        return used_samples_per_s(self.step, self.time)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, over all ranks.

        Raises:
            SpecError: The model is not a transformer, or the ranks run on GPUs of this machine.
        """
        if self.seq is None:
            raise SpecError(
                f"model={label_of(self.job.model)!r} has no known sequence length; use samples_per_s"
            )
        return self.samples_per_s * self.seq

    @property
    def seq(self) -> int | None:
        """Number of tokens in a training sequence; None if the model is not a transformer."""
        model = self.found.model.as_transformer
        return None if model is None else model.seq

    @property
    def num_devices(self) -> int:
        """Number of devices, one per rank."""
        return self.job.world_size

    @property
    def priced(self) -> Cluster | None:
        """The cluster whose price `dollars` uses; None if the job runs on this machine, which has no price."""
        return self.cluster

    @cached_property
    def reliability(self) -> Reliability | None:
        """Expected cost of failures and checkpoints; None without a failure rate."""
        if self.cluster is None:
            return None
        return job_failures(self.job, self.cluster, self.found.model.num_params, self.step_time_s)

    @property
    def note(self) -> str | None:
        """Caveats of the calibration, or why there is no step time; None if there is nothing to say."""
        if not self.has_rates:
            return _NO_RATES.format(world_size=self.job.world_size)
        if self.calibration is not None:
            return self.calibration.note
        measured = "" if self.host is None else self.host.note
        idle = self.rates.idle
        borrowed = _SHIPPED_IDLE if idle is not None and idle.is_shipped else ""
        return " ".join(filter(None, (self.ignored, measured, borrowed))) or None

    def frame(self) -> pd.DataFrame:
        """Return a data frame with one row per collective and rank.

        Columns: collective, rank, bytes, messages, and lower and upper bounds of the bytes: fewest, most.
        """
        import pandas as pd

        rows = [
            (name, rank, int(sent.bytes[rank]), int(sent.messages[rank]), int(low[rank]), int(high[rank]))
            for name, sent in (self.traffic or {}).items()
            for low, high in [sent.bounds or (sent.bytes, sent.bytes)]
            for rank in range(self.job.world_size)
        ]
        return pd.DataFrame(rows, columns=["collective", "rank", "bytes", "messages", "fewest", "most"])

    def to_dict(self) -> dict[str, object]:
        """Return all values and both trees of terms in a JSON-compatible form."""
        fitted = self.calibration or self.host
        states = self.states and {
            kind: [int(each) for each in getattr(self.states, kind)]
            for kind in ("parameters", "gradients", "optimizer")
        }
        return {
            "job": self.job.model_dump(mode="json"),
            "seq": self.seq,
            "cluster": None if (self.cluster or self.emulated) is None else self.where,
            "calibration": fitted and fitted.name,
            "note": self.note,
            "assumptions": list(self.assumptions),
            "step_time_s": self.step_time_s,
            "interval_s": self.interval and [*self.interval],
            "run_time_s": self.run_time_s,
            "mfu": self.mfu,
            "link_utilization": self.link_utilization,
            "goodput": self.goodput,
            "held_bytes": self.held_bytes,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "states": states,
            "traffic": self.frame().to_dict("records"),
            "time": self.time and self.time.to_dict(),
            "memory": self.memory and self.memory.to_dict(),
        }

    def _shown(self) -> list[Part]:
        trees = [Tree(term) for term in (self.time, self.memory) if term is not None]
        return [Sentences(_headline(self)), *trees, _table(self)]


def predict_job(
    job: Job,
    cluster: Cluster | EmulatedCluster | None = None,
    calibration: Calibration | HostCalibration | None = None,
    *,
    software: str | None = None,
    trace: Tracer = traced,
) -> JobPrediction:
    """Predict the bytes that each rank of a job sends in one step, the rank's memory, and the step time.

    Args:
        job: The job.
        cluster: The cluster that the job runs on, with one device per rank; None for this machine. On an emulated
            cluster, the ranks compute on this machine's cores, and send over emulated links, which ranks of a single
            node do not use. Messages that share a node's link or a rack's uplink share its rate.
        calibration: The cluster's constants; None to use those of its device and the software, or on this machine those
            that `ss.calibrate` has saved, or that ship with Shardscope.
        software: Name of the software on the cluster's GPUs; None for the calibration's software, or
            PyTorch's own.
        trace: Function that traces the job's model.

    Raises:
        SpecError: The cluster does not have as many devices as the job has ranks, the calibration is not of its type,
            the cluster is emulated and the job has a link, or the model cannot be traced.
    """
    if cluster is not None and cluster.num_devices != job.world_size:
        raise SpecError(
            f"world_size={job.world_size} does not match the {cluster.num_devices} devices of cluster "
            f"{cluster.name!r}; use world_size={cluster.num_devices}, "
            f"or a cluster of {job.world_size} devices (nodes, per_node)"
        )
    emulated = cluster if isinstance(cluster, EmulatedCluster) else None
    if isinstance(cluster, EmulatedCluster):
        cluster.check_job(job)
        job, cluster = job.replace(device="cpu"), None
    if cluster is None and isinstance(calibration, Calibration):
        raise SpecError(
            f"calibration={calibration.name!r} is for a GPU and has no effect on this machine's CPU ranks; omit it, "
            "give one from ss.calibrate(), or give a cluster"
        )
    if cluster is None and software is not None:
        raise SpecError(
            f"software={software!r} has no effect on this machine's CPU ranks; omit it, or give a cluster"
        )
    is_on_gpus, backend = backend_on(cluster, job)
    casts = is_on_gpus and not (cluster and is_cpu(cluster.device))
    found = trace(job.model_copy(update={"device": "cuda"}) if casts else job)
    assert found.table.step is not None
    constants = None
    if cluster is not None:  # jobs run on plain PyTorch, unless other software is given
        usual = "fsdp2" if calibration is None else None
        constants = calibration_of(cluster, calibration, software=software or usual)
    of_memory = constants.software if constants else ""
    memory = memory_on(emulated or cluster, of_memory, job=job, trace=found.table.step)
    step = JobStep(
        job, found.table.step, settled_step(job), backend, is_on_gpus, slowness_on(emulated),
        update_slowness_on(emulated), memory, is_usual=True,
        shares_host=emulated is None or emulated.link is None,
    )  # fmt: skip
    if cluster is not None:
        return JobPrediction(job, cluster, step, found, constants)
    if not isinstance(calibration, HostCalibration | None):
        require(calibration, HostCalibration, by="calibration", write="ss.HostCalibration.load('FILE.json')")
    assert calibration is None or isinstance(calibration, HostCalibration)
    host = chosen(emulated) if calibration is None else Chosen(calibration, is_saved=True)
    return JobPrediction(job, None, step, found, None, emulated, *host)


_NAMED = 4
"""Maximum number of ranks named in a sentence."""


def _headline(found: JobPrediction) -> tuple[str, ...]:
    job = found.job
    count = plural(job.world_size, "rank")
    fitted = found.calibration or found.host
    of = "" if found.calibration is not None else "of "
    about = "no step time" if fitted is None or not found.has_rates else f"calibration {of}{fitted.name}"
    if found.has_rates and found.calibration is None and not found.is_calibrated:
        about = "not calibrated"
    took, held = "step time: unknown", "peak memory per rank: unknown"
    if found.step_time_s is not None and found.run_time_s is not None and found.interval is not None:
        low, high = (figure(each, "s") for each in found.interval)
        took = (
            f"step time {figure(found.step_time_s, 's')} (90% interval: {low} to {high}), {job.last_step} steps take "
            f"{figure(found.run_time_s, 's')}{_data_bound(found)}"
        )
    if found.held_bytes is not None and found.peak_bytes is not None:
        held = (
            f"peak memory per rank {figure(found.held_bytes, 'bytes')}{beside_peak(found)} "
            f"({figure(found.peak_bytes, 'bytes')} with the batch and temporary tensors)"
        )
    sent = "bytes sent: unknown"
    if found.sent_bytes is not None:
        at_most = "at most " if found.job.strategy.num_dropped else ""
        sent = f"the busiest rank sends {at_most}{figure(float(found.sent_bytes.max()), 'bytes')} per step"
    used = {"MFU": found.mfu, "link utilization": found.link_utilization}
    sent += "".join(f", {name} {each:.1%}" for name, each in used.items() if each is not None)
    return (
        f"{job.label} on {count}, {found.where}, {work_text(job.batch.global_batch, found.seq)}",
        f"{took}; {held}{_misfit(found)}",
        sent,
        *([] if found.note is None else [f"{about}: {found.note}"]),
        *found.assumptions,
    )


def beside_peak(found: JobPrediction) -> str:
    """Clause on memory that the peak does not include: work buffers whose size is unknown before the run."""
    is_lacking = found.cluster is None and found.states is not None and found.states.buffers is None
    return ", plus work buffers (not predicted)" if is_lacking else ""


def _misfit(found: JobPrediction) -> str:
    """Clause that names the ranks that do not fit, not always the one with the highest peak; empty if all fit."""
    if found.fits is not False:
        return ""
    ranks = found.overfull
    if not ranks:
        return "; all ranks together do not fit"
    named = ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" * (len(ranks) > _NAMED))
    return f"; rank{'s' * (len(ranks) > 1)} {named} {'does' if len(ranks) == 1 else 'do'} not fit"


def _data_bound(found: JobPrediction) -> str:
    """Clause on how long ranks wait for data, in each step or in the first epoch; empty if they do not wait."""
    waits = [term for term in (found.time.walk() if found.time else ()) if term.name == WAITING]
    if waits:
        return f", of which {figure(waits[0].value, 's')} per step waiting for data"
    if found.filling_s > 0:
        return f", of which {figure(found.filling_s, 's')} waiting for data while the first epoch fills the cache"
    return ""


def _table(found: JobPrediction) -> Table:
    """Return a table with one row per collective: bytes and messages per rank, and bytes over all ranks."""
    rows = [
        (
            name,
            _span(sent.bytes, bytes_text),
            _span(sent.messages, "{:,}".format),
            bytes_text(int(sent.bytes.sum())),
            _exactness(sent),
        )
        for name, sent in (found.traffic or {}).items()
    ]
    return Table(["collective", "sent per rank", "messages", "sent by all", ""], rows, gap=1)


def _span(values: Any, text: Callable[[int], str]) -> str:
    """Format one number if all ranks have the same value, else the minimum and the maximum."""
    low, high = int(values.min()), int(values.max())
    return text(low) if low == high else f"{text(low)} to {text(high)}"


def _exactness(sent: Sent) -> str:
    if sent.bounds is None:
        return "exact"
    return " to ".join(bytes_text(int(bound.sum())) for bound in sent.bounds)
