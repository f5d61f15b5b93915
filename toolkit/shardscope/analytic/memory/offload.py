"""Offloading: bytes kept on the host and its drives instead of the device, and bytes moved in each step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardscope.analytic.layouts import Layouts
from shardscope.analytic.memory.states import known_recipe
from shardscope.spec.cluster import Cluster
from shardscope.spec.layout import OFFLOAD_NAMES

Floats = npt.NDArray[np.float64]

OFFLOADS_OPTIMIZER = np.array([name in ("optimizer", "states", "all") for name in OFFLOAD_NAMES])
OFFLOADS_STATES = np.array([name in ("states", "all") for name in OFFLOAD_NAMES])
OFFLOADS_ACTIVATIONS = np.array([name in ("activations", "all") for name in OFFLOAD_NAMES])


class HostTraffic(NamedTuple):
    """Traffic between one device and its host, by direction, in bytes or in seconds."""

    to_host: Floats
    to_device: Floats

    def plus(self, other: HostTraffic) -> HostTraffic:
        """Return the sum of both."""
        return HostTraffic(self.to_host + other.to_host, self.to_device + other.to_device)

    def times(self, factor: npt.ArrayLike) -> HostTraffic:
        """Return this traffic multiplied by a number."""
        count = np.asarray(factor)
        return HostTraffic(np.asarray(self.to_host * count), np.asarray(self.to_device * count))


class StepTraffic(NamedTuple):
    """Traffic of one micro-batch's forward pass, of its backward pass, and of the update (once per step)."""

    forward: HostTraffic
    backward: HostTraffic
    update: HostTraffic


class Away(NamedTuple):
    """Data that a rank may offload to its host, in bytes, or in seconds to move it once in one direction."""

    weights: Floats
    """Weights that the rank keeps: all that it computes with, or with ZeRO-3 its partition."""
    gradients: Floats
    """Gradients that the rank keeps: all of them, or with ZeRO-2 and ZeRO-3 its partition."""
    owned_weights: Floats
    """Weights that the rank updates."""
    owned_gradients: Floats
    saved: Floats
    """Activations that the rank's layers save for one micro-batch."""


def tiers(offloaded: Floats, host_capacity: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Split a rank's offloaded bytes into those in host memory and those beyond `host_capacity`, which go to drives."""
    host = np.minimum(offloaded, host_capacity)
    return host, offloaded - host


def drive_room(cluster: Cluster) -> float:
    """Bytes of drive capacity per device; 0 if the drives' bandwidth is unknown (0)."""
    return cluster.nvme_bytes / cluster.per_node if cluster.nvme_bandwidth else 0.0


def host_room(cluster: Cluster) -> float:
    """Bytes of host memory per device."""
    return cluster.host_memory_bytes / cluster.per_node


def step_traffic(offload: npt.ArrayLike, recompute: npt.ArrayLike, away: Away) -> StepTraffic:
    """Host traffic of an offloaded layout by part of the step and direction; arguments follow NumPy broadcasting.

    The optimizer's update on the host receives the gradients of the rank's partition and returns its weights
    (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840, section 4.1: 2M + 2M bytes for M parameters). Offloaded weights
    are fetched once for each forward and each backward pass, and once more with full recomputation. Gradients are sent
    once per backward pass (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857, sections 4.1 and 5.1; each rank
    fetches its own partition, 6.1). Activations are sent in the forward pass and fetched in the backward pass.

    Args:
        offload: Index into `spec.layout.OFFLOAD_NAMES`.
        recompute: Index into `spec.layout.RECOMPUTE_NAMES`.
        away: Offloadable data in bytes or in seconds; the result has the same unit.
    """
    kind = np.asarray(offload)
    states, activations = OFFLOADS_STATES[kind], OFFLOADS_ACTIVATIONS[kind]
    only_optimizer = OFFLOADS_OPTIMIZER[kind] & ~states
    saved, weights = away.saved * activations, away.weights * states
    passes_back = 1 + (np.asarray(recompute) == 2)
    return StepTraffic(
        forward=HostTraffic(to_host=saved, to_device=weights),
        backward=HostTraffic(to_host=away.gradients * states, to_device=weights * passes_back + saved),
        update=HostTraffic(
            to_host=away.owned_gradients * only_optimizer, to_device=away.owned_weights * only_optimizer
        ),
    )


def offload_traffic(
    layouts: Layouts,
    *,
    parameters: Floats,
    owned: Floats,
    saved: Floats,
    gradients: Floats | None = None,
) -> HostTraffic:
    """Bytes that one device sends to its host and fetches from it in one step: `step_traffic` over all micro-batches.

    Args:
        layouts: The layouts.
        parameters: Elements of the weights that the rank keeps: all it computes with, or with ZeRO-3 its partition.
        owned: Elements that the rank updates.
        saved: Bytes that the rank's layers save for one micro-batch.
        gradients: Elements of the gradients that the rank keeps; None if as many as the weights.
    """
    recipe = known_recipe(layouts.precision)
    away = Away(
        weights=parameters * recipe.parameter,
        gradients=(parameters if gradients is None else gradients) * recipe.gradient,
        owned_weights=owned * recipe.parameter,
        owned_gradients=owned * recipe.gradient,
        saved=saved,
    )
    step = step_traffic(layouts.offload, layouts.recompute, away)
    return step.forward.plus(step.backward).times(layouts.num_micro_batches).plus(step.update)
