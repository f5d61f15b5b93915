"""Waits in the passes of one micro-batch: collectives of ZeRO and host traffic that computation does not hide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Ints
from shardscope.analytic.memory.offload import HostTraffic, Offloadable, StepTraffic, step_traffic
from shardscope.spec.cluster import Cluster

Floats = npt.NDArray[np.float64]

Columns = Mapping[str, Floats]


class StepRows(NamedTuple):
    """Settings of some layouts, and their rows in the lookup tables."""

    zero: Ints
    reduces: npt.NDArray[np.bool_]
    """Whether gradients are reduced in the backward pass of every micro-batch; if not, once per step."""
    offload: Ints
    micro: Columns
    """Columns of `tables.micro_table`, such as ``forward``, ``input``, ``weight`` and ``saved``, in seconds."""
    states: Columns
    """Columns of `tables.state_table`, in seconds."""
    drag: Floats
    """Time of drive traffic relative to the time of host-link traffic; see `drag_of`."""
    splits: npt.NDArray[np.bool_]
    """Whether the schedule defers the weight gradients to a separate pass."""


class Late(NamedTuple):
    """Time that waits add to one pass, in seconds."""

    network: Floats
    """Exposed collectives, and packing of compressed gradients."""
    host: Floats
    """Host traffic that takes longer than computation and collectives together."""

    @property
    def total(self) -> Floats:
        """Sum of `network` and `host`."""
        return np.asarray(self.network + self.host)


class Windows(NamedTuple):
    """Waits in the passes of one micro-batch, and the time left to hide other collectives."""

    forward: Late
    backward: Late
    weight: Floats
    """The part of `backward` in the pass of the weight gradients, if that is a separate pass; else 0."""
    free: Floats
    """Time of the backward pass, including waits but not its collectives, in seconds."""


def windows(rows: StepRows, overlap: float) -> Windows:
    """Return the waits in the passes of one micro-batch if computation can hide the fraction `overlap` of collectives.

    ZeRO 3 gathers parameters for both passes. ZeRO 2 and 3 reduce gradients in the backward pass of every micro-batch,
    and pack them each time if they are compressed; FSDP2 in a pipeline only once per step. If weight gradients are a
    separate pass, this pass and the pass of the input gradients each wait for one half, so that faster computation
    makes neither longer. Charging the whole wait to one of them would not ensure this.
    """
    there, back = rows.micro["forward"], rows.micro["input"] + rows.micro["weight"]
    if rows.zero.max() < 2 and not rows.offload.any():
        nothing = Late(np.zeros(1), np.zeros(1))
        return Windows(nothing, nothing, np.zeros(1), back)
    gathered = np.where(rows.zero == 3, rows.states["gather_s"], 0.0)
    reduced = np.where(rows.reduces, rows.states["reduce_s"], 0.0)
    packed = np.where(rows.reduces, rows.states["codec_s"], 0.0)
    out, home = host_seconds(rows)
    forward = _late(there, gathered, overlap, 0.0, out)
    backward, weight = _late(back, gathered + reduced, overlap, packed, home), np.zeros(1)
    if rows.splits.any():
        first, second = (
            _late(rows.micro[half], (gathered + reduced) / 2, overlap, packed / 2, home / 2)
            for half in ("input", "weight")
        )
        parts = zip(backward, first, second, strict=True)
        backward = Late(*(np.where(rows.splits, a + b, whole) for whole, a, b in parts))
        weight = np.where(rows.splits, second.total, 0.0)
    return Windows(forward, backward, weight, np.maximum(back + backward.total - gathered - reduced, 0.0))


def _late(
    busy: Floats, network: Floats, overlap: float, packed: Floats | float, host: Floats | float
) -> Late:
    shown = network - np.minimum(overlap * network, busy) + packed
    return Late(shown, np.maximum(host - busy - shown, 0.0))


def host_seconds(rows: StepRows) -> tuple[Floats | float, Floats | float]:
    """Return the times of host traffic in a forward and in a backward pass, in seconds.

    The host link is full duplex; NVMe drives handle reads and writes in turn.
    """
    if not rows.offload.any():
        return 0.0, 0.0
    traffic = _traffic(rows)
    return _transfer_seconds(traffic.forward, rows.drag), _transfer_seconds(traffic.backward, rows.drag)


def _transfer_seconds(traffic: HostTraffic, drag: Floats) -> Floats:
    both = traffic.to_host + traffic.to_device
    return np.maximum(np.maximum(traffic.to_host, traffic.to_device), drag * both)


def _traffic(rows: StepRows) -> StepTraffic:
    states = rows.states
    offloadable = Offloadable(
        states["weights_s"], states["gradients_s"], states["owned_weights_s"], states["owned_gradients_s"],
        rows.micro["saved"],
    )  # fmt: skip
    return step_traffic(rows.offload, rows.micro["refetched"], offloadable)


def host_update(rows: StepRows) -> Floats:
    """Return the time to move gradients to the host, update states there and move weights back, in seconds."""
    update = _traffic(rows).update
    states = rows.states["host_update_s"] * np.maximum(1.0, rows.drag)
    return np.asarray(update.to_host + states + update.to_device)


def drag_of(cluster: Cluster, drive_share: Floats) -> Floats:
    """Return the time of drive traffic relative to that of host-link traffic.

    Each device has an equal share of its node's drives. Drives with an unknown bandwidth (0) are not used; if the
    offloaded data exceed host memory, the memory formulas then reject the layout. `drive_share` is the fraction of each
    layout's offloaded bytes that is stored on the drives.
    """
    if not cluster.nvme_bandwidth:
        return np.zeros(1)
    return np.asarray(drive_share * cluster.device.host_bandwidth * cluster.per_node / cluster.nvme_bandwidth)
