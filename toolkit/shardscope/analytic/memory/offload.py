"""Offloading: bytes kept in host memory or on drives instead of on the device, and bytes moved in each step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.states import known_recipe
from shardscope.analytic.recomputation import recomputed_layers
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import OFFLOAD_NAMES

Floats = npt.NDArray[np.float64]

OFFLOADS_OPTIMIZER = np.array([name in ("optimizer", "states", "all") for name in OFFLOAD_NAMES])
OFFLOADS_STATES = np.array([name in ("states", "all") for name in OFFLOAD_NAMES])
OFFLOADS_ACTIVATIONS = np.array([name in ("activations", "all") for name in OFFLOAD_NAMES])


class HostTraffic(NamedTuple):
    """Traffic between one device and its host in each direction, in bytes or in seconds."""

    to_host: Floats
    to_device: Floats

    def plus(self, other: HostTraffic) -> HostTraffic:
        """Return the sum of this traffic and another."""
        return HostTraffic(self.to_host + other.to_host, self.to_device + other.to_device)

    def times(self, factor: npt.ArrayLike) -> HostTraffic:
        """Return this traffic multiplied by a number."""
        count = np.asarray(factor)
        return HostTraffic(np.asarray(self.to_host * count), np.asarray(self.to_device * count))


class StepTraffic(NamedTuple):
    """Host traffic of the parts of a step: forward and backward pass per micro-batch, and update once per step."""

    forward: HostTraffic
    backward: HostTraffic
    update: HostTraffic


class Offloadable(NamedTuple):
    """Data that a rank can offload to its host, measured in bytes, or in seconds for one transfer in one direction."""

    weights: Floats
    """Weights that the rank keeps: all weights of its layers or, with ZeRO-3, its shard."""
    gradients: Floats
    """Gradients that the rank keeps: all gradients of its layers or, with ZeRO-2 and ZeRO-3, its shard."""
    owned_weights: Floats
    """Weights that the rank updates."""
    owned_gradients: Floats
    """Gradients of the weights that the rank updates."""
    saved: Floats
    """Activations that the rank's layers save for one micro-batch."""


def tiers(offloaded: Floats, host_capacity: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Return a rank's offloaded bytes in host memory, at most `host_capacity`, and the remaining bytes on drives."""
    host = np.minimum(offloaded, host_capacity)
    return host, offloaded - host


def drive_bytes_per_device(cluster: Cluster) -> float:
    """Return the bytes of drive capacity per device; 0 if the bandwidth of the drives is unknown (given as 0)."""
    return cluster.nvme_bytes / cluster.per_node if cluster.nvme_bandwidth else 0.0


def host_bytes_per_device(cluster: Cluster) -> float:
    """Return the bytes of host memory per device."""
    return cluster.host_memory_bytes / cluster.per_node


def refetched_share(recompute: npt.ArrayLike, layers: npt.ArrayLike, most: npt.ArrayLike) -> Floats:
    """Return the fraction of a device's weights that are fetched again for recomputation: those of recomputed layers.

    Args:
        recompute: Index into `spec.layout.RECOMPUTE_NAMES`.
        layers: Number of layers on the device.
        most: Largest number of layers to recompute, 0 for all; see `analytic.recomputation`.
    """
    return np.asarray((np.asarray(recompute) == 2) * recomputed_layers(layers, most) / layers)


def step_traffic(offload: npt.ArrayLike, refetched: npt.ArrayLike, offloadable: Offloadable) -> StepTraffic:
    """Return the host traffic of a layout with offloading, by part of the step and direction. Arguments may be arrays.

    If only the optimizer state is offloaded, the host updates the weights: the device sends the gradients of the
    weights that its rank updates, and fetches the updated weights (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840,
    section 4.1: 2M + 2M bytes for M parameters). Offloaded weights are fetched once in each forward and each backward
    pass, and those of recomputed layers once more. Offloaded gradients are sent once per backward pass (ZeRO-Infinity,
    Rajbhandari et al. 2021, arXiv 2104.07857, sections 4.1 and 5.1). Each rank fetches its own shard (section 6.1).
    Offloaded activations are sent in the forward pass and fetched in the backward pass.

    Args:
        offload: Index into `spec.layout.OFFLOAD_NAMES`.
        refetched: Result of `refetched_share`.
        offloadable: Data that can be offloaded, in bytes or in seconds; the result has the same unit.
    """
    kind = np.asarray(offload)
    states, activations = OFFLOADS_STATES[kind], OFFLOADS_ACTIVATIONS[kind]
    only_optimizer = OFFLOADS_OPTIMIZER[kind] & ~states
    saved, weights = offloadable.saved * activations, offloadable.weights * states
    passes_back = 1 + np.asarray(refetched)
    return StepTraffic(
        forward=HostTraffic(to_host=saved, to_device=weights),
        backward=HostTraffic(to_host=offloadable.gradients * states, to_device=weights * passes_back + saved),
        update=HostTraffic(
            to_host=offloadable.owned_gradients * only_optimizer,
            to_device=offloadable.owned_weights * only_optimizer,
        ),
    )


def offload_traffic(
    layouts: Layouts,
    *,
    parameters: Floats,
    owned: Floats,
    saved: Floats,
    gradients: Floats | None = None,
    layers: npt.ArrayLike = 1,
) -> HostTraffic:
    """Return the bytes that one device sends to its host, and fetches from it, in one step with all micro-batches.

    Args:
        layouts: The layouts.
        parameters: Number of weights that the rank keeps: all weights of its layers or, with ZeRO-3, its shard.
        owned: Number of weights that the rank updates.
        saved: Bytes that the rank's layers save for one micro-batch.
        gradients: Number of gradient elements that the rank keeps; None if it is the number of weights.
        layers: Number of layers on the rank, which matters only if `Layout.recompute_layers` is set.
    """
    recipe = known_recipe(layouts.precision)
    offloadable = Offloadable(
        weights=parameters * recipe.parameter,
        gradients=(parameters if gradients is None else gradients) * recipe.gradient,
        owned_weights=owned * recipe.parameter,
        owned_gradients=owned * recipe.gradient,
        saved=saved,
    )
    refetched = refetched_share(layouts.recompute, layers, layouts.most_recomputed)
    step = step_traffic(layouts.offload, refetched, offloadable)
    return step.forward.plus(step.backward).times(layouts.num_micro_batches).plus(step.update)
