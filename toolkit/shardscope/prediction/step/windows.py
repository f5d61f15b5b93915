"""What goes on while a micro-batch computes: collectives of model states and traffic to the host share one window.

A pass through the slowest stage takes as long as the longest of what runs side by side in it:

    t' = max(t + N - min(ρ N, t) + K, H)

with t its computing and the messages that nothing hides, N the collectives that gather weights and reduce gradients, ρ
the share of them that computing can hide, K packing compressed gradients, and H the traffic between device, host and
drives, which ZeRO-Infinity overlaps with computing and with collectives alike (Rajbhandari et al. 2021, arXiv
2104.07857, section 6.2). Every term grows with what it stands for, so no faster link ever makes a pass longer; and
the pipeline waits for t', so that what is not hidden lengthens its bubble too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Ints
from shardscope.analytic.memory.offload import Away, StepTraffic, Traffic, step_traffic
from shardscope.spec.cluster import Cluster

Floats = npt.NDArray[np.float64]
Columns = Mapping[str, Floats]


class Rows(NamedTuple):
    """Some rows of a table, with what was looked up for them."""

    zero: Ints
    offload: Ints
    recompute: Ints
    micro: Columns
    """Seconds of one micro-batch: ``forward``, ``input``, ``weight``, ``saved``."""
    states: Columns
    """Seconds of `shards.Weights`."""
    drag: Floats
    """Seconds of the drives for each second of traffic over the link to the host (`drag_of`)."""


class Late(NamedTuple):
    """Seconds that a pass takes beyond its own."""

    network: Floats
    """For collectives that are not hidden, and packing what they send."""
    host: Floats
    """For traffic to the host that takes longer still."""

    @property
    def total(self) -> Floats:
        """Both."""
        return np.asarray(self.network + self.host)


class Windows(NamedTuple):
    """Of one micro-batch."""

    forward: Late
    backward: Late
    free: Floats
    """Seconds of the lengthened backward pass in which none of its collectives runs."""


def windows(rows: Rows, overlap: float) -> Windows:
    """What lengthens the passes of some rows, of whose collectives computing can hide the share `overlap`.

    ZeRO 3 gathers parameters for both passes, 2 and 3 reduce gradients in the backward pass of every micro-batch and
    pack them as often where they are compressed.
    """
    there, back = rows.micro["forward"], rows.micro["input"] + rows.micro["weight"]
    if rows.zero.max() < 2 and not rows.offload.any():
        nothing = Late(np.zeros(1), np.zeros(1))
        return Windows(nothing, nothing, back)
    gathered = np.where(rows.zero == 3, rows.states["gather_s"], 0.0)
    reduced = np.where(rows.zero >= 2, rows.states["reduce_s"], 0.0)
    packed = np.where(rows.zero >= 2, rows.states["codec_s"], 0.0)
    out, home = _host_seconds(rows)
    forward = _late(there, gathered, overlap, 0.0, out)
    backward = _late(back, gathered + reduced, overlap, packed, home)
    return Windows(forward, backward, np.maximum(back + backward.total - gathered - reduced, 0.0))


def _late(
    busy: Floats, network: Floats, overlap: float, packed: Floats | float, host: Floats | float
) -> Late:
    shown = network - np.minimum(overlap * network, busy) + packed
    return Late(shown, np.maximum(host - busy - shown, 0.0))


def _host_seconds(rows: Rows) -> tuple[Floats | float, Floats | float]:
    """Of a forward and a backward pass: the link carries both ways at once, the drives one after the other."""
    if not rows.offload.any():
        return 0.0, 0.0
    traffic = _traffic(rows)
    return _side_by_side(traffic.forward, rows.drag), _side_by_side(traffic.backward, rows.drag)


def _side_by_side(traffic: Traffic, drag: Floats) -> Floats:
    both = traffic.to_host + traffic.to_device
    return np.maximum(np.maximum(traffic.to_host, traffic.to_device), drag * both)


def _traffic(rows: Rows) -> StepTraffic:
    states = rows.states
    away = Away(
        states["weights_s"], states["gradients_s"], states["owned_weights_s"], states["owned_gradients_s"],
        rows.micro["saved"],
    )  # fmt: skip
    return step_traffic(rows.offload, rows.recompute, away)


def host_update(rows: Rows) -> Floats:
    """Seconds of an update on the host: gradients out, states read and written, weights back, one after the other."""
    update = _traffic(rows).update
    states = rows.states["host_update_s"] * np.maximum(1.0, rows.drag)
    return np.asarray(update.to_host + states + update.to_device)


def drag_of(cluster: Cluster, drive_share: Floats) -> Floats:
    """Seconds of the drives for each second of the link to the host: by the share of what is offloaded that is there.

    A device has its part of the node's drives, and none where their bandwidth is 0, that is, not known: what the host
    cannot hold has no place then, as memory says.
    """
    if not cluster.nvme_bandwidth:
        return np.zeros(1)
    return np.asarray(drive_share * cluster.device.host_bandwidth * cluster.per_node / cluster.nvme_bandwidth)
