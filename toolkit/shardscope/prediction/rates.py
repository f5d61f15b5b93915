"""Compute, memory and link rates that convert a step's operation and byte counts into seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardscope.analytic.communication.network import Network
from shardscope.analytic.communication.traffic import Sent
from shardscope.analytic.job_step import JobStep
from shardscope.calibration.calibration import Calibration
from shardscope.calibration.host_calibration import HostCalibration, HostMachine, HostTransport, knot_shares
from shardscope.calibration.this_machine import core_speed
from shardscope.machine import Place
from shardscope.prediction.step.machine import Machine
from shardscope.prediction.step.passes import Passes, whole_passes
from shardscope.runlog.axes import EXPERT_DATA, axis_groups, axis_of
from shardscope.spec import Job
from shardscope.spec.cluster import Cluster, EmulatedCluster
from shardscope.spec.job_layout import IN_LAYOUTS
from shardscope.spec.link import Link
from shardscope.spec.model import Transformer
from shardscope.spec.strategy import Work

KERNELS_PER_OPERATION = 1.6
"""Number of kernels that a traced operation launches on a GPU. Calibrations are fitted with 90 kernels per transformer
block in both passes (`prediction.step.micro`), and the trace of a block in mixed precision has 56 operations."""


class IdleMessages(NamedTuple):
    """Time per message of ranks that do not compute, by the number of ranks that send at the same time.

    Each message wakes the core of its receiver. With more ranks than cores, messages and ranks queue for the cores.
    """

    ranks: tuple[float, ...]
    """Numbers of ranks with known times, in ascending order."""
    seconds: tuple[float, ...]
    is_shipped: bool = False
    """Whether the times are those that ship with Shardscope, because the calibration has none."""

    def at(self, ranks: float) -> float:
        """Return the seconds per message for this number of ranks."""
        return float(np.exp(knot_shares(ranks, self.ranks) @ np.log(self.seconds)))


class RankRates(NamedTuple):
    """Compute, memory and link rates of one rank."""

    flops: float
    """FLOP/s in matrix products."""
    bandwidth: float
    """Bytes per second that operations other than matrix products read and write."""
    operation_s: float
    """Fixed time per operation, in seconds, independent of its size."""
    step_s: float
    """Fixed time per step, in seconds."""
    link: float
    """Bytes per second that the rank can send."""
    message_s: float
    """Time per message for which its sender or receiver is busy, in seconds."""
    source: str
    optimizer_bandwidth: float
    """Bytes per second that the optimizer's update reads and writes."""
    codec_bandwidth: float
    """Bytes per second that compression and decompression of gradients read and write."""
    tensor_s: float = 0.0
    """Fixed time per parameter tensor that the optimizer updates, in seconds."""
    stage_s: float = 0.0
    """Fixed time per micro-batch of a pipeline stage, in a forward and a backward pass, in seconds."""
    unit_s: float = 0.0
    """Fixed time per unit for which ZeRO-2 or ZeRO-3 gathers parameters, in a forward and a backward pass, in
    seconds."""
    unit_busy_s: float = 0.0
    """`unit_s` including waits for a core, if ranks sleep; 0 otherwise. In the backward pass of ZeRO-3, a rank is busy
    with a unit for this long while it gathers the next one."""
    emulated_flops: float | None = None
    """FLOP/s that set the time of passes on an emulated processor; None if no processor is emulated."""
    idle: IdleMessages | None = None
    """Messages of ranks that sleep; None if ranks compute, so that `message_s` contains their waits for a core."""
    network: Network | None = None
    """Links that messages share, if they are not all equal; `link` is then the rate of the slowest."""
    latency_s: float = 0.0
    """Latency of the emulated link, in seconds; the latencies of messages that do not wait for each other overlap."""
    axis_ranks: Mapping[str, int] = MappingProxyType({})
    """Number of ranks in a group along each axis, if the ranks have several axes."""
    overlaps: bool = False
    """Whether messages between stages travel over links while ranks compute; if not, the cores copy them in memory."""
    half_size: float | None = None
    """Matrix size at which a device reaches half of its rate for huge matrices, if launches overlap with computation;
    None if they do not, and `flops` is then reached at all sizes."""
    passes: Passes | None = None
    """Passes of one micro-batch through a transformer on a cluster; None to sum up traced operations."""

    def per_message_s(self, collective: str, sent: Sent, carried_s: float | None = None) -> float:
        """Return the seconds per message of a collective, in addition to latency and the time for its bytes.

        Sleeping ranks of a group all send at the same time, and their messages queue for the cores. Groups do not wait
        for each other: one that is behind sends while the ranks of others sleep. If the queue takes longer than the
        link, the cores process the queue while the link is busy. Otherwise, each message, once its bytes have arrived,
        waits on average for half of the messages that arrive with it.

        Args:
            collective: Name of the collective, with its axis.
            sent: Traffic of the collective.
            carried_s: Seconds in which the limiting links carry one message of each rank; None for the rank's own
                link.
        """
        messages = np.maximum(sent.counted, 1)
        known = sent.messages if sent.assumed_messages is None else sent.counted
        group = self.axis_ranks.get(axis_of(collective) or "", inf)
        senders = min(group, float(np.sum(known)) / max(1, int(np.max(known))))
        if self.idle is None or senders <= 1.0:
            return self.message_s
        if carried_s is None:
            carried_s = float(np.max(sent.busiest / messages)) / self.link
        arriving = min(group, float(np.sum(sent.busiest)) / max(1, int(np.max(sent.busiest))))
        alone_s = min(self.message_s, self.idle.at(senders))
        waits_s = max(0.0, self.idle.at(arriving) - alone_s) / 2
        return max(alone_s + waits_s, self.idle.at(senders) - carried_s)

    @classmethod
    def of_this_machine(
        cls, job: Job, work: Sequence[Work], host: HostCalibration, *,
        emulated: EmulatedCluster | None = None, place: Place | None = None,
    ) -> RankRates:  # fmt: skip
        """Return the rates of one rank of `job` on this machine, whose cores the ranks share.

        Ranks on emulated processors mostly sleep, which needs no core. Work that all ranks do at the same time still
        queues for the cores: their messages (see `IdleMessages`), and the fixed costs of a step and of a pipeline
        stage. The fixed cost of gathering parameters arises within a pass, whose sleep absorbs waits for a core. Ranks
        that wait in a schedule leave their core to others: a pipeline that mostly waits is not slowed down by few
        cores, and a smaller bubble then gains little. The job's link, if it has one, limits the rate of sending.

        Args:
            job: The job.
            work: Work of each rank.
            host: Constants of this machine. The constants of another machine are scaled by the speed of
                NumPy's kernels, and constants that depend on the number of ranks by the number of cores.
            emulated: The emulated cluster that the ranks run on: between several nodes, its links carry TCP, and its
                largest slowdown includes the time that ranks wait for a core.
            place: Cores and shared memory that the ranks have; None for those of this process.
        """
        place = place or Place.here()
        speed, cores = relative_speed(host), host.machine.cores / place.cores
        slow = shared_slowdown(host, active_ranks(work), place.cores)
        slow = max(slow, 0.0 if emulated is None else emulated.slowdown)
        ranks = job.world_size * cores
        updates = None if emulated is None else emulated.memory_bandwidth
        is_idle = _sleeps(emulated) and not _sleeps(host.cluster)
        alone = min(ranks, host.machine.cores) if is_idle else ranks
        sent = _messages(job, host, ranks, emulated, place, is_idle=is_idle)

        def fixed(name: str) -> float:
            return host.value(name, ranks=alone) * max(1.0, ranks / alone)

        return cls(
            flops=host.value("flops") * speed.flops / slow * min(job.threads, place.cores),
            bandwidth=host.value("bandwidth") * speed.bandwidth / slow,
            operation_s=host.value("operation_s") * slow,
            step_s=fixed("step_s"),
            link=sent.bandwidth,
            message_s=sent.message_s,
            source=host.label,
            optimizer_bandwidth=updates or host.value("optimizer_bandwidth") * speed.bandwidth / slow,
            codec_bandwidth=host.value("codec_bandwidth") * speed.bandwidth / slow,
            tensor_s=0.0 if updates else host.value("tensor_s") * slow,
            unit_s=host.value("unit_s", ranks=alone) if is_idle else fixed("unit_s"),
            unit_busy_s=fixed("unit_s") if is_idle else 0.0,
            stage_s=fixed("stage_s"),
            emulated_flops=None if emulated is None else emulated.flops,
            idle=sent.idle,
            network=network_of(emulated, efficiency=_share(host, "network"), memory=sent.memory_bandwidth),
            latency_s=sent.latency_s,
            axis_ranks=_axis_ranks(job),
            overlaps=limit_of(job, emulated) is not None,
        )

    @classmethod
    def of_cluster(
        cls, step: JobStep, cluster: Cluster, calibration: Calibration, model: Transformer | None = None
    ) -> RankRates:
        """Return the rates of one device of `cluster`, with the link rate of the slowest link between the ranks.

        Args:
            step: The training step.
            cluster: The cluster.
            calibration: The cluster's constants.
            model: The transformer that the job trains; None if it trains another model.

        Raises:
            SpecError: The device supports none of the dtypes of the job's precision.
        """
        job = step.job
        machine = Machine.of(cluster, calibration, IN_LAYOUTS.get(job.precision, "fp32"))
        passes = None
        slower = 2.0 if job.precision == "fp64" else 1.0
        if model is not None:
            passes = whole_passes(
                model, cluster, calibration, micro_batch=step.samples, recompute=job.recompute,
                precision=IN_LAYOUTS.get(job.precision, "fp32"), slower=slower,
            )  # fmt: skip
        link, latency = (float(figure) for figure in machine.link(job.world_size, 1))
        return cls(
            flops=machine.matmul_rate / slower,
            bandwidth=machine.memory_rate,
            operation_s=calibration.launch_s * KERNELS_PER_OPERATION,
            step_s=calibration.step_s,
            link=link,
            message_s=latency + calibration.collective_s,
            source=f"rates: {calibration.name}",
            optimizer_bandwidth=cluster.device.memory_bandwidth * calibration.optimizer_efficiency,
            codec_bandwidth=machine.memory_rate,
            overlaps=True,
            half_size=calibration.half_size,
            passes=passes,
        )


_TINY = 1e-30
FREE = RankRates(
    flops=inf, bandwidth=inf, operation_s=0.0, step_s=_TINY, link=inf, message_s=0.0, source="",
    optimizer_bandwidth=inf, codec_bandwidth=inf,
)  # fmt: skip
"""Rates at which everything takes no time."""


def stated_rates(emulated: EmulatedCluster | None, limit: Link | None) -> RankRates:
    """Return rates with which only emulated costs take time: latencies, and computation on emulated processors."""
    return FREE._replace(
        latency_s=0.0 if limit is None else limit.latency_s,
        emulated_flops=None if emulated is None else emulated.flops,
        optimizer_bandwidth=inf if emulated is None else emulated.memory_bandwidth or inf,
    )


def shared_slowdown(host: HostCalibration, active: float, cores: float) -> float:
    """Return the slowdown of ranks that share the cores of a machine.

    Beyond the measured numbers of ranks, the slowdown is at least the number of ranks per core.
    """
    at = max(1.0, active * host.machine.cores / cores)
    slow = host.value("slowdown", ranks=at)
    is_measured = at <= (host.rows("slowdown")[-1].ranks or 1)
    return slow if is_measured else max(slow, active / cores)


def active_ranks(work: Sequence[Work]) -> float:
    """Return the mean number of ranks that compute at the same time, given the work of each."""
    return sum(each.computing for each in work) / max(each.computing + each.waiting for each in work)


def _axis_ranks(job: Job) -> dict[str, int]:
    """Return the number of ranks in a group along each axis; empty if the ranks have one axis."""
    shape = job.strategy.shape(job.world_size)
    experts = int((job.strategy.degrees(job.world_size) or {}).get("expert", 1))
    of_experts = {"expert": experts, EXPERT_DATA: job.num_state_ranks // experts} if experts > 1 else {}
    return {axis: len(axis_groups(shape, axis)[0]) for axis in shape} | of_experts


def _sleeps(emulated: EmulatedCluster | None) -> bool:
    """Whether ranks mostly sleep because their processors are emulated, and therefore hardly wait for a core."""
    return emulated is not None and emulated.flops is not None


def transport_of(
    job: Job, emulated: EmulatedCluster | None = None, place: Place | None = None
) -> HostTransport:
    """Return the transport of the messages of a job's CPU ranks on this machine or on an emulated cluster."""
    if emulated is not None and emulated.link is not None:
        return "network"
    return "tcp" if job.transport == "tcp" or not (place or Place.here()).shares_memory else "shm"


def network_of(
    emulated: EmulatedCluster | None, *, efficiency: float = 1.0, memory: float = inf
) -> Network | None:
    """Return the links of an emulated cluster; None if all ranks have equal links that they do not share.

    Args:
        emulated: The cluster.
        efficiency: Fraction of the links' rates that messages reach.
        memory: Bytes per second between two ranks of a node.
    """
    if emulated is None or emulated.has_equal_links:
        return None
    return Network.of(emulated, efficiency=efficiency, memory=memory)


def limit_of(job: Job, emulated: EmulatedCluster | None = None) -> Link | None:
    """Return the emulated link that limits the messages of a job's ranks; None if there is none."""
    return job.link if emulated is None else emulated.link


class _Messages(NamedTuple):
    """Messages of ranks on this machine.

    Attributes:
        bandwidth: Bytes per second that a rank can send.
        message_s: Seconds per message, without `latency_s`.
        latency_s: Latency of the emulated link, in seconds.
        memory_bandwidth: Bytes per second that a rank can send to ranks of its own node.
        idle: Messages of ranks that sleep; None if ranks compute.
    """

    bandwidth: float
    message_s: float
    latency_s: float
    memory_bandwidth: float
    idle: IdleMessages | None = None


def _messages(
    job: Job, host: HostCalibration, ranks: float, emulated: EmulatedCluster | None, place: Place, *,
    is_idle: bool,
) -> _Messages:  # fmt: skip
    """Return the rates and times of messages of ranks on this machine.

    Args:
        job: The job.
        host: Constants of this machine.
        ranks: Number of ranks.
        emulated: The emulated cluster that the ranks run on.
        place: Cores and shared memory that the ranks have.
        is_idle: Whether ranks sleep, so that messages do not wait for computation.
    """
    transport, limit = transport_of(job, emulated, place), limit_of(job, emulated)
    known = transport if host.has("message_s", transport) else "tcp"
    loopback = "tcp" if transport == "network" else transport
    at = min(ranks, host.machine.cores) if is_idle else ranks  # more sleeping ranks than cores take turns
    memory, latency_s = host.value("message_bandwidth", ranks=at, transport=loopback) * at / ranks, 0.0
    bandwidth = memory
    if limit is not None:
        bandwidth, latency_s = min(memory, _share(host, transport) * limit.bandwidth), limit.latency_s
    if not is_idle:
        computing_s = host.value("message_s", ranks=ranks, transport=known)
        return _Messages(bandwidth, computing_s, latency_s, memory)
    idle = _idle_messages(host, loopback, place.cores)
    return _Messages(bandwidth, idle.seconds[0], latency_s, memory, idle)


def _idle_messages(host: HostCalibration, transport: str, usable: float) -> IdleMessages:
    """Return the message times of sleeping ranks on these cores; shipped values if the calibration has none."""
    is_shipped = not host.has("woken_message_s", transport)
    if is_shipped:
        host = HostCalibration.shipped()
    rows, cores = host.rows("woken_message_s", transport), usable / host.machine.cores
    ranks, seconds = tuple((row.ranks or 1) * cores for row in rows), tuple(row.value for row in rows)
    return IdleMessages(ranks, seconds, is_shipped)


def _share(host: HostCalibration, transport: str) -> float:
    return host.value("link_efficiency", transport=transport) if transport == "network" else 1.0


def is_limited_by_link(job: Job, host: HostCalibration, link: float, emulated: EmulatedCluster) -> bool:
    """Whether the emulated link is slower than memory, so that it sets the rate `link`, in bytes per second."""
    limit = limit_of(job, emulated)
    return limit is not None and link >= _share(host, transport_of(job, emulated)) * limit.bandwidth


class Relative(NamedTuple):
    """Speed of this machine relative to the calibrated machine."""

    flops: float = 1.0
    bandwidth: float = 1.0


def relative_speed(host: HostCalibration) -> Relative:
    """Return the speed of this machine's cores relative to those on which `host` was measured."""
    if host.machine == HostMachine.here():
        return Relative()
    now = core_speed()
    return Relative(now.flops / host.numpy_flops, now.bandwidth / host.numpy_bandwidth)
